"""Series of the node's facts, of claims and their driver, and of what the agent does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from agent.config import HealthSettings
from agent.errors import ClaimConflict, DeviceBusy, LedgerError, Unavailable
from agent.health_history import HealthHistory
from agent.model.allocation import AttachmentState
from agent.model.device import Problem, Snapshot
from agent.process.conditions import Conditions
from agent.report.events import Events
from agent.report.facts import DriverState, Facts
from agent.report.metrics import Metrics
from agent.report.report import Report
from tests.agent.ledger.test_claims import claim
from tests.agent.report import golden
from tests.agent.report.golden import ROW, VF
from tests.node import POD, owner, unit_hold


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
    holds = (unit_hold("vf-1", "rdma/vf", VF, 3.0, POD),)
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
