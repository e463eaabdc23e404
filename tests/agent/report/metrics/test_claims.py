"""Series about claims and the DRA driver."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry

from agent.config import HealthSettings
from agent.errors import ClaimConflict, DeviceBusy, Unavailable
from agent.health import HealthBook
from agent.model.allocation import ClaimState
from agent.model.device import Snapshot
from agent.process.conditions import Conditions
from agent.report.events import Events
from agent.report.facts import DriverState, Facts
from agent.report.metrics import Metrics
from agent.report.report import Report
from tests.agent.books import POD, VF, attach, open_books, owner
from tests.agent.claimed import claimed_vf, prepare
from tests.agent.ledger.test_claims import claim, of_share, of_vf

OTHER = "0000:3b:00.3"
DRIVER = DriverState(
    "nodefabric.io", "", 3, frozenset({"taints"}), (("rdma/vf", "LinkDown", 1), ("rdma/vf", "healthy", 7))
)


def told(facts: Facts) -> CollectorRegistry:
    """Scrape these facts."""
    registry = CollectorRegistry()
    Metrics(registry).add_facts(lambda: facts, "1.2.3")
    return registry


def claims(registry: CollectorRegistry, resource: str = "rdma/vf") -> dict[str, float | None]:
    """Count the claims of a resource by state, those that there are."""
    states = ("attached", "prepared", "preparing", "unpreparing")
    found = {
        state: registry.get_sample_value("nodefabric_dra_claims", {"resource": resource, "state": state})
        for state in states
    }
    return {state: count for state, count in found.items() if count}


def test_claims_are_counted_by_resource_and_state(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        prepare(books, "one")
        row = attach(books, VF, owner())
        books.finish_attach([row.attachment_id], {})
        prepare(books, "two", claimed_vf(OTHER))
        rows = tuple(replace(row, claim_uid="uid-one") for row in books.attachments())
        registry = told(Facts(Snapshot(), claims=books.claims(), attachments=rows, driver=DRIVER))
    assert claims(registry) == {"attached": 1, "prepared": 1}


def test_a_claim_of_two_resources_counts_for_each_and_of_two_devices_once() -> None:
    registry = told(Facts(Snapshot(), claims=(claim("c", of_vf(), of_vf(OTHER, "other"), of_share()),)))
    assert claims(registry) == claims(registry, "rdma/hca") == {"preparing": 1}


def test_a_resource_without_claims_counts_zero() -> None:
    registry = told(Facts(Snapshot(), driver=DRIVER))
    labels = {"resource": "rdma/vf", "state": "prepared"}
    assert registry.get_sample_value("nodefabric_dra_claims", labels) == 0


def test_the_claim_that_is_longest_on_its_way_back_tells_since_when() -> None:
    name = "nodefabric_dra_unpreparing_since_seconds"
    leaving = [replace(claim(n), state=ClaimState.UNPREPARING, since=at) for n, at in (("a", 50.0), ("b", 40.0))]
    assert told(Facts(Snapshot(), claims=(*leaving, claim("c")))).get_sample_value(name) == 40.0
    assert told(Facts(Snapshot(), claims=(claim("c"),))).get_sample_value(name) is None


def test_the_drivers_standing_its_slices_and_its_devices_are_told() -> None:
    registry = told(Facts(Snapshot(), driver=DRIVER))
    assert registry.get_sample_value("nodefabric_dra_registered", {"driver": "nodefabric.io"}) == 1
    assert registry.get_sample_value("nodefabric_dra_slices") == 3
    assert registry.get_sample_value("nodefabric_dra_dropped", {"feature": "taints"}) == 1
    down = {"resource": "rdma/vf", "health": "LinkDown"}
    assert registry.get_sample_value("nodefabric_dra_devices", down) == 1
    registry = told(Facts(Snapshot(), driver=DriverState("d.io", "kubelet has not found it")))
    assert registry.get_sample_value("nodefabric_dra_registered", {"driver": "d.io"}) == 0
    assert registry.get_sample_value("nodefabric_dra_slices") is None


def test_a_node_without_claims_has_no_series_of_them() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.add_facts(lambda: Facts(Snapshot()), "1.2.3")
    lines = metrics.render()[1].decode().splitlines()
    assert [line for line in lines if line.startswith("nodefabric_dra_")] == []


def test_a_claims_share_names_its_pod_though_nothing_is_attached() -> None:
    registry = told(Facts(Snapshot(), claims=(claim("c", of_share("s1"), of_share("s2")),)))
    labels = {"namespace": POD.namespace, "pod": POD.name, "container": "", "resource": "rdma/hca", "unit": ""}
    labels |= {"device": "0000:3b:00.0", "numa_node": "-1"}
    assert registry.get_sample_value("nodefabric_allocation_info", labels) == 1


def test_a_conflict_is_counted_at_once_or_after_waiting_and_other_failures_are_not() -> None:
    registry = CollectorRegistry()
    report = Report(Metrics(registry), Conditions(), Events(), HealthBook(HealthSettings()))
    ref = claim().ref
    report.claim_failed(ref, "not prepared", ClaimConflict(VF, "claim default/other"))
    waited = DeviceBusy("still so after 35 s")
    waited.__cause__ = ClaimConflict(VF, "pod default/trainer (sandbox c1)")
    report.claim_failed(ref, "not prepared", waited)
    report.claim_failed(ref, "not prepared", Unavailable("the API server is away"))
    by_holder = {
        holder: registry.get_sample_value("nodefabric_dra_conflicts_total", {"holder": holder})
        for holder in ("claim", "pod")
    }
    assert by_holder == {"claim": 1, "pod": 1}
