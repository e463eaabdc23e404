"""Nodes as what is published sees them: of two sockets, whole and in use, or two adapters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agent.cluster.object_watch import WatchedPod
from agent.cluster.topology.node_view import NodeState
from agent.kubelet import podresources as kubelet
from agent.kubelet.kubelet_config import KubeletSettings
from agent.model.allocation import PodRef
from agent.model.device import NumaNode, PciDevice, RdmaDevice, Snapshot
from agent.model.health import HEALTHY, Health
from agent.offer.offer import Unit
from tests.node import pci

GIB = 1 << 30
PAGE = 2 << 20
NOTHING_RESERVED = KubeletSettings(eviction_bytes=0)


def offered(
    unit_id: str, numa_node: int, resource_name: str = "rdma/vf", health: Health = HEALTHY, device: str = ""
) -> Unit:
    """Make a unit of which only what topology asks for is known."""
    return Unit(unit_id, resource_name, "vf", device, health, numa_node)


def pod_with(
    name: str = "p",
    units: Iterable[str] = (),
    cpus: Mapping[str, Sequence[int]] = MappingProxyType({}),
    memory: tuple[kubelet.MemoryBlock, ...] = (),
    resource: str = "rdma/vf",
) -> kubelet.PodDevices:
    """A pod with a container `c` that has these units, and containers with CPUs of their own."""
    owned = {"c": (), **cpus}
    devices = {"c": (kubelet.DeviceAssignment(resource, tuple(units)),)}
    containers = [kubelet.ContainerDevices(c, devices.get(c, ()), tuple(own)) for c, own in owned.items()]
    return kubelet.PodDevices(PodRef("ns", name), tuple(containers), memory=memory)


TWO_SOCKETS = Snapshot(
    numa_nodes=(
        NumaNode(0, (0, 1, 2, 3), 64 * GIB, ((PAGE, 1024), (GIB, 0)), (10, 21)),
        NumaNode(1, (4, 5, 6, 7), 32 * GIB, ((PAGE, 0), (GIB, 0)), (21, 10)),
    )
)
NODE = NodeState("worker-1", TWO_SOCKETS, {}, kubelet=NOTHING_RESERVED)


OBJECTS = Path(__file__).parent / "objects"


def in_use(snapshot: Snapshot) -> NodeState:
    """A node with both managers static, and a pod that owns CPUs, memory and a VF."""
    vfs = [offered(d.address, d.numa_node, device=d.address) for d in snapshot.devices if d.is_vf]
    reserved = {0, 1, 48, 49}
    cpus = tuple(cpu for node in snapshot.numa_nodes for cpu in node.cpus if cpu not in reserved)
    own = snapshot.numa_nodes[1].cpus[4:12]
    pod = kubelet.PodDevices(
        PodRef("training", "rank-0"),
        (
            kubelet.ContainerDevices(
                "trainer",
                (kubelet.DeviceAssignment("rdma/vf", (vfs[-1].unit_id,), (1,)),),
                own,
                (kubelet.MemoryBlock("memory", 64 * GIB, (1,)),),
            ),
        ),
    )
    blocks = tuple(
        kubelet.MemoryBlock("memory", node.memory_bytes - 8 * GIB, (node.number,)) for node in snapshot.numa_nodes
    )
    return NodeState(
        node_name="gpu-7",
        node_uid="6f9b1c4e-0000-4000-8000-000000000007",
        snapshot=snapshot,
        units={"rdma/vf": vfs},
        kubelet=KubeletSettings("single-numa-node", "pod", "36", cpu_manager="static"),
        pods=(pod, kubelet.PodDevices(PodRef("kube-system", "node-agent"))),
        allocatable=kubelet.Allocatable(
            (kubelet.DeviceAssignment("vendor.com/fpga", ("f0", "f1"), (0,)),), tuple(cpus), blocks
        ),
        watched=(
            WatchedPod("training", "rank-0", "uid-rank-0", "Running", True, frozenset({"rdma/vf"})),
            WatchedPod("kube-system", "node-agent", "uid-agent", "Running"),
            WatchedPod("training", "rank-0-before", "uid-before", "Succeeded"),
        ),
    )


def adapter(address: str, **changes: Any) -> PciDevice:
    rdma = RdmaDevice(f"mlx5_{address[5:7]}", "CA", f"946d:ae03:0000:{address[5:7]}00", "28.39.3004", (), ())
    return replace(pci(address, (f"pci{address[:7]}",), rdma_devices=(rdma,)), **changes)


ONE, TWO = adapter("0000:3b:00.0"), adapter("0000:5e:00.0")
