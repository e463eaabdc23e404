"""A node on which there is one of everything, and all that is reported of it, in the folder `golden`.

.venv/bin/python -m tests.agent.report.golden    writes the files: read the difference before you commit it
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from agent.config import Config, Endpoints
from agent.edits.add_facts import NOTED, RdmaFacts
from agent.errors import NetlinkFailed
from agent.model.allocation import Attachment, AttachmentState, ClaimState, Hold, OwedLease, Quarantine, Undo
from agent.model.cloud_topology import Places
from agent.model.counters import Counters, RdmaPortCounters, VfCounters
from agent.model.device import MigDevice, Problem, Snapshot
from agent.model.health import HEALTHY, Health, unhealthy
from agent.offer.left_out import LeftOut
from agent.offer.offer import Unit
from agent.offer.selection import Why
from agent.report import chart, status, status_text, svg
from agent.report.events import Events
from agent.report.facts import DriverState, Facts
from agent.report.metrics import Metrics
from agent.state import Latest
from tests.agent.ledger.test_claims import claim, of_share, of_vf
from tests.node import POD, owner, recorded_node

PF, VF, OTHER, CLAIMED, BOUND, LEFT, FORMER, MADE = (f"0000:18:00.{n}" for n in range(8))
GPU = "GPU-8fbb9b0e-0000-4000-8000-000000000000"
LINK_DOWN = unhealthy("LinkDown")
DRIVER = DriverState(
    "nodefabric.io", "", 2, frozenset({"taints"}), (("rdma/vf", "LinkDown", 1), ("rdma/vf", "healthy", 7))
)
ANSWER = {
    "interfaces": [{"name": "eth0"}, {"name": "net1"}],
    "ips": [
        {"address": "10.244.0.2/24", "interface": 0},
        {"address": "10.9.0.2/24", "interface": 1},
        {"address": "fd09::2/64", "interface": 1},
        {"address": "192.168.0.1/24"},
    ],
}
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
    request={NOTED: RdmaFacts("mlx5_2", True, 1, 5).document()},
    result=ANSWER,
    since=5.0,
)
COUNTERS = Counters(
    (RdmaPortCounters(PF, "mlx5_0", 1, True, {"port_xmit_data": 250, "symbol_error": 3}, {"out_of_sequence": 7}),),
    (VfCounters(VF, "ens1f0np0", 0, 0, {"rx_bytes": 1500, "tx_dropped": 4}),),
)


def snapshot() -> Snapshot:
    """Two GPUs, one with a slice, and the adapter beside that with its VFs."""
    found = recorded_node("h100-8gpu")
    slices = (MigDevice("MIG-1", "1g.10gb", 7, 0, 10 << 30),)
    gpu = replace(
        found.gpus[0],
        uuid=GPU,
        mig_mode=True,
        mig_devices=slices,
        ailments=("GpuLost",),
        nvlinks=((found.gpus[1].uuid, 18),),
    )
    gpus = (gpu, replace(found.gpus[1], nvlinks=((GPU, 18),)))
    shown = {each.pci_address for each in gpus}
    here = tuple(d for d in found.devices if d.address.startswith("0000:18:") or d.address in shown)
    problems = (Problem("/sys/x", "cannot be read"),)
    return replace(found, devices=here, accelerators=(), gpus=gpus, problems=problems, generation=7)


def hosts() -> dict[str, Snapshot]:
    """Return nodes of other kinds, some with less known of them."""
    names = ("one-nic", "one-numa-node", "ib-dual-port", "mi250-8gpu", "azure-nd-h100", "gb300-4gpu", "epyc-no-switch")
    found = {name: recorded_node(name) for name in names}
    efa = recorded_node("efa")
    unseen = tuple(d for d in efa.devices if d.pci_class >> 16 != 0x03)
    gpus = tuple(replace(gpu, nvlinks=()) for gpu in efa.gpus)
    vpd = Problem("/sys/bus/pci/devices/0009:03:00.0/vpd", "cannot be read: Permission denied")
    ids = tuple(each for each in found["gb300-4gpu"].adapter_ids if each[0] != "0009:03:00.0")
    return found | {
        "nothing": Snapshot(),
        "GPUs that the scan does not show": replace(efa, devices=unseen, gpus=gpus),
        "a cloud that is not known": replace(found["azure-nd-h100"], places=Places()),
        "an adapter whose product data cannot be read": replace(found["gb300-4gpu"], adapter_ids=ids, problems=(vpd,)),
    }


def unit(unit_id: str, device: str, health: Health = HEALTHY, resource: str = "rdma/vf", **more: Any) -> Unit:
    """Make a unit."""
    return Unit(unit_id, resource, resource.partition("/")[2], device, health, more.pop("numa_node", 0), **more)


def facts() -> Facts:
    """All that is known of the node."""
    slots = [unit(f"slot-{n}", "", numa_node=numa, is_slot=True) for n, numa in enumerate((0, 0, -1))]
    rail = unit("rail-0", PF, resource="rdma/rail", gpu=GPU)
    rail = replace(rail, further=(replace(rail, device=OTHER, gpu=""),))
    shares = tuple(unit(f"guid-{n}", PF, resource="rdma/hca") for n in range(2))
    prepared = replace(claim("c", of_vf(CLAIMED), of_share()), state=ClaimState.PREPARED, since=40.0)
    leaving = [replace(claim(f"left-{n}", of_vf(LEFT)), state=ClaimState.UNPREPARING, since=50.0 + n) for n in (1, 0)]
    return Facts(
        snapshot(),
        {
            "rdma/vf": (unit("vf-1", VF), unit("vf-2", OTHER, LINK_DOWN), unit("vf-3", CLAIMED), *slots),
            "rdma/rail": (rail,),
            "rdma/hca": shares,
            "rdma/none": (),
        },
        (
            Hold("vf-1", "rdma/vf", (VF,), 3.0, POD),
            Hold("vf-2", "rdma/vf", (OTHER,), 4.0),
            Hold("slot-0", "rdma/vf", (BOUND,), 3.0, POD),
            Hold("slot-1", "rdma/vf", (), 4.0),
            Hold("rail-0", "rdma/rail", (PF, OTHER), 3.0, POD),
            Hold("former", "rdma/former", (FORMER,), 3.0, POD),
            *(Hold(share.unit_id, "rdma/hca", (PF,), 3.0, POD) for share in shares),
        ),
        (
            ROW,
            replace(ROW, attachment_id=2, device=CLAIMED, claim_uid="uid-c", request={}),
            replace(ROW, attachment_id=3, device=MADE, state=AttachmentState.ATTACHING, result=None),
            replace(ROW, attachment_id=4, device=OTHER, resource_name="rdma/rail", state=AttachmentState.DETACHING),
        ),
        (Quarantine(OTHER, "clean-up failed: it is stuck", 6.0),),
        12.34,
        (
            OwedLease(1, "0123456789abcdef", "net1", "/x", {"network": {"ipam": {"type": "host-local"}}}, 7.0),
            OwedLease(2, "c2", "net1", "/x", {"network": None}, 8.0, 9.0, "it hangs"),
        ),
        {"vf-1": "worker"},
        ("kubelet", "publishing"),
        adapters=frozenset({("rdma/vf", PF)}),
        claims=(prepared, *leaving),
        driver=DRIVER,
        rails={PF: (5, 1)},
    )


LEFT_OUT = (
    LeftOut("rdma/vf", Why.NO_VFS, "", ("0000:3a:00.0",), "1 adapter (ens2f0np0)"),
    LeftOut("rdma/vf", Why.UNHEALTHY, "LinkDown", (OTHER,), "1 VF (ens1f0np0: VF 1)"),
)


def document(found: Facts | None = None, **obstacles: str) -> dict[str, Any]:
    """Make the status document, of the whole node unless of something else, where nothing has happened."""
    if found is not None:
        return status.build(found, node="n1", version="1.2", kinds={}, conditions=obstacles)
    events = Events(lambda: 95.0)
    events.note("attach", VF, "is net1")
    for _ in range(3):
        events.note("health", VF, "LinkDown", warning=True)
    return status.build(
        facts(),
        node="n1",
        version="1.2",
        kinds={"rdma/vf": "vf", "rdma/hca": "hca", "rdma/rail": "rail"},
        conditions={"kubelet": "has no open stream", "publishing": "the API server is away"},
        events=events.listed(),
        left_out=LEFT_OUT,
    )


def metrics(*, exporter_names: bool = True) -> Metrics:
    """Make the metrics, with the names of sriov-network-metrics-exporter if wanted."""
    made = Metrics(CollectorRegistry(), clock=partial(next, itertools.count(step=0.25)))
    with made.observe("Allocate", "rdma/vf"), made.observe_cni("ADD"):
        made.observe_steps({"plan": 0.5, "device": 0.015625})
    for error in (NetlinkFailed("move", 19, "No such device"), KeyError("x"), asyncio.CancelledError()):
        with suppress(type(error)), made.observe("Allocate", "rdma/vf"):
            raise error
    with made.observe_cni("DEL") as seen:
        seen.outcome = "DeviceBusy"
    for number in range(2):  # no series for each word from the wire
        with made.observe_cni(f"X{number}"):
            pass
    made.reconciled("detach", "owner-gone")
    made.heal_failed("slots")
    made.api_write("NodeResourceTopology", "accepted")
    made.spooled(3)
    made.reloaded("refused")
    made.overlapping(2)
    made.add_facts(lambda: replace(facts(), exporter_names=exporter_names), "1.2")
    made.add_adapters(lambda: COUNTERS, Latest(Config(endpoints=Endpoints(exporter_names=exporter_names))))
    return made


def series(text: str) -> list[str]:
    """Leave out what is of this process, and how durations are spread."""
    return [line for line in text.splitlines() if line.startswith(("nodefabric_", "sriov_")) and "_bucket{" not in line]


def topologies() -> str:
    """Draw the tables of nodes of other kinds."""
    return "\n\n\n".join(f"{name}\n\n{chart.as_text(found)}" for name, found in hosts().items())


REPORTED: dict[str, Callable[[], str]] = {
    "status.json": lambda: json.dumps(document(), indent=1),
    "status.txt": lambda: status_text.text(document(), 4000.0),
    "events.txt": lambda: status_text.events_text(document()["events"], 100.0),
    "topology.txt": lambda: chart.as_text(snapshot(), with_vfs=True),
    "topology.json": lambda: json.dumps(chart.as_document(snapshot()), indent=1),
    "topology.svg": lambda: svg.draw(snapshot(), "n1").rstrip("\n"),
    "topologies.txt": topologies,
    "metrics.txt": lambda: "\n".join(series(metrics().render()[1].decode())),
}
"""The content of each file."""
FOLDER = Path(__file__).with_suffix("")


if __name__ == "__main__":
    for name, content in REPORTED.items():
        (FOLDER / name).write_text(f"{content()}\n")
