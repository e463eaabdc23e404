"""What doctor checks of claims."""

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
    Result,
    Severity,
    as_text,
)
from agent.report.facts import DriverState

Snapshots = Callable[[str], Snapshot]
Check = Callable[[Facts], object]


ClaimCheck = Callable[[Facts], Iterator[Result]]
CLAIMS_CONFIG = parse(
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
CLAIM_CHECKS = (checks_node.driver, checks_node.slices, checks_node.classes, checks_node.held)


def looked(found: ClaimFacts | None) -> Facts:
    return Facts(Snapshot(), CLAIMS_CONFIG, claims=found)


def one(check: ClaimCheck, found: ClaimFacts) -> Result:
    """Return the only thing that a check complains of. It has a remedy."""
    (complaint,) = [f for f in check(looked(found)) if f.severity is not Severity.FINE]
    assert complaint.remedy or complaint.severity is Severity.UNSEEN
    return complaint


def of_state(**changes: object) -> ClaimFacts:
    return replace(SOUND, state=replace(STATE, **changes))  # type: ignore[arg-type]


def of_cluster(**changes: object) -> ClaimFacts:
    return replace(SOUND, cluster=replace(SOUND.cluster, **changes))  # type: ignore[arg-type]


NOT_FOUND = replace(STATE, problem="kubelet has not found it")
UNKNOWN = "kubelet does not know the DRA driver nodefabric.io: kubelet has not found it"
OLD, FOREIGN = device_class("old", "rdma/former"), device_class("foreign", "rdma/hca", "other.example")
CLAIM_CASES = [
    (
        checks_node.driver,
        replace(SOUND, folders=(("/k/plugins_registry", "is not there"),)),
        *(Severity.ERROR, "/k/plugins_registry", "component dra"),
    ),
    (
        checks_node.driver,
        replace(SOUND, sockets=((SOCKET, None), ("/r/old", "Connection refused"))),
        *(Severity.WARNING, "nobody answers at /r/old: Connection refused", ""),
    ),
    (
        checks_node.driver,
        replace(SOUND, sockets=((SOCKET, None), ("/r/other", None))),
        *(Severity.ERROR, "more than one agent", ""),
    ),
    (
        checks_node.driver,
        of_cluster(kubelet_version="v1.31.4"),
        *(Severity.ERROR, "kubelet is v1.31.4, and claims need 1.32, in a cluster of 1.34 or later", ""),
    ),
    *(
        (
            checks_node.driver,
            replace(of_cluster(kubelet_version=version), state=NOT_FOUND),
            Severity.ERROR,
            UNKNOWN,
            word,
        )
        for version, word in (
            ("v1.33.0", "featureGates.DynamicResourceAllocation"),
            ("v1.36.2", "kubeletDir"),
            ("", "kubeletDir"),
        )
    ),
    (checks_node.driver, replace(SOUND, state=None), Severity.UNSEEN, "", ""),
    (checks_node.slices, of_state(dropped=frozenset({"taints"})), Severity.NOTE, "", "DRADeviceTaints"),
    (checks_node.slices, of_state(dropped=frozenset({"listAttributes"})), Severity.NOTE, "", "DRAListTypeAttributes"),
    (
        checks_node.slices,
        of_state(dropped=frozenset({"capacity"})),
        *(Severity.ERROR, "rdma/hca can offer nothing", "DRAConsumableCapacity"),
    ),
    (
        checks_node.slices,
        of_state(devices=(("rdma/vf", "healthy", 16),)),
        *(Severity.WARNING, "no device of this node is offered to claims for rdma/hca", ""),
    ),
    (checks_node.slices, of_state(slices=None), Severity.WARNING, "ResourceSlices", ""),
    (
        checks_node.classes,
        of_cluster(classes=(*CLASSES[:1], FOREIGN)),
        *(Severity.WARNING, "no DeviceClass selects rdma/hca", ""),
    ),
    (
        checks_node.classes,
        of_cluster(classes=(*CLASSES, OLD)),
        *(Severity.NOTE, "the DeviceClass old selects rdma/former, which this node does not offer", ""),
    ),
    (
        checks_node.classes,
        of_cluster(classes=None, problem="it is away"),
        *(Severity.UNSEEN, "the cluster's DeviceClasses: it is away", ""),
    ),
]


@pytest.mark.parametrize(("check", "found", "severity", "text", "remedy"), CLAIM_CASES)
def test_what_is_wrong_with_claims_is_found_with_its_remedy(
    check: ClaimCheck, found: ClaimFacts, severity: Severity, text: str, remedy: str
) -> None:
    complaint = one(check, found)
    assert complaint.severity is severity
    assert text in complaint.text
    assert remedy in complaint.remedy


def test_slices_are_not_told_without_an_agent_that_tells() -> None:
    assert list(checks_node.slices(looked(replace(SOUND, state=None)))) == []


def test_capacity_that_is_dropped_is_no_matter_to_who_does_not_need_it() -> None:
    facts = looked(of_state(dropped=frozenset({"capacity"})))
    shares = replace(CLAIMS_CONFIG, dra=replace(CLAIMS_CONFIG.dra, shares="devices"))
    early = replace(CLAIMS_CONFIG, resources=CLAIMS_CONFIG.resources[:1])
    for config in (shares, early):
        assert {f.severity for f in checks_node.slices(replace(facts, config=config))} == {Severity.FINE}


@pytest.mark.parametrize("check", CLAIM_CHECKS)
def test_each_check_calls_a_sound_node_fine(check: ClaimCheck) -> None:
    assert [finding.severity for finding in check(looked(SOUND))] == [Severity.FINE]


@pytest.mark.parametrize("check", CLAIM_CHECKS)
def test_where_nothing_is_offered_to_claims_nothing_is_said_of_them(check: ClaimCheck) -> None:
    assert list(check(looked(None))) == []
    assert "claims" not in {finding.check for finding in examine(Facts(Snapshot()))}
    assert "claims" in {finding.check for finding in examine(looked(ClaimFacts()))}


def test_a_class_that_goes_by_no_resource_may_select_each() -> None:
    every = DeviceClass("all", (f"device.driver == '{DRIVER}'",))
    assert [f.severity for f in checks_node.classes(looked(of_cluster(classes=(every,))))] == [Severity.FINE]


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
