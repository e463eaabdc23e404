"""What doctor finds about claims, from facts alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from agent.config import parse
from agent.model.device import Snapshot
from agent.report.doctor import checks_node, examine
from agent.report.doctor.facts import (
    ClaimFacts,
    ClusterFacts,
    ContainerRuntime,
    DeviceClass,
    Facts,
    HeldClaim,
)
from agent.report.doctor.results import Result, Severity, as_text
from agent.report.facts import DriverState

Check = Callable[[Facts], Iterator[Result]]
CONFIG = parse(
    """
resources:
  - {name: rdma/vf, kind: vf, offer: dra}
  - {name: rdma/hca, kind: hca, offer: dra, binding: late, shares: 63}
""",
    "test",
)
DRIVER = "nodefabric.io"
STATE = DriverState(DRIVER, "", 2, frozenset(), (("rdma/hca", "healthy", 2), ("rdma/vf", "healthy", 16)))
SOCKET = "/var/lib/kubelet/plugins_registry/nodefabric.io-1-reg.sock"


def device_class(name: str, resource: str, driver: str = DRIVER) -> DeviceClass:
    """Make a class as the chart does."""
    expression = f'device.driver == "{driver}" && device.attributes["{driver}"].resource == "{resource}"'
    return DeviceClass(name, (expression,))


CLASSES = (device_class("rdma-vf", "rdma/vf"), device_class("rdma-hca", "rdma/hca"))
SOUND = ClaimFacts(
    now=10_000.0,
    folders=(("/var/lib/kubelet/plugins_registry", None),),
    sockets=((SOCKET, None),),
    state=STATE,
    claims=(HeldClaim("default/nics", "prepared", 5.0, ("default/trainer",)),),
    cluster=ClusterFacts("v1.36.2", CLASSES),
)
CHECKS = (checks_node.driver, checks_node.slices, checks_node.classes, checks_node.held)


def looked(found: ClaimFacts | None) -> Facts:
    return Facts(Snapshot(), CONFIG, claims=found)


def one(check: Check, found: ClaimFacts) -> Result:
    """Return the only thing that a check complains of. It has a remedy."""
    (complaint,) = [f for f in check(looked(found)) if f.severity is not Severity.FINE]
    assert complaint.check == "claims"
    assert complaint.remedy or complaint.severity is Severity.UNSEEN
    return complaint


def of_state(**changes: object) -> ClaimFacts:
    return replace(SOUND, state=replace(STATE, **changes))  # type: ignore[arg-type]


def of_cluster(**changes: object) -> ClaimFacts:
    return replace(SOUND, cluster=replace(SOUND.cluster, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("check", CHECKS)
def test_each_check_calls_a_sound_node_fine(check: Check) -> None:
    assert [finding.severity for finding in check(looked(SOUND))] == [Severity.FINE]


@pytest.mark.parametrize("check", CHECKS)
def test_where_nothing_is_offered_to_claims_nothing_is_said_of_them(check: Check) -> None:
    assert list(check(looked(None))) == []
    assert "claims" not in {finding.check for finding in examine(Facts(Snapshot()))}


def test_kubelets_folder_that_is_not_to_be_seen_is_an_error_with_the_component_as_remedy() -> None:
    found = one(checks_node.driver, replace(SOUND, folders=(("/k/plugins_registry", "is not there"),)))
    assert found.severity is Severity.ERROR
    assert found.text.endswith("is not there")
    assert "component dra" in found.remedy


def test_a_socket_that_nobody_answers_at_is_told_and_so_are_two_that_answer() -> None:
    stale = one(checks_node.driver, replace(SOUND, sockets=((SOCKET, None), ("/r/old", "Connection refused"))))
    assert (stale.severity, stale.text) == (Severity.WARNING, "nobody answers at /r/old: Connection refused")
    two = one(checks_node.driver, replace(SOUND, sockets=((SOCKET, None), ("/r/other", None))))
    assert (two.severity, "more than one agent" in two.text) == (Severity.ERROR, True)


def test_an_old_kubelet_is_an_error() -> None:
    found = one(checks_node.driver, of_cluster(kubelet_version="v1.31.4"))
    assert (found.severity, found.text) == (
        Severity.ERROR,
        "kubelet is v1.31.4, and claims need 1.32, in a cluster of 1.34 or later",
    )


@pytest.mark.parametrize(
    ("version", "remedy"),
    [("v1.33.0", "featureGates.DynamicResourceAllocation"), ("v1.36.2", "kubeletDir"), ("", "kubeletDir")],
)
def test_a_driver_that_kubelet_does_not_know_has_the_remedy_of_kubelets_version(version: str, remedy: str) -> None:
    state = replace(STATE, problem="kubelet has not found it")
    cluster = replace(SOUND.cluster, kubelet_version=version)
    found = one(checks_node.driver, replace(SOUND, state=state, cluster=cluster))
    assert found.severity is Severity.ERROR
    assert found.text == "kubelet does not know the DRA driver nodefabric.io: kubelet has not found it"
    assert remedy in found.remedy


def test_how_the_driver_stands_is_unseen_without_an_agent_that_tells() -> None:
    assert one(checks_node.driver, replace(SOUND, state=None)).severity is Severity.UNSEEN
    assert list(checks_node.slices(looked(replace(SOUND, state=None)))) == []


@pytest.mark.parametrize(
    ("word", "severity", "gate"),
    [
        ("taints", Severity.NOTE, "DRADeviceTaints"),
        ("listAttributes", Severity.NOTE, "DRAListTypeAttributes"),
        ("capacity", Severity.ERROR, "DRAConsumableCapacity"),
    ],
)
def test_what_the_cluster_drops_is_told_with_its_gate(word: str, severity: Severity, gate: str) -> None:
    found = one(checks_node.slices, of_state(dropped=frozenset({word})))
    assert found.severity is severity
    assert gate in found.remedy


def test_capacity_that_is_dropped_is_no_matter_to_who_does_not_need_it() -> None:
    facts = looked(of_state(dropped=frozenset({"capacity"})))
    found = one(checks_node.slices, of_state(dropped=frozenset({"capacity"})))
    assert "rdma/hca can offer nothing" in found.text
    shares = replace(CONFIG, dra=replace(CONFIG.dra, shares="devices"))
    early = replace(CONFIG, resources=CONFIG.resources[:1])
    for config in (shares, early):
        assert {f.severity for f in checks_node.slices(replace(facts, config=config))} == {Severity.FINE}


def test_a_resource_without_a_device_here_is_told() -> None:
    found = one(checks_node.slices, of_state(devices=(("rdma/vf", "healthy", 16),)))
    assert (found.severity, found.text) == (
        Severity.WARNING,
        "no device of this node is offered to claims for rdma/hca",
    )


def test_slices_that_nobody_knows_of_are_told() -> None:
    assert "ResourceSlices" in one(checks_node.slices, of_state(slices=None)).text


def test_a_resource_without_a_class_is_told() -> None:
    others = (*CLASSES[:1], device_class("foreign", "rdma/hca", "other.example"))
    found = one(checks_node.classes, of_cluster(classes=others))
    assert found.severity is Severity.WARNING
    assert found.text.startswith("no DeviceClass selects rdma/hca")


def test_a_class_that_goes_by_no_resource_may_select_each() -> None:
    every = DeviceClass("all", (f"device.driver == '{DRIVER}'",))
    assert [f.severity for f in checks_node.classes(looked(of_cluster(classes=(every,))))] == [Severity.FINE]


def test_a_class_of_a_resource_that_is_not_here_is_only_noted() -> None:
    found = one(checks_node.classes, of_cluster(classes=(*CLASSES, device_class("old", "rdma/former"))))
    assert found.severity is Severity.NOTE
    assert found.text == "the DeviceClass old selects rdma/former, which this node does not offer"


def test_classes_are_unseen_where_the_cluster_cannot_be_asked() -> None:
    found = one(checks_node.classes, of_cluster(classes=None, problem="it is away"))
    assert (found.severity, found.text) == (Severity.UNSEEN, "the cluster's DeviceClasses: it is away")


def test_a_claim_without_a_pod_and_one_long_on_its_way_back_are_told_and_young_ones_not() -> None:
    def claims(since: float) -> ClaimFacts:
        lost = HeldClaim("default/lost", "prepared", since)
        leaving = HeldClaim("default/leaving", "unpreparing", since, ("default/trainer",))
        return replace(SOUND, claims=(lost, leaving))

    old = [finding.text.partition(":")[0] for finding in checks_node.held(looked(claims(0.0)))]
    assert old == ["default/lost", "default/leaving"]
    assert [f.severity for f in checks_node.held(looked(claims(9_999.0)))] == [Severity.FINE]


def test_claims_need_cdi_in_the_runtime_and_a_folder_to_write_to() -> None:
    facts = replace(looked(SOUND), runtime=ContainerRuntime("containerd", "v1.7.1", False), cdi_read_only=True)
    folder, runtime = checks_node.cdi(facts)
    assert (folder.severity, "as base and chart do" in folder.remedy) == (Severity.ERROR, True)
    assert (runtime.severity, "claims need it" in runtime.text) == (Severity.ERROR, True), as_text([runtime])
