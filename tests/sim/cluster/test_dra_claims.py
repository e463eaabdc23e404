"""The rules of claims, templates, classes and a claim's status, with the server's wording of the path."""

from __future__ import annotations

from typing import Any

import pytest

from hack.sim.cluster.dra import Invalid, admitted, gates
from hack.sim.cluster.kinds import CLAIM, TEMPLATE, Kind
from tests.sim.cluster.dra_documents import SHARE, allocated, claim

NOW = "2026-01-01T00:00:00Z"
REFERENCE = "must be the name of a request in the claim or the name of a request and a subrequest separated by '/'"
OPAQUE = {"driver": "nodefabric.io", "parameters": {"apiVersion": "nodefabric.io/v1alpha1", "kind": "Network"}}


def problems(kind: Kind, document: dict[str, Any], old: dict[str, Any] | None = None) -> str:
    """Why an object is refused; empty if it is not."""
    try:
        admitted(kind, "a", document, old, gates.DEFAULT, NOW)
    except Invalid as invalid:
        return str(invalid).removeprefix(f'{kind.group} "a" is invalid: ')
    return ""


def exactly(**more: Any) -> dict[str, Any]:
    return {"name": "nic", "exactly": {"deviceClassName": "rdma-vf", **more}}


def choice(count: int = 2) -> dict[str, Any]:
    several = [{"name": f"s{number}", "deviceClassName": "rdma-vf"} for number in range(count)]
    return {"name": "nic", "firstAvailable": several}


def wants(*requests: dict[str, Any], **more: Any) -> dict[str, Any]:
    return claim(devices={"requests": list(requests), **more})


def constrained(*names: str, **rule: str) -> dict[str, Any]:
    return wants(choice(), constraints=[{"requests": list(names), **(rule or {"matchAttribute": "a.io/b"})}])


def configured(**opaque: Any) -> dict[str, Any]:
    return wants(exactly(), config=[{"opaque": {**OPAQUE, **opaque}}])


@pytest.mark.parametrize(
    "document",
    [
        claim(),
        wants(exactly(tolerations=[{"operator": "Exists"}, {"key": "a.io/b", "value": "c", "effect": "NoExecute"}])),
        constrained("nic", "nic/s0"),
        configured(),
        configured(parameters={"a": "x" * (10 * 1024 - 8)}),
    ],
)
def test_claims_that_keep_to_the_rules_are_taken(document: dict[str, Any]) -> None:
    assert problems(CLAIM, document) == ""


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (wants(exactly(), exactly()), 'spec.devices.requests[1]: Duplicate value: "nic"'),
        (wants({"name": "nic"}), "spec.devices.requests[0]: Required value: exactly one of `exactly` or"),
        (wants({"name": "nic", "exactly": {}}), "spec.devices.requests[0].exactly.deviceClassName: Required value"),
        (wants(exactly(count=0)), "spec.devices.requests[0].exactly.count: Invalid value: 0: must be greater than"),
        (wants(exactly(tolerations=[{"effect": "No"}])), "spec.devices.requests[0].exactly.tolerations[0].effect"),
        (constrained("gpu"), f'spec.devices.constraints[0].requests[0]: Invalid value: "gpu": {REFERENCE}'),
        (constrained("nic/s9"), f'spec.devices.constraints[0].requests[0]: Invalid value: "nic/s9": {REFERENCE}'),
        (constrained(matchAttribute="uuid"), 'spec.devices.constraints[0].matchAttribute: Invalid value: "uuid": a'),
        (wants(exactly(), config=[{"requests": ["gpu"], "opaque": OPAQUE}]), "spec.devices.config[0].requests[0]"),
        (configured(driver=""), "spec.devices.config[0].opaque.driver: Required value"),
        (configured(parameters=None), "spec.devices.config[0].opaque.parameters: Required value"),
        (configured(parameters=[1]), 'spec.devices.config[0].opaque.parameters: Invalid value: "<value omitted>"'),
    ],
)
def test_a_claim_that_breaks_a_rule_is_refused_with_its_path(document: dict[str, Any], problem: str) -> None:
    assert problems(CLAIM, document).removeprefix("[").startswith(problem)
    template = {"metadata": {"name": "a"}, "spec": {"spec": document["spec"]}}
    assert problems(TEMPLATE, template).removeprefix("[").startswith(problem.replace("spec.", "spec.spec.", 1))


@pytest.mark.parametrize(
    ("gate", "key", "value"),
    [
        (gates.TAINTS, "tolerations", [{"operator": "Exists"}]),
        (gates.CAPACITY, "capacity", {"requests": {"nodefabric.io/shares": "2"}}),
    ],
)
def test_what_a_claim_asks_of_a_gate_that_is_off_is_dropped(gate: str, key: str, value: Any) -> None:
    sub = {"name": "s0", "deviceClassName": "rdma-vf", key: value}
    asked = wants(exactly(**{key: value}), {"name": "other", "firstAvailable": [sub]})
    template = {"metadata": {"name": "a"}, "spec": {"spec": asked["spec"]}}
    for kind, document in ((CLAIM, asked), (TEMPLATE, template)):
        assert key in str(admitted(kind, "a", document, None, gates.DEFAULT, NOW))
        assert key not in str(admitted(kind, "a", document, None, gates.DEFAULT - {gate}, NOW))


@pytest.mark.parametrize(
    ("kind", "old"), [(CLAIM, claim()), (TEMPLATE, {"spec": {"spec": claim()["spec"]}})], ids=lambda one: str(one)[:20]
)
def test_the_spec_of_a_claim_and_of_a_template_is_immutable(kind: Kind, old: dict[str, Any]) -> None:
    assert problems(kind, old, old) == ""
    changed = problems(kind, {"spec": {"devices": {}}}, old)
    assert changed.startswith("spec: Invalid value: ")
    assert changed.endswith("field is immutable")


MINE = {"driver": "nodefabric.io", "pool": "n", "device": "vf-1"}
READY = {"type": "Ready", "status": "True", "reason": "Attached", "lastTransitionTime": NOW, "message": ""}


def told(**device: Any) -> dict[str, Any]:
    """A claim whose one device is told of."""
    document = allocated(MINE)
    document["status"]["devices"] = [{**MINE, **device}]
    return document


def reserved(*consumers: dict[str, str]) -> dict[str, Any]:
    document = allocated(MINE)
    document["status"]["reservedFor"] = list(consumers)
    return document


def with_allocation(**devices: Any) -> dict[str, Any]:
    document = allocated(MINE)
    document["status"]["allocation"]["devices"] |= devices
    return document


def pod(uid: str) -> dict[str, str]:
    return {"resource": "pods", "name": "p", "uid": uid}


@pytest.mark.parametrize(
    "document",
    [
        allocated(MINE),
        allocated({**MINE, "shareID": SHARE}),
        told(conditions=[{**READY, "type": f"C{number}"} for number in range(8)]),
        told(networkData={"ips": [f"10.0.0.{number}/24" for number in range(16)], "interfaceName": "n" * 256}),
        told(networkData={"ips": ["fd00::5/64"], "hardwareAddress": "a" * 128}),
        told(data={"a": "x" * (10 * 1024 - 8)}),
        reserved(*(pod(f"u{number}") for number in range(256))),
        with_allocation(config=[{"source": "FromClass", "opaque": OPAQUE}]),
    ],
)
def test_a_status_that_keeps_to_the_rules_is_taken(document: dict[str, Any]) -> None:
    assert problems(CLAIM, document, claim()) == ""


STATUS = "status.devices[0]"
RESULTS = "status.allocation.devices"


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (told(device="vf-2"), f'{STATUS}: Invalid value: "nodefabric.io/n/vf-2": must be an allocated device'),
        (told(shareID=SHARE), f"{STATUS}: Invalid value"),
        (told(conditions=[{**READY, "type": f"C{number}"} for number in range(9)]), f"{STATUS}.conditions: Too many"),
        (told(conditions=[{**READY, "reason": ""}]), f"{STATUS}.conditions[0].reason: Required value"),
        (told(conditions=[{**READY, "lastTransitionTime": None}]), f"{STATUS}.conditions[0].lastTransitionTime"),
        (told(data=[1]), f'{STATUS}.data: Invalid value: "<value omitted>": must be a valid JSON object'),
        (told(data={"a": "x" * (10 * 1024)}), f"{STATUS}.data: Too long: may not be more than 10240 bytes"),
        (told(networkData={"ips": [f"10.0.0.{number}/24" for number in range(17)]}), f"{STATUS}.networkData.ips: Too"),
        (told(networkData={"ips": ["10.0.0.1"]}), f'{STATUS}.networkData.ips[0]: Invalid value: "10.0.0.1": must be'),
        (told(networkData={"ips": ["fd00:0::5/64"]}), f'{STATUS}.networkData.ips[0]: Invalid value: "fd00:0::5/64"'),
        (allocated(*({**MINE, "device": f"vf-{number}"} for number in range(33))), f"{RESULTS}.results: Too many: 33"),
        (allocated({**MINE, "shareID": "1"}), f'{RESULTS}.results[0].shareID: Invalid value: "1"'),
        (reserved(*(pod(f"u{number}") for number in range(257))), "status.reservedFor: Too many: 257: must have at"),
        ({**claim(), "status": {"reservedFor": [pod("u")]}}, "status.reservedFor: Forbidden: may not be specified"),
    ],
)
def test_a_status_that_breaks_a_rule_is_refused_with_its_path(document: dict[str, Any], problem: str) -> None:
    found = problems(CLAIM, document, claim())
    assert found.removeprefix("[").startswith(problem), found
