"""A node that holds some devices, and its status document."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agent.model.allocation import Attachment, AttachmentState, OwedLease, Quarantine, Undo
from agent.model.device import Problem, Snapshot
from agent.model.health import HEALTHY, unhealthy
from agent.offer.left_out import LeftOut
from agent.offer.offer import Unit
from agent.offer.selection import Why
from agent.report import status
from agent.report.facts import DriverState, Facts
from tests.node import POD, VF, owner, unit_hold

OTHER = "0000:3b:00.3"


def offered(device: str, reason: str = "") -> Unit:
    """Make one unit of rdma/vf."""
    return Unit(f"unit-{device}", "rdma/vf", "vf", device, unhealthy(reason) if reason else HEALTHY, 0)


def slot(number: int, numa_node: int) -> Unit:
    """Make one unit that has no device yet."""
    return Unit(f"slot-{number}", "rdma/vf", "vf", "", HEALTHY, numa_node, is_slot=True)


ROW = Attachment(
    attachment_id=1,
    owner=owner("c1", "eth0"),
    ifname="net1",
    device=VF,
    resource_name="rdma/vf",
    state=AttachmentState.ATTACHED,
    undo=Undo("ens1f0v0", "02:00:00:00:01:00", 1500, False),
    boot_id="boot",
    netns_path="/x",
    request={},
    result={
        "interfaces": [{"name": "eth0"}, {"name": "net1"}],
        "ips": [
            {"address": "10.244.0.2/24", "interface": 0},
            {"address": "10.9.0.2/24", "interface": 1},
            {"address": "fd09::2/64", "interface": 1},
            {"address": "192.168.0.1/24"},
        ],
    },
    since=5.0,
)
FACTS = Facts(
    Snapshot(problems=(Problem("/sys/x", "cannot be read"),), generation=7),
    {"rdma/vf": (offered(VF), offered(OTHER, "LinkDown")), "rdma/hca": ()},
    (unit_hold(f"unit-{VF}", "rdma/vf", VF, 3.0, POD), unit_hold(f"unit-{OTHER}", "rdma/vf", OTHER, 4.0)),
    (ROW,),
    (Quarantine(OTHER, "clean-up failed: it is stuck", 6.0),),
    12.34,
    (
        OwedLease(1, "0123456789abcdef", "net1", "/x", {"network": {"ipam": {"type": "host-local"}}}, 7.0),
        OwedLease(2, "c2", "net1", "/x", {"network": None}, 8.0, 9.0, "it hangs"),
    ),
)


FACTS = replace(FACTS, containers={f"unit-{VF}": "worker"})


LEFT_OUT = (
    LeftOut("rdma/vf", Why.NO_VFS, "", ("0000:3a:00.0",), "1 adapter (ens2f0np0)"),
    LeftOut("rdma/vf", Why.UNHEALTHY, "LinkDown", (OTHER,), "1 VF (ens1f0np0: VF 1)"),
)


def document(facts: Facts = FACTS, **obstacles: str) -> dict[str, Any]:
    return status.build(
        facts, node="n1", version="1.2", kinds={"rdma/vf": "vf", "rdma/hca": "hca"}, conditions=obstacles
    )


DRIVER = DriverState(
    "nodefabric.io", "", 2, frozenset({"taints"}), (("rdma/vf", "LinkDown", 1), ("rdma/vf", "healthy", 7))
)
