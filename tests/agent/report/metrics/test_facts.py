"""Series of the node's facts, of claims and their driver, and of what the agent does."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from agent.config import HealthSettings
from agent.errors import ClaimConflict, DeviceBusy, LedgerError, NetlinkFailed, Unavailable
from agent.health_history import HealthHistory
from agent.model.allocation import Attachment, AttachmentState, ClaimState, PodRef, Quarantine
from agent.model.device import Gpu, MigDevice, PciDevice, Problem, Snapshot
from agent.model.health import HEALTHY, Health, unhealthy
from agent.offer.offer import Unit
from agent.process.conditions import Conditions
from agent.report.events import Events
from agent.report.facts import DriverState, Facts
from agent.report.metrics import Metrics
from agent.report.report import Report
from tests.agent.ledger.test_claims import claim, of_share, of_vf
from tests.node import POD as CLAIMANT
from tests.node import UNDO, VF, owner, pci, unit_hold

POD = PodRef("team", "trainer-0", "uid-1")


def offered(resource_name: str, unit_id: str, device: str, numa_node: int = 0, health: Health = HEALTHY) -> Unit:
    return Unit(unit_id, resource_name, "vf", device, health, numa_node)


def function(address: str, *, physfn: str | None = None, totalvfs: int = 0, pci_class: int = 0x020000) -> PciDevice:
    return pci(address, physfn=physfn, sriov_totalvfs=totalvfs, pci_class=pci_class)


def attachment(device: str, state: AttachmentState) -> Attachment:
    return Attachment(
        attachment_id=1,
        owner=owner("sandbox", "eth0", POD),
        ifname="net1",
        device=device,
        resource_name="rdma/vf",
        state=state,
        undo=UNDO,
        boot_id="boot",
        netns_path="/var/run/netns/a",
        request={},
        result=None,
        since=0.0,
    )


VF0, VF1 = "0000:3b:00.2", "0000:3b:00.3"
FACTS = Facts(
    snapshot=Snapshot(
        devices=(
            function("0000:3b:00.0", totalvfs=2),
            function(VF0, physfn="0000:3b:00.0"),
            function(VF1, physfn="0000:3b:00.0"),
            function("0000:5e:00.0"),
            function("0000:5f:00.0", pci_class=0x030200),
        ),
        gpus=(Gpu("GPU-1", 0, 0, "0000:5f:00.0", "H100", 80 << 30),),
        problems=(Problem("/sys/x", "unreadable"),),
    ),
    units={
        "rdma/vf": (offered("rdma/vf", VF0, VF0), offered("rdma/vf", VF1, VF1, health=unhealthy("LinkDown"))),
        "rdma/hca": (),
    },
    holds=(unit_hold(VF0, "rdma/vf", VF0, 0.0, POD), unit_hold("unbound", "rdma/hca", "0000:5e:00.0", 0.0)),
    attachments=(attachment(VF0, AttachmentState.ATTACHED),),
    quarantines=(Quarantine("0000:3b:00.9", "ResetFailed", 0.0),),
    scan_milliseconds=12.5,
)


def metrics_of(facts: Facts) -> CollectorRegistry:
    registry = CollectorRegistry()
    Metrics(registry).add_facts(lambda: facts, "1.2.3")
    return registry


DRIVER = DriverState(
    "nodefabric.io", "", 3, frozenset({"taints"}), (("rdma/vf", "LinkDown", 1), ("rdma/vf", "healthy", 7))
)


def allocation(unit: str, device: str, resource: str, numa_node: str = "0", container: str = "") -> dict[str, str]:
    pod = {"namespace": "team", "pod": "trainer-0"}
    return pod | {"container": container, "resource": resource, "unit": unit, "device": device, "numa_node": numa_node}


def exporters(device: str, resource: str) -> dict[str, str]:
    return {"pciAddr": device, "dev_type": resource, "pod": "trainer-0", "namespace": "team", "container": ""}


def leaving(*since: float) -> Facts:
    """Make claims on their way back, beside one that is not."""
    rows = [replace(claim(f"c{at}"), state=ClaimState.UNPREPARING, since=at) for at in since]
    return Facts(Snapshot(), claims=(*rows, claim("c")))


RAIL = replace(FACTS, holds=(unit_hold("rail-GPU-1", "rdma/rail", VF0, 0.0, POD, others=(VF1,)),), exporter_names=True)
EXPORTER = replace(FACTS, exporter_names=True)
FORMER = replace(FACTS, units={"rdma/other": (offered("rdma/other", VF1, VF1),)})
HOST = Facts(
    Snapshot(
        gpus=(
            Gpu(
                *("GPU-1", 3, 3, "0000:5f:00.0", "H100", 80 << 30),
                nvlinks=(("GPU-2", 18),),
                mig_mode=True,
                mig_devices=(MigDevice("MIG-1", "1g.10gb", 1, 0, 10 << 30),),
                ailments=("GpuLost",),
            ),
        )
    )
)
HUNG = replace(HOST, snapshot=replace(HOST.snapshot, problems=(Problem("nvml", "does not answer"),)))
OF_CLAIMS = Facts(Snapshot(), driver=DRIVER)
NOT_FOUND = Facts(Snapshot(), driver=DriverState("d.io", "kubelet has not found it"))
PREPARED = tuple(replace(claim(name), state=ClaimState.PREPARED) for name in ("one", "two"))
ATTACHED = replace(attachment(VF, AttachmentState.ATTACHED), claim_uid="uid-one")
TWO_CLAIMS = replace(OF_CLAIMS, claims=PREPARED, attachments=(ATTACHED,))
OF_TWO_RESOURCES = replace(OF_CLAIMS, claims=(claim("c", of_vf(), of_vf(VF1, "other"), of_share()),))
HCAS = tuple(offered("rdma/hca", f"guid-{i}", "0000:5e:00.0") for i in range(2))
TWO_HCAS = Facts(
    Snapshot(),
    units={"rdma/hca": HCAS},
    holds=tuple(unit_hold(unit.unit_id, "rdma/hca", unit.device, 0.0, POD) for unit in HCAS),
)
SHARES = Facts(Snapshot(), claims=(claim("c", of_share("s1"), of_share("s2")),))
SHARE = {
    "namespace": CLAIMANT.namespace,
    "pod": CLAIMANT.name,
    "container": "",
    "resource": "rdma/hca",
    "unit": "",
    "device": "0000:3b:00.0",
    "numa_node": "-1",
}


@pytest.mark.parametrize(
    ("facts", "name", "labels", "value"),
    [
        *(
            (FACTS, "units", {"resource": "rdma/vf", "state": state}, 1)
            for state in ("healthy", "unhealthy", "granted", "attached")
        ),
        (FACTS, "units", {"resource": "rdma/hca", "state": "healthy"}, 0),
        (FACTS, "unit_unhealthy", {"resource": "rdma/vf", "reason": "LinkDown"}, 1),
        (
            replace(FACTS, adapters=frozenset({("rdma/vf", "0000:3b:00.0")})),
            *("adapter_offered", {"resource": "rdma/vf", "device": "0000:3b:00.0"}, 1),
        ),
        (
            replace(FACTS, containers={VF0: "main"}),
            *("allocation_info", allocation(VF0, VF0, "rdma/vf", container="main"), 1),
        ),
        (RAIL, "allocation_info", allocation("rail-GPU-1", VF0, "rdma/rail"), 1),
        (RAIL, "allocation_info", allocation("rail-GPU-1", VF1, "rdma/rail"), 1),
        (RAIL, "sriov_kubepoddevice", exporters(VF0, "rdma/rail"), 1),
        (RAIL, "sriov_kubepoddevice", exporters(VF1, "rdma/rail"), 1),
        (FACTS, "sriov_kubepoddevice", exporters(VF0, "rdma/vf"), None),
        (EXPORTER, "sriov_kubepoddevice", exporters(VF0, "rdma/vf"), 1),
        (FORMER, "allocation_info", allocation(VF0, VF0, "rdma/vf"), 1),
        (TWO_HCAS, "allocation_info", allocation("guid-0", "0000:5e:00.0", "rdma/hca"), 1),
        (TWO_HCAS, "allocation_info", allocation("guid-1", "0000:5e:00.0", "rdma/hca"), 1),
        (
            replace(FACTS, holds=(), units={}),  # brought in by CNI without a unit
            *("allocation_info", allocation("", VF0, "rdma/vf"), 1),
        ),
        *(
            (FACTS, "devices", {"kind": kind}, count)
            for kind, count in (("gpu", 1), ("nic", 1), ("pf", 1), ("rdma", 0), ("vf", 2))
        ),
        (FACTS, "attachments", {"state": "attached"}, 1),
        (FACTS, "attachments", {"state": "attaching"}, 0),
        (FACTS, "quarantined_devices", {"reason": "ResetFailed"}, 1),
        (FACTS, "scan_duration_milliseconds", {}, 12.5),
        (FACTS, "scan_problems", {}, 1),
        (FACTS, "build_info", {"version": "1.2.3"}, 1),
        (
            HOST,
            "gpu_info",
            {
                "gpu": "GPU-1",
                "device": "0000:5f:00.0",
                "name": "H100",
                "index": "3",
                "mig": "enabled",
                "fabric_clique": "",
            },
            1,
        ),
        (HOST, "gpu_memory_bytes", {"gpu": "GPU-1", "mig_device": "MIG-1", "profile": "1g.10gb"}, 10 << 30),
        (HOST, "gpu_nvlink_peers", {"gpu": "GPU-1"}, 1),
        (HOST, "gpu_ailment", {"gpu": "GPU-1", "reason": "GpuLost"}, 1),
        (HOST, "gpu_monitor_available", {}, 1),
        (HUNG, "gpu_monitor_available", {}, 0),
        (OF_CLAIMS, "dra_claims", {"resource": "rdma/vf", "state": "prepared"}, 0),
        (FACTS, "dra_claims", {"resource": "rdma/vf", "state": "prepared"}, None),
        (FACTS, "dra_slices", {}, None),
        *(
            (TWO_CLAIMS, "dra_claims", {"resource": "rdma/vf", "state": state}, count)
            for state, count in (("attached", 1), ("prepared", 1), ("preparing", 0), ("unpreparing", 0))
        ),
        *(
            (OF_TWO_RESOURCES, "dra_claims", {"resource": resource, "state": "preparing"}, 1)
            for resource in ("rdma/vf", "rdma/hca")
        ),
        (leaving(50.0, 40.0), "dra_unpreparing_since_seconds", {}, 40),
        (leaving(), "dra_unpreparing_since_seconds", {}, None),
        (OF_CLAIMS, "dra_registered", {"driver": "nodefabric.io"}, 1),
        (OF_CLAIMS, "dra_slices", {}, 3),
        (OF_CLAIMS, "dra_dropped", {"feature": "taints"}, 1),
        (OF_CLAIMS, "dra_devices", {"resource": "rdma/vf", "health": "LinkDown"}, 1),
        (NOT_FOUND, "dra_registered", {"driver": "d.io"}, 0),
        (NOT_FOUND, "dra_slices", {}, None),
        (SHARES, "allocation_info", SHARE, 1),
    ],
)
def test_each_fact_has_its_series(facts: Facts, name: str, labels: dict[str, str], value: float | None) -> None:
    name = name if name.startswith("sriov_") else f"nodefabric_{name}"
    assert metrics_of(facts).get_sample_value(name, labels) == value


def test_a_granted_device_that_is_still_on_its_way_back_is_joined_with_its_new_pod_alone() -> None:
    row = attachment(VF0, AttachmentState.DETACHING)
    former = replace(row, owner=replace(row.owner, pod=replace(POD, name="former", uid="former")))
    registry = metrics_of(replace(FACTS, attachments=(former,)))
    (family,) = [f for f in registry.collect() if f.name == "nodefabric_allocation_info"]
    assert [s.labels["pod"] for s in family.samples if s.labels["device"] == VF0] == ["trainer-0"]


def test_a_broken_ledger_leaves_out_the_facts_and_nothing_else() -> None:
    def broken() -> Facts:
        raise LedgerError("disk full")

    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.add_facts(broken, "1.2.3")
    _, text = metrics.render()
    assert b"nodefabric_facts_available 0.0" in text
    assert b"nodefabric_build_info" in text
    assert b"nodefabric_units" not in text


def test_durations_are_milliseconds_and_carry_the_outcome() -> None:
    ticks = iter((1.0, 1.004, 2.0, 2.5))
    registry = CollectorRegistry()
    metrics = Metrics(registry, clock=lambda: next(ticks))
    with metrics.observe("Allocate", "rdma/vf"):
        pass
    with pytest.raises(NetlinkFailed), metrics.observe("Allocate", "rdma/vf"):
        raise NetlinkFailed("move", 19, "No such device")
    name = "nodefabric_rpc_duration_milliseconds_sum"
    labels = {"operation": "Allocate", "resource": "rdma/vf"}
    assert registry.get_sample_value(name, labels | {"outcome": "ok"}) == pytest.approx(4)
    assert registry.get_sample_value(name, labels | {"outcome": "NetlinkFailed"}) == pytest.approx(500)


@pytest.mark.parametrize(
    ("error", "outcome"), [(KeyError("x"), "Internal"), (asyncio.CancelledError(), "Cancelled"), (None, "DeviceBusy")]
)
def test_each_way_to_end_is_an_outcome(error: BaseException | None, outcome: str) -> None:
    registry = CollectorRegistry()
    with suppress(KeyError, asyncio.CancelledError), Metrics(registry).observe_cni("DEL") as seen:
        if error is not None:
            raise error
        seen.outcome = outcome
    labels = {"command": "DEL", "outcome": outcome}
    assert registry.get_sample_value("nodefabric_cni_duration_milliseconds_count", labels) == 1


def test_commands_from_the_wire_cannot_make_new_series() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    for i in range(50):
        with metrics.observe_cni(f"X{i}"):
            pass
    labels = {"command": "other", "outcome": "ok"}
    assert registry.get_sample_value("nodefabric_cni_duration_milliseconds_count", labels) == 50


def test_counters_end_in_total() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.reconciled("detach", "owner-gone")
    metrics.api_write("NodeResourceTopology", "accepted")
    metrics.spooled(3)
    labels = {"action": "detach", "reason": "owner-gone"}
    assert registry.get_sample_value("nodefabric_reconcile_actions_total", labels) == 1
    labels = {"object": "NodeResourceTopology", "outcome": "accepted"}
    assert registry.get_sample_value("nodefabric_api_writes_total", labels) == 1
    assert registry.get_sample_value("nodefabric_spooled_requests_total") == 3


def test_the_agents_own_memory_is_shown() -> None:
    value = metrics_of(FACTS).get_sample_value("process_resident_memory_bytes")
    assert value is not None
    assert value > 0


def test_the_steps_of_an_add_are_counted() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    for _ in range(3):
        metrics.observe_steps({"plan": 0.0005, "device": 0.015})
    name = "nodefabric_cni_step_duration_milliseconds"
    assert registry.get_sample_value(f"{name}_count", {"step": "device"}) == 3
    assert registry.get_sample_value(f"{name}_sum", {"step": "device"}) == pytest.approx(45)
    assert registry.get_sample_value(f"{name}_sum", {"step": "plan"}) == pytest.approx(1.5)


def test_a_conflict_is_counted_at_once_or_after_waiting_and_other_failures_are_not() -> None:
    registry = CollectorRegistry()
    report = Report(Metrics(registry), Conditions(), Events(), HealthHistory(HealthSettings()))
    ref = claim().ref
    report.claim_failed(ref, "not prepared", ClaimConflict(VF, "claimed by default/other"))
    waited = DeviceBusy("still so after 35 s")
    waited.__cause__ = ClaimConflict(VF, "attached to default/trainer (sandbox c1)")
    report.claim_failed(ref, "not prepared", waited)
    report.claim_failed(ref, "not prepared", Unavailable("the API server is away"))
    by_holder = {
        holder: registry.get_sample_value("nodefabric_dra_conflicts_total", {"holder": holder})
        for holder in ("claim", "pod")
    }
    assert by_holder == {"claim": 1, "pod": 1}
