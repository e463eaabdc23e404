"""A whole node in use, and the folder of the objects that are made of it."""

from __future__ import annotations

from pathlib import Path

from agent.cluster.object_watch import WatchedPod
from agent.cluster.topology.node_view import NodeState, PodUsage
from agent.kubelet import podresources as kubelet
from agent.kubelet.kubelet_config import KubeletSettings
from agent.model.allocation import PodRef
from agent.model.device import Snapshot
from tests.agent.cluster.topology.two_sockets import GIB, offered

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
        kubelet=KubeletSettings("single-numa-node", "pod", cpu_manager="static"),
        pods=(PodUsage.of(pod), PodUsage("kube-system", "node-agent")),
        allocatable=kubelet.Allocatable(
            (kubelet.DeviceAssignment("vendor.com/fpga", ("f0", "f1"), (0,)),), tuple(cpus), blocks
        ),
        watched=(
            WatchedPod("training", "rank-0", "uid-rank-0", "Running", True, frozenset({"rdma/vf"})),
            WatchedPod("kube-system", "node-agent", "uid-agent", "Running"),
            WatchedPod("training", "rank-0-before", "uid-before", "Succeeded"),
        ),
    )
