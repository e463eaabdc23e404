"""What doctor checks of claims."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from agent.config import parse
from agent.model.device import Snapshot
from agent.report.doctor import checks_node, examine
from agent.report.doctor.facts import (
    ClaimFacts,
    ContainerRuntime,
    Facts,
    Result,
    Severity,
)

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
DEVICES = [
    {"resource": "rdma/hca", "health": "healthy", "count": 2},
    {"resource": "rdma/vf", "health": "healthy", "count": 16},
]
STATE = {"driver": DRIVER, "registered": True, "problem": None, "slices": 2, "devices": DEVICES}


def held_claim(name: str, state: str, since: float, *pods: str) -> dict[str, Any]:
    return {"namespace": "default", "name": name, "state": state, "since": since, "pods": pods}


AGENT = {"obstacles": {}, "dra": STATE, "claims": [held_claim("nics", "prepared", 5.0, "default/trainer")]}
SOCKET = "/var/lib/kubelet/plugins_registry/nodefabric.io-1-reg.sock"


SOUND = ClaimFacts(
    now=10_000.0,
    folders=(("/var/lib/kubelet/plugins_registry", None),),
    sockets=((SOCKET, None),),
    kubelet_version="v1.36.2",
)
CLAIM_CHECKS = (checks_node.driver, checks_node.slices, checks_node.held)


def looked(found: ClaimFacts | None, **changes: object) -> Facts:
    """Look at a node that offers something to claims. `changes` are of what its agent says."""
    return Facts(Snapshot(), CLAIMS_CONFIG, agent=AGENT | changes, claims=found)


def of_state(**changes: object) -> Facts:
    return looked(SOUND, dra=STATE | changes)


def of_version(version: str) -> Facts:
    return looked(replace(SOUND, kubelet_version=version))


NOT_FOUND = STATE | {"registered": False, "problem": "kubelet has not found it"}
UNKNOWN = "kubelet does not know the DRA driver nodefabric.io: kubelet has not found it"
CLAIM_CASES = [
    (
        checks_node.driver,
        looked(replace(SOUND, folders=(("/k/plugins_registry", "is not there"),))),
        *(Severity.ERROR, "/k/plugins_registry", "component dra"),
    ),
    (
        checks_node.driver,
        looked(replace(SOUND, sockets=((SOCKET, None), ("/r/old", "Connection refused")))),
        *(Severity.WARNING, "nobody answers at /r/old: Connection refused", ""),
    ),
    (
        checks_node.driver,
        looked(replace(SOUND, sockets=((SOCKET, None), ("/r/other", None)))),
        *(Severity.ERROR, "more than one agent", ""),
    ),
    (
        checks_node.driver,
        of_version("v1.31.4"),
        *(Severity.ERROR, "kubelet is v1.31.4, and claims need 1.32, in a cluster of 1.34 or later", ""),
    ),
    *(
        (
            checks_node.driver,
            replace(of_version(version), agent=AGENT | {"dra": NOT_FOUND}),
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
    (checks_node.driver, replace(looked(SOUND), agent={}), Severity.UNSEEN, "", ""),
    (
        checks_node.slices,
        of_state(devices=DEVICES[1:]),
        *(Severity.WARNING, "no device of this node is offered to claims for rdma/hca", ""),
    ),
    (checks_node.slices, of_state(slices=None), Severity.WARNING, "ResourceSlices", ""),
]


@pytest.mark.parametrize(("check", "found", "severity", "text", "remedy"), CLAIM_CASES)
def test_what_is_wrong_with_claims_is_found_with_its_remedy(
    check: ClaimCheck, found: Facts, severity: Severity, text: str, remedy: str
) -> None:
    (complaint,) = [f for f in check(found) if f.severity is not Severity.FINE]
    assert complaint.remedy or complaint.severity is Severity.UNSEEN
    assert complaint.severity is severity
    assert text in complaint.text
    assert remedy in complaint.remedy


@pytest.mark.parametrize("check", CLAIM_CHECKS)
def test_each_check_calls_a_sound_node_fine(check: ClaimCheck) -> None:
    assert [finding.severity for finding in check(looked(SOUND))] == [Severity.FINE]


@pytest.mark.parametrize("check", CLAIM_CHECKS)
def test_where_nothing_is_offered_to_claims_nothing_is_said_of_them(check: ClaimCheck) -> None:
    assert list(check(looked(None))) == []
    assert "claims" not in {finding.check for finding in examine(Facts(Snapshot()))}
    assert "claims" in {finding.check for finding in examine(looked(ClaimFacts()))}


def test_a_claim_without_a_pod_and_one_long_on_its_way_back_are_told_and_young_ones_not() -> None:
    def told(since: float) -> list[str]:
        lost = held_claim("lost", "prepared", since)
        leaving = held_claim("leaving", "unpreparing", since, "default/trainer")
        return [finding.text.partition(":")[0] for finding in checks_node.held(looked(SOUND, claims=[lost, leaving]))]

    assert told(0.0) == ["default/lost", "default/leaving"]
    assert told(9_999.0) == ["2 prepared, each for a pod"]


def test_claims_need_cdi_in_the_runtime() -> None:
    (told,) = checks_node.cdi(replace(looked(SOUND), runtime=ContainerRuntime("containerd", "v1.7.1", False)))
    assert (told.severity, "claims need it" in told.text) == (Severity.ERROR, True)
