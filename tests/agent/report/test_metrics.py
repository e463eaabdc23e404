"""Series of facts and counters that `golden.py` has not, and what the agent counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client import parser as classic
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from agent.config import Config, HealthSettings
from agent.errors import ClaimConflict, DeviceBusy, HardwareError, LedgerError, Unavailable
from agent.health_history import HealthHistory
from agent.model.allocation import AttachmentState, Hold
from agent.model.counters import Counters, RdmaPortCounters
from agent.model.device import Gpu, Problem, Snapshot
from agent.model.device_health import GpuEvent
from agent.model.health import unhealthy
from agent.process.conditions import Conditions
from agent.report.events import Events
from agent.report.facts import DriverState, Facts
from agent.report.metrics import Metrics
from agent.report.report import GpuErrors, Report
from agent.report.series import OPENMETRICS
from agent.state import Latest
from tests.agent.ledger.test_claims import claim
from tests.agent.report import golden
from tests.agent.report.golden import COUNTERS, ROW, VF
from tests.node import POD, owner


def metrics_of(facts: Facts) -> CollectorRegistry:
    registry = CollectorRegistry()
    Metrics(registry).add_facts(lambda: facts, "1.2.3")
    return registry


HUNG = Facts(Snapshot(problems=(Problem("nvml", "does not answer"),)))
NOT_FOUND = Facts(Snapshot(), driver=DriverState("d.io", "kubelet has not found it"))


@pytest.mark.parametrize(
    ("facts", "name", "labels", "value"),
    [
        (HUNG, "nodefabric_gpu_monitor_available", {}, 0),
        (HUNG, "nodefabric_dra_claims", {"resource": "rdma/vf", "state": "prepared"}, None),
        (HUNG, "nodefabric_dra_unpreparing_since_seconds", {}, None),
        (HUNG, "nodefabric_attachments", {"state": "attached"}, 0),
        (NOT_FOUND, "nodefabric_dra_registered", {"driver": "d.io"}, 0),
        (NOT_FOUND, "nodefabric_dra_slices", {}, None),
    ],
)
def test_what_is_not_there_is_counted_and_what_is_not_known_has_no_series(
    facts: Facts, name: str, labels: dict[str, str], value: float | None
) -> None:
    assert metrics_of(facts).get_sample_value(name, labels) == value


def test_the_exporters_names_come_only_if_wanted() -> None:
    named = {
        wanted: golden.series(golden.metrics(exporter_names=wanted).render()[1].decode()) for wanted in (True, False)
    }
    assert named[False] == [line for line in named[True] if not line.startswith("sriov_")]


def test_a_granted_device_that_is_still_on_its_way_back_is_joined_with_its_new_pod_alone() -> None:
    former = replace(ROW, state=AttachmentState.DETACHING, owner=owner(pod=replace(POD, name="former", uid="former")))
    holds = (Hold("vf-1", "rdma/vf", (VF,), 3.0, POD),)
    registry = metrics_of(Facts(Snapshot(), holds=holds, attachments=(former,)))
    (family,) = [f for f in registry.collect() if f.name == "nodefabric_allocation_info"]
    assert [s.labels["pod"] for s in family.samples if s.labels["device"] == VF] == ["trainer"]


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


def test_the_agents_own_memory_is_shown() -> None:
    value = metrics_of(Facts(Snapshot())).get_sample_value("process_resident_memory_bytes")
    assert value is not None
    assert value > 0


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


def test_both_formats_say_the_same_and_strange_names_are_escaped() -> None:
    port = RdmaPortCounters("0000:18:00.0", 'a"b\\c\nd', 1, True, {"port_xmit_data": 1}, {})
    metrics = Metrics(CollectorRegistry())
    metrics.add_adapters(lambda: Counters((*COUNTERS.rdma, port), COUNTERS.vfs), Latest(Config()))
    read = []
    for accept, parse in (("", classic.text_string_to_metric_families), (OPENMETRICS, text_string_to_metric_families)):
        families = parse(metrics.render(accept)[1].decode())
        samples = (sample for family in families for sample in family.samples)
        read.append({(s.name, *sorted(s.labels.items())): s.value for s in samples if {"pf", "port"} & s.labels.keys()})
    assert read[0] == read[1]
    labels = {"device": port.device, "port": "1", "rdma_device": port.rdma_device}
    assert read[0]["nodefabric_rdma_port_transmit_bytes_total", *labels.items()] == 4


def test_counters_that_cannot_be_read_hide_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)

    def fail() -> Counters:
        raise HardwareError("netlink is closed")

    metrics.add_adapters(fail, Latest(Config()))
    for _ in range(3):
        assert "nodefabric_config_last_reload_success" in metrics.render()[1].decode()
    assert len([r for r in caplog.records if "left out" in r.message]) == 1


def test_openmetrics_ends_once() -> None:
    metrics = Metrics(CollectorRegistry())
    metrics.add_adapters(lambda: COUNTERS, Latest(Config()))
    content_type, text = metrics.render(OPENMETRICS)
    assert content_type.startswith(OPENMETRICS)
    assert text.count(b"# EOF") == 1
    assert text.endswith(b"# EOF\n")
    content_type, text = metrics.render("text/html")
    assert content_type.startswith("text/plain")
    assert b"# EOF" not in text


def test_the_same_error_again_and_again_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    errors = GpuErrors(HealthHistory(), registry, Events())
    for at in range(120):
        errors.take(GpuEvent(79, float(at), "GPU-a"))
    errors.take(GpuEvent(79, 0.0, "GPU-b"))
    assert [r.getMessage() for r in caplog.records] == ["XID 79 (fatal): fallen off the bus"] * 3
    assert registry.get_sample_value("nodefabric_gpu_errors_total", {"xid": "79", "class": "fatal"}) == 121


def test_a_program_that_fails_on_all_gpus_leaves_other_events_in_memory() -> None:
    events = Events()
    errors = GpuErrors(HealthHistory(), CollectorRegistry(), events)
    events.note("grant", "0000:3b:02.1", "rdma/vf to default/trainer-0")
    for channel in range(50):
        for gpu in range(8):
            errors.take(GpuEvent(45, channel / 100, f"GPU-{gpu}"))
    assert [e.kind for e in events.listed()] == [*["health"] * 8, "grant"]


def test_errors_are_judged_counted_by_a_bounded_number_of_labels_and_noted() -> None:
    registry, events = CollectorRegistry(), Events()
    book = HealthHistory(HealthSettings(fatal_xids=frozenset({31})))
    errors = GpuErrors(book, registry, events)
    told = [GpuEvent(79, 1, "GPU-a"), GpuEvent(13, 2, "GPU-a"), GpuEvent(31, 3, "GPU-a", "MIG-1"), GpuEvent(4711, 4)]
    for event in (*told, GpuEvent(4712, 5)):
        errors.take(event)

    def count(xid: str, kind: str) -> float | None:
        return registry.get_sample_value("nodefabric_gpu_errors_total", {"xid": xid, "class": kind})

    assert (count("79", "fatal"), count("13", "application"), count("31", "fatal")) == (1, 1, 1)
    assert (count("other", "transient"), count("4711", "transient")) == (2, None)
    gpu = Gpu("GPU-a", 0, 0, "0000:1b:00.0", "H100", 1)
    assert book.policy().gpu(gpu, "") == unhealthy("XidFatal")
    noted = {(e.subject, e.text, e.warning) for e in events.listed()}
    assert ("GPU-a", "XID 79 (fatal): fallen off the bus", True) in noted
    assert ("GPU-a", "XID 13 (application): graphics engine exception", False) in noted
    assert ("MIG-1", "XID 31 (fatal): memory page fault", True) in noted
    assert any(subject.startswith("a GPU that the driver does not name") for subject, _, _ in noted)
