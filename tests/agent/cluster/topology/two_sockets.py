"""A node of two sockets, and units on it."""

from __future__ import annotations

from agent.cluster.topology.node_view import NodeState
from agent.kubelet.kubelet_config import KubeletSettings
from agent.model.device import NumaNode, Snapshot
from agent.model.health import HEALTHY, Health
from agent.offer.offer import Unit

GIB = 1 << 30
PAGE = 2 << 20
NOTHING_RESERVED = KubeletSettings(eviction_bytes=0)


def offered(
    unit_id: str, numa_node: int, resource_name: str = "rdma/vf", health: Health = HEALTHY, device: str = ""
) -> Unit:
    """Make a unit of which only what topology asks for is known."""
    return Unit(unit_id, resource_name, "vf", device, health, numa_node)


TWO_SOCKETS = Snapshot(
    numa_nodes=(
        NumaNode(0, (0, 1, 2, 3), 64 * GIB, ((PAGE, 1024), (GIB, 0)), (10, 21)),
        NumaNode(1, (4, 5, 6, 7), 32 * GIB, ((PAGE, 0), (GIB, 0)), (21, 10)),
    )
)
NODE = NodeState("worker-1", TWO_SOCKETS, {}, kubelet=NOTHING_RESERVED)
