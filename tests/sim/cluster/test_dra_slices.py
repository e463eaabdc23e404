"""The rules of ResourceSlices: what is refused, with the server's wording of the path; what is just within a limit."""

from __future__ import annotations

from typing import Any

import pytest

from hack.sim.cluster.dra import Invalid, admitted, gates
from hack.sim.cluster.kinds import SLICE
from tests.sim.cluster.dra_documents import device, resource_slice

NOW = "2026-01-01T00:00:00Z"
ALL = gates.DEFAULT | {gates.LISTS}
TAINT = {"key": "nodefabric.io/LinkDown", "effect": "NoSchedule"}


def problems(document: dict[str, Any], old: dict[str, Any] | None = None) -> str:
    """Why a slice is refused; empty if it is not."""
    try:
        admitted(SLICE, "a", document, old, ALL, NOW)
    except Invalid as invalid:
        return str(invalid).removeprefix('ResourceSlice.resource.k8s.io "a" is invalid: ')
    return ""


def with_device(**more: Any) -> dict[str, Any]:
    return resource_slice(devices=[device(**more)])


def shared(**policy: Any) -> dict[str, Any]:
    """A device with a capacity of 63, of which requests take a part by this policy."""
    amount = {"value": "63", "requestPolicy": policy}
    return with_device(allowMultipleAllocations=True, capacity={"nodefabric.io/shares": amount})


def in_range(value: str = "63", default: str = "1", **bounds: str) -> dict[str, Any]:
    policy = {"default": default, "validRange": bounds}
    amount = {"value": value, "requestPolicy": policy}
    return with_device(allowMultipleAllocations=True, capacity={"nodefabric.io/shares": amount})


def attribute(**value: Any) -> dict[str, Any]:
    return with_device(attributes={"a": value})


def devices(count: int, **more: Any) -> list[dict[str, Any]]:
    return [device(f"vf-{number}", **(more if number == 0 else {})) for number in range(count)]


WHERE = "exactly one of `nodeName`, `nodeSelector`, `allNodes`, `perDeviceNodeSelection` is required"
SHARES = "spec.devices[0].capacity[nodefabric.io/shares].requestPolicy"


@pytest.mark.parametrize(
    "document",
    [
        resource_slice(devices=devices(128)),
        resource_slice(devices=devices(64, taints=[TAINT])),
        resource_slice(devices=[]),
        resource_slice(pool={"name": "a.b/c", "generation": 0, "resourceSliceCount": 1}),
        with_device(attributes={f"a{number}": {"int": number} for number in range(31)}, capacity={"c": {"value": "1"}}),
        with_device(attributes={f"d{'o' * 58}.com/{'n' * 32}": {"bool": False}}),
        attribute(string="x" * 64),
        attribute(version="1.2.3-rc.1+build.5"),
        attribute(strings=["a", "b"]),
        with_device(taints=[{**TAINT, "key": f"nodefabric.io/k{number}"} for number in range(16)]),
        with_device(taints=[{"key": "a", "value": "v", "effect": "NoExecute"}]),
        in_range(min="1", step="1"),
        in_range(min="1", max="8", step="7"),
        shared(default="2", validValues=["1", "2", "63"]),
        shared(),
    ],
)
def test_what_keeps_to_the_rules_is_taken(document: dict[str, Any]) -> None:
    assert problems(document) == ""


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (resource_slice(driver=""), "spec.driver: Required value"),
        (resource_slice(pool={"name": "", "resourceSliceCount": 1}), "spec.pool.name: Required value"),
        (resource_slice(pool={"name": "A", "resourceSliceCount": 1}), 'spec.pool.name: Invalid value: "A"'),
        (resource_slice(pool={"name": "n", "resourceSliceCount": 0}), "spec.pool.resourceSliceCount: Invalid value"),
        (resource_slice(nodeName=None), f"spec: Required value: {WHERE}"),
        (resource_slice(devices=devices(129)), "spec.devices: Too many: 129: must have at most 128 items"),
        (resource_slice(devices=devices(65, taints=[TAINT])), "spec.devices: Too many: 65: must have at most 64 items"),
        (resource_slice(devices=devices(65, attributes={"a": {"strings": ["x"]}})), "spec.devices: Too many: 65"),
        (resource_slice(devices=[device("a"), device("a")]), 'spec.devices[1]: Duplicate value: "a"'),
        (with_device(name="VF"), 'spec.devices[0].name: Invalid value: "VF": a lowercase RFC 1123 label'),
        (with_device(name="v" * 64), "spec.devices[0].name: Invalid value"),
        (with_device(attributes={f"a{number}": {"int": number} for number in range(33)}), "spec.devices[0]: Invalid"),
        (with_device(attributes={"a": {"ints": list(range(49))}}), "spec.devices[0]: Invalid value: 49: the total"),
        (with_device(attributes={"a-b": {"int": 1}}), 'spec.devices[0].attributes: Invalid value: "a-b": a valid C'),
        (with_device(attributes={"n" * 33: {"int": 1}}), "spec.devices[0].attributes: Too long: may not be more than"),
        (with_device(attributes={f"{'d' * 64}/a": {"int": 1}}), "spec.devices[0].attributes: Too long: may not be"),
        (attribute(), 'spec.devices[0].attributes[a]: Invalid value: "": exactly one value must be specified'),
        (attribute(int=1, string="x"), "spec.devices[0].attributes[a]: Invalid value: {"),
        (attribute(string="x" * 65), "spec.devices[0].attributes[a].string: Too long: may not be more than 64 bytes"),
        (attribute(version="28.39"), 'spec.devices[0].attributes[a].version: Invalid value: "28.39": must be a'),
        (attribute(strings=[]), "spec.devices[0].attributes[a].strings: Invalid value: []: must not be empty"),
        (attribute(strings=["x", "y" * 65]), "spec.devices[0].attributes[a].strings[1]: Too long"),
        (with_device(taints=[TAINT] * 17), "spec.devices[0].taints: Too many: 17: must have at most 16 items"),
        (with_device(taints=[{"key": "a"}]), "spec.devices[0].taints[0].effect: Required value"),
        (
            with_device(taints=[{"key": "a", "effect": "No"}]),
            (
                'spec.devices[0].taints[0].effect: Unsupported value: "No": supported values: "NoExecute", "NoSchedule"'
                ', "None"'
            ),
        ),
        (with_device(capacity={"s": {"value": "1", "requestPolicy": {"default": "1"}}}), "spec.devices[0].capacity[s]"),
        (shared(validRange={"min": "1"}), f"{SHARES}.default: Required value: required when validRange is defined"),
        (in_range(step="1"), f"{SHARES}.validRange.min: Required value: required when validRange is defined"),
        (in_range(min="64", default="64"), f"{SHARES}.validRange.min: Invalid value"),
        (in_range(min="2"), f'{SHARES}.validRange.min: Invalid value: "1": default is less than min: 2'),
        (in_range(value="1", min="1", step="1"), f'{SHARES}.validRange.step: Invalid value: "1": one step 2 is'),
        (in_range(min="1", step="2", default="2"), f'{SHARES}.validRange.step: Invalid value: "2": value is not a'),
    ],
)
def test_what_breaks_a_rule_is_refused_with_its_path(document: dict[str, Any], problem: str) -> None:
    found = problems(document)
    assert found.removeprefix("[").startswith(problem) or f", {problem}" in found, found


def test_amounts_are_written_in_the_servers_own_way() -> None:
    document = with_device(capacity={"a": {"value": "1000"}, "b": {"value": "63"}, "c": {"value": "100Gi"}})
    stored = admitted(SLICE, "a", document, None, ALL, NOW)
    values = [amount["value"] for amount in stored["spec"]["devices"][0]["capacity"].values()]
    assert values == ["1k", "63", "100Gi"]


def test_fields_of_a_gate_that_is_off_stay_where_they_are_stored_already() -> None:
    old = admitted(SLICE, "a", with_device(taints=[TAINT]), None, ALL, NOW)
    again = admitted(SLICE, "a", with_device(taints=[TAINT]), old, ALL - {gates.TAINTS}, NOW)
    assert again["spec"]["devices"][0]["taints"]
    fresh = admitted(SLICE, "a", with_device(taints=[TAINT]), None, ALL - {gates.TAINTS}, NOW)
    assert "taints" not in fresh["spec"]["devices"][0]
