from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from agent.errors import LedgerError, NetlinkFailed
from agent.model.allocation import Attachment, AttachmentState, Grant, NetnsId, Owner, PodRef, Quarantine, Undo
from agent.model.device import Gpu, MigDevice, PciDevice, Problem, Snapshot
from agent.model.health import HEALTHY, Health, unhealthy
from agent.offer.offer import Unit
from agent.report.facts import Facts
from agent.report.metrics import Metrics
from agent.report.metrics.instruments import MOST_PENDING

POD = PodRef("team", "trainer-0", "uid-1")


def offered(resource_name: str, unit_id: str, device: str, numa_node: int = 0, health: Health = HEALTHY) -> Unit:
    return Unit(unit_id, resource_name, "vf", device, health, numa_node)


def function(address: str, *, physfn: str | None = None, totalvfs: int = 0, pci_class: int = 0x020000) -> PciDevice:
    return PciDevice(
        address=address,
        path=("pci0000:3a", address),
        pci_class=pci_class,
        vendor=0x15B3,
        device=0x101E,
        driver="mlx5_core",
        numa_node=0,
        iommu_group=None,
        physfn=physfn,
        sriov_totalvfs=totalvfs,
    )


def attachment(device: str, state: AttachmentState) -> Attachment:
    return Attachment(
        attachment_id=1,
        owner=Owner("sandbox", "eth0", POD, NetnsId(4, 4026531840)),
        ifname="net1",
        device=device,
        resource_name="rdma/vf",
        state=state,
        undo=Undo("ens1f0v0", "02:00:00:00:00:01", 1500, False),
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
    grants=(Grant(VF0, "rdma/vf", VF0, 0.0, POD), Grant("unbound", "rdma/hca", "0000:5e:00.0", 0.0)),
    attachments=(attachment(VF0, AttachmentState.ATTACHED),),
    quarantines=(Quarantine("0000:3b:00.9", "ResetFailed", 0.0),),
    scan_milliseconds=12.5,
)


def metrics_of(facts: Facts) -> CollectorRegistry:
    registry = CollectorRegistry()
    Metrics(registry).add_facts(lambda: facts, "1.2.3")
    return registry


def test_units_are_counted_by_state_and_a_resource_without_units_shows_zero() -> None:
    registry = metrics_of(FACTS)
    counts = {
        state: registry.get_sample_value("nodefabric_units", {"resource": "rdma/vf", "state": state})
        for state in ("healthy", "unhealthy", "granted", "attached")
    }
    assert counts == {"healthy": 1, "unhealthy": 1, "granted": 1, "attached": 1}
    assert registry.get_sample_value("nodefabric_units", {"resource": "rdma/hca", "state": "healthy"}) == 0


def test_adapters_are_told_with_the_resources_that_offer_them() -> None:
    registry = metrics_of(replace(FACTS, adapters=frozenset({("rdma/vf", "0000:3b:00.0")})))
    labels = {"resource": "rdma/vf", "device": "0000:3b:00.0"}
    assert registry.get_sample_value("nodefabric_adapter_offered", labels) == 1


def test_an_unhealthy_unit_shows_its_reason() -> None:
    labels = {"resource": "rdma/vf", "reason": "LinkDown"}
    assert metrics_of(FACTS).get_sample_value("nodefabric_unit_unhealthy", labels) == 1


def test_an_allocation_names_pod_and_device() -> None:
    labels = {"namespace": "team", "pod": "trainer-0", "resource": "rdma/vf"}
    labels |= {"unit": VF0, "device": VF0, "numa_node": "0", "container": "main"}
    assert (
        metrics_of(replace(FACTS, containers={VF0: "main"})).get_sample_value("nodefabric_allocation_info", labels) == 1
    )


def test_each_nic_of_a_rail_names_its_pod() -> None:
    grant = Grant("rail-GPU-1", "rdma/rail", VF0, 0.0, POD, others=(VF1,))
    made = metrics_of(replace(FACTS, grants=(grant,), exporter_names=True))
    for vf in (VF0, VF1):
        labels = {"namespace": "team", "pod": "trainer-0", "resource": "rdma/rail", "container": ""}
        labels |= {"unit": "rail-GPU-1", "device": vf, "numa_node": "0"}
        assert made.get_sample_value("nodefabric_allocation_info", labels) == 1
        exporters = {"pciAddr": vf, "dev_type": "rdma/rail", "pod": "trainer-0", "namespace": "team", "container": ""}
        assert made.get_sample_value("sriov_kubepoddevice", exporters) == 1


def test_the_exporters_name_for_a_pods_device_comes_only_if_wanted() -> None:
    labels = {"pciAddr": VF0, "dev_type": "rdma/vf", "pod": "trainer-0", "namespace": "team", "container": ""}
    assert metrics_of(FACTS).get_sample_value("sriov_kubepoddevice", labels) is None
    assert metrics_of(replace(FACTS, exporter_names=True)).get_sample_value("sriov_kubepoddevice", labels) == 1


def test_a_gpu_tells_its_facts_and_ailments() -> None:
    slice_ = MigDevice("MIG-1", "1g.10gb", 1, 0, 10 << 30)
    gpu = Gpu(
        *("GPU-1", 3, 3, "0000:5f:00.0", "H100", 80 << 30),
        nvlinks=(("GPU-2", 18),),
        mig_mode=True,
        mig_devices=(slice_,),
        ailments=("GpuLost",),
    )
    registry = metrics_of(Facts(Snapshot(gpus=(gpu,))))
    info = {"gpu": "GPU-1", "device": "0000:5f:00.0", "name": "H100", "index": "3", "mig": "enabled"}
    assert registry.get_sample_value("nodefabric_gpu_info", {**info, "fabric_clique": ""}) == 1
    memory = {"gpu": "GPU-1", "mig_device": "MIG-1", "profile": "1g.10gb"}
    assert registry.get_sample_value("nodefabric_gpu_memory_bytes", memory) == 10 << 30
    assert registry.get_sample_value("nodefabric_gpu_nvlink_peers", {"gpu": "GPU-1"}) == 1
    assert registry.get_sample_value("nodefabric_gpu_ailment", {"gpu": "GPU-1", "reason": "GpuLost"}) == 1
    assert registry.get_sample_value("nodefabric_gpu_monitor_available") == 1
    hung = Snapshot(gpus=(gpu,), problems=(Problem("nvml", "does not answer"),))
    assert metrics_of(Facts(hung)).get_sample_value("nodefabric_gpu_monitor_available") == 0


def test_two_shares_of_one_hca_in_one_pod_are_two_series() -> None:
    shares = tuple(offered("rdma/hca", f"guid-{i}", "0000:5e:00.0") for i in range(2))
    grants = tuple(Grant(u.unit_id, u.resource_name, u.device, 0.0, POD) for u in shares)
    registry = metrics_of(Facts(Snapshot(), units={"rdma/hca": shares}, grants=grants))
    (family,) = [f for f in registry.collect() if f.name == "nodefabric_allocation_info"]
    assert len({tuple(sorted(s.labels.items())) for s in family.samples}) == 2


def test_a_pod_keeps_its_series_when_its_resource_leaves_the_configuration() -> None:
    registry = metrics_of(replace(FACTS, units={"rdma/other": (offered("rdma/other", VF1, VF1),)}))
    labels = {"namespace": "team", "pod": "trainer-0", "container": "", "resource": "rdma/vf"}
    labels |= {"unit": VF0, "device": VF0, "numa_node": "0"}
    assert registry.get_sample_value("nodefabric_allocation_info", labels) == 1


def test_a_unit_that_a_pod_has_of_a_former_resource_is_told_as_that_resources() -> None:
    registry = metrics_of(replace(FACTS, units={"rdma/other": (offered("rdma/other", VF0, VF0),)}))
    (family,) = [f for f in registry.collect() if f.name == "nodefabric_allocation_info"]
    assert [sample.labels["resource"] for sample in family.samples] == ["rdma/vf"]


def test_a_device_that_cni_brought_in_without_a_unit_is_told_with_its_pod() -> None:
    registry = metrics_of(replace(FACTS, grants=(), units={}))
    (family,) = [f for f in registry.collect() if f.name == "nodefabric_allocation_info"]
    (told,) = family.samples
    assert (told.labels["device"], told.labels["pod"], told.labels["unit"]) == (VF0, "trainer-0", "")


def test_shares_of_one_hca_in_one_container_are_one_series_of_the_exporters_name() -> None:
    grants = tuple(Grant(f"guid-{i}", "rdma/hca", "0000:5e:00.0", 0.0, POD) for i in range(2))
    registry = metrics_of(Facts(Snapshot(), grants=grants, exporter_names=True))
    (family,) = [f for f in registry.collect() if f.name == "sriov_kubepoddevice"]
    assert [sample.labels["pciAddr"] for sample in family.samples] == ["0000:5e:00.0"]


def test_devices_attachments_quarantine_and_scan_are_shown() -> None:
    registry = metrics_of(FACTS)
    kinds = {
        k: registry.get_sample_value("nodefabric_devices", {"kind": k}) for k in ("gpu", "nic", "pf", "rdma", "vf")
    }
    assert kinds == {"gpu": 1, "nic": 1, "pf": 1, "rdma": 0, "vf": 2}
    assert registry.get_sample_value("nodefabric_attachments", {"state": "attached"}) == 1
    assert registry.get_sample_value("nodefabric_attachments", {"state": "attaching"}) == 0
    assert registry.get_sample_value("nodefabric_quarantined_devices", {"reason": "ResetFailed"}) == 1
    assert registry.get_sample_value("nodefabric_scan_duration_milliseconds") == 12.5
    assert registry.get_sample_value("nodefabric_scan_problems") == 1
    assert registry.get_sample_value("nodefabric_build_info", {"version": "1.2.3"}) == 1


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


def test_an_unexpected_error_counts_as_internal_and_a_cancelled_call_as_cancelled() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    for error in (KeyError("x"), asyncio.CancelledError()):
        with pytest.raises(type(error)), metrics.observe_cni("ADD"):
            raise error
    for outcome in ("Internal", "Cancelled"):
        labels = {"command": "ADD", "outcome": outcome}
        assert registry.get_sample_value("nodefabric_cni_duration_milliseconds_count", labels) == 1


def test_a_door_that_answers_an_error_names_the_outcome() -> None:
    registry = CollectorRegistry()
    with Metrics(registry).observe_cni("DEL") as seen:
        seen.outcome = "DeviceBusy"
    labels = {"command": "DEL", "outcome": "DeviceBusy"}
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


def test_openmetrics_is_served_to_who_asks_for_it() -> None:
    metrics = Metrics(CollectorRegistry())
    assert metrics.render("application/openmetrics-text; version=1.0.0")[0].startswith("application/openmetrics-text")
    assert metrics.render("text/html")[0].startswith("text/plain")


def test_the_steps_of_an_add_are_counted_when_somebody_looks() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    for _ in range(3):
        metrics.observe_steps({"plan": 0.0005, "device": 0.015})
    name = "nodefabric_cni_step_duration_milliseconds"
    assert registry.get_sample_value(f"{name}_count", {"step": "device"}) == 3
    assert registry.get_sample_value(f"{name}_sum", {"step": "device"}) == pytest.approx(45)
    assert registry.get_sample_value(f"{name}_sum", {"step": "plan"}) == pytest.approx(1.5)


def test_observations_that_nobody_looks_at_do_not_pile_up() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    for _ in range(5 * MOST_PENDING):
        metrics.observe_steps({"plan": 0.001})
    assert len(metrics._pending._waiting) <= MOST_PENDING
    count = registry.get_sample_value("nodefabric_cni_step_duration_milliseconds_count", {"step": "plan"})
    assert count == 5 * MOST_PENDING
