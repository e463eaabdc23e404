"""The rules of resource.k8s.io: what is just within a limit is taken, and what breaks one is refused with its path."""

from __future__ import annotations

from typing import Any

import pytest

from hack.sim.cluster.dra import Invalid, admitted, gates
from hack.sim.cluster.kinds import CLAIM, SLICE, TEMPLATE, Kind
from tests.sim.cluster.dra_documents import allocated, claim, device, resource_slice

NOW = "2026-01-01T00:00:00Z"
TAINT = {"key": "nodefabric.io/LinkDown", "effect": "NoSchedule"}
OPAQUE = {"driver": "nodefabric.io", "parameters": {"apiVersion": "nodefabric.io/v1alpha1", "kind": "Network"}}
MINE = {"driver": "nodefabric.io", "pool": "n", "device": "vf-1"}
READY = {"type": "Ready", "status": "True", "reason": "Attached", "lastTransitionTime": NOW, "message": ""}


def problems(kind: Kind, document: dict[str, Any]) -> str:
    """Why an object is refused; empty if it is not."""
    old = claim() if "status" in document else None
    try:
        admitted(kind, "a", document, old, gates.DEFAULT | {gates.LISTS}, NOW)
    except Invalid as invalid:
        return str(invalid).removeprefix(f'{kind.group} "a" is invalid: ').removeprefix("[")
    return ""


def devices(count: int, **more: Any) -> dict[str, Any]:
    """A slice of devices, of which the first has more."""
    return resource_slice(devices=[device(**{"name": f"vf-{n}", **(more if n == 0 else {})}) for n in range(count)])


def shared(**policy: Any) -> dict[str, Any]:
    amount = {"value": "63", "requestPolicy": policy}
    return devices(1, allowMultipleAllocations=True, capacity={"nodefabric.io/shares": amount})


def wants(**more: Any) -> dict[str, Any]:
    request = {"name": "nic", "exactly": {"deviceClassName": "rdma-vf"}}
    return claim(devices={"requests": [request], **more})


def told(**more: Any) -> dict[str, Any]:
    """A claim whose one device is told of."""
    document = allocated(MINE)
    document["status"]["devices"] = [{**MINE, **more}]
    return document


@pytest.mark.parametrize(
    ("kind", "document", "problem"),
    [
        (SLICE, devices(129), "spec.devices: Too many: 129: must have at most 128 items"),
        (SLICE, devices(65, taints=[TAINT]), "spec.devices: Too many: 65: must have at most 64 items"),
        (SLICE, resource_slice(devices=[device("a")] * 2), 'spec.devices[1]: Duplicate value: "a"'),
        (SLICE, resource_slice(nodeName=None), "spec: Required value: exactly one of `nodeName`"),
        (SLICE, devices(1, name="v" * 64), "spec.devices[0].name: Invalid value"),
        (SLICE, devices(1, attributes={f"a{n}": {"int": n} for n in range(33)}), "spec.devices[0]: Invalid"),
        (SLICE, devices(1, attributes={"a": {"string": "x" * 65}}), "spec.devices[0].attributes[a].string: Too long"),
        (SLICE, devices(1, taints=[{"key": "a"}]), "spec.devices[0].taints[0].effect: Required value"),
        (SLICE, shared(validRange={"min": "1"}), "spec.devices[0].capacity[nodefabric.io/shares].requestPolicy.def"),
        (CLAIM, wants(constraints=[{"matchAttribute": "uuid"}]), "spec.devices.constraints[0].matchAttribute: Inv"),
        (CLAIM, wants(config=[{"requests": ["gpu"], "opaque": OPAQUE}]), "spec.devices.config[0].requests[0]"),
        (TEMPLATE, {"spec": {"spec": {"devices": {"requests": [{"name": "a"}]}}}}, "spec.spec.devices.requests[0]: R"),
        (CLAIM, told(device="vf-2"), 'status.devices[0]: Invalid value: "nodefabric.io/n/vf-2": must be an allocated'),
        (CLAIM, told(conditions=[{**READY, "reason": ""}]), "status.devices[0].conditions[0].reason: Required value"),
        (CLAIM, told(networkData={"ips": ["10.0.0.1"]}), "status.devices[0].networkData.ips[0]: Invalid value"),
        (CLAIM, told(data={"a": "x" * (10 * 1024)}), "status.devices[0].data: Too long"),
    ],
)
def test_what_breaks_a_rule_is_refused_with_its_path(kind: Kind, document: dict[str, Any], problem: str) -> None:
    assert problems(kind, document).startswith(problem)


def test_what_is_asked_of_a_gate_that_is_off_is_dropped_unless_it_is_there_already() -> None:
    tainted = devices(1, taints=[TAINT])
    old = admitted(SLICE, "a", tainted, None, gates.DEFAULT, NOW)
    for stored, is_kept in ((old, True), (None, False)):
        found = admitted(SLICE, "a", tainted, stored, gates.DEFAULT - {gates.TAINTS}, NOW)
        assert ("taints" in found["spec"]["devices"][0]) is is_kept
