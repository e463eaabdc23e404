"""What of a claim's allocation is ours, and what is no claim."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.errors import ClaimInvalid
from agent.model.allocation import PodRef
from deviceplugin.dra.allocated_claim import Allocation, Opaque, Result, ours
from tests.deviceplugin.dra.claim_documents import DRIVER, NODE, POD, REF, claim, network, result

GPU = {"request": "gpu", "driver": "gpu.nvidia.com", "pool": NODE, "device": "gpu-3"}


def read(document: Any) -> Allocation:
    return ours(document, REF, DRIVER, NODE)


def changed(path: str, value: Any) -> Any:
    """A claim with one thing changed, at a path of keys and numbers."""
    document: Any = claim(result("nic", "vf-0"), config=[network(mtu=9000)])
    inner, *keys = document, *path.split(".")
    for key in keys[:-1]:
        inner = inner[int(key) if key.isdecimal() else key]
    inner[int(keys[-1]) if keys[-1].isdecimal() else keys[-1]] = value
    return document


def test_parameters_of_classes_come_first_and_those_of_other_drivers_not_at_all() -> None:
    mine, theirs = network(mtu=9000), network(driver="other.example", mtu=1)
    found = read(claim(result("nic", "vf-0"), config=[mine, theirs, network("FromClass", network="rails")]))

    assert [config.from_class for config in found.configs] == [True, False]
    assert found.configs[1].parameters["mtu"] == 9000


def test_parameters_for_a_request_are_for_its_sub_requests_and_those_for_a_sub_request_for_no_other() -> None:
    fast = Result("nic/fast", DRIVER, NODE, "vf-0")

    assert Opaque({}).is_for(fast)
    assert Opaque({}, ("nic",)).is_for(fast)
    assert Opaque({}, ("nic/fast",)).is_for(fast)
    assert not Opaque({}, ("nic/any", "other")).is_for(fast)


def test_the_pods_are_those_that_the_claim_is_reserved_for() -> None:
    document = claim(result("nic", "vf-0"))
    document["status"]["reservedFor"].append({"apiGroup": "x.example", "resource": "jobs", "name": "j", "uid": "u"})

    assert read(document).pods == (POD,)
    assert read(document).groups == frozenset()


STRANGER = PodRef("others", "victim", "99999999-1111-4222-8333-444455556666")


@pytest.mark.parametrize(
    ("owner", "kind", "only_pod"),
    [(POD, "Pod", POD.uid), (STRANGER, "Pod", ""), (POD, "Job", "")],
)
@pytest.mark.parametrize("is_extended", [False, True])
def test_a_claim_is_one_pods_alone_if_that_pod_owns_it_and_it_is_reserved_for_it(
    owner: PodRef, kind: str, only_pod: str, is_extended: bool
) -> None:
    document = claim(result("container-0-request-0", "vf-0"), owner=owner, extended=is_extended)
    document["metadata"]["ownerReferences"][0]["kind"] = kind
    found = read(document)

    assert (found.only_pod, found.pods, found.is_extended) == (only_pod, (POD,), is_extended)


SELECTED = {"selectors": [{"cel": {"expression": "true"}}]}


@pytest.mark.parametrize(
    ("devices", "pinned"),
    [
        ({"requests": [{"name": "nic", "exactly": {"deviceClassName": "x"}}]}, set()),
        ({"requests": [{"name": "nic", "exactly": SELECTED}, {"name": "any", "exactly": {}}]}, {"nic"}),
        (
            {"requests": [{"name": "nic", "firstAvailable": [{"name": "near"}, {"name": "far", **SELECTED}]}]},
            {"nic/far"},
        ),
        ({"requests": [{"name": "nic"}], "constraints": [{"requests": ["nic/near", "gpu"]}]}, {"nic/near", "gpu"}),
        ({"requests": [{"name": "nic"}, {"name": "gpu"}], "constraints": [{"matchAttribute": "a/b"}]}, {"nic", "gpu"}),
    ],
)
def test_a_request_that_selects_or_is_constrained_is_pinned(devices: Any, pinned: set[str]) -> None:
    assert read(claim(result("nic", "vf-0"), devices=devices)).pinned == pinned


def test_of_preferred_devices_those_are_pinned_that_the_constraint_is_about() -> None:
    constraint = {"requests": ["nic/near"], "matchAttribute": "a/b"}
    document = claim(result("nic/near", "vf-0"), result("nic/any", "vf-1"), devices={"constraints": [constraint]})
    found = read(document)

    assert [found.is_pinned(each) for each in found.results] == [True, False]


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (changed("metadata.uid", "another"), "made again"),
        (changed("status.allocation", None), "not allocated"),
        (changed("status", {}), "not allocated"),
        (changed("status.allocation.devices.results.0.pool", "node-2"), "pool 'node-2', not of 'node-1'"),
        (changed("status.allocation.devices.results", []), "not allocated"),
        (changed("status.allocation.devices.results", [GPU]), "no device of the driver"),
        (changed("status.allocation.devices.results.0.request", "a/../b"), "'a/../b' must be the name of a request"),
        (changed("status.allocation.devices.results.0.device", 7), "device must be a text, is 7"),
        (changed("status.allocation.devices.results.0.pool", None), "pool must be a text, is None"),
        (changed("status.allocation.devices.results.0.consumedCapacity", {f"{DRIVER}/shares": "x"}), "'x' is not a"),
        ([], "must be an object, is []"),
    ],
)
def test_what_cannot_be_prepared_is_refused_with_a_reason(document: Any, problem: str) -> None:
    with pytest.raises(ClaimInvalid) as raised:
        read(document)

    assert problem in str(raised.value)
    assert "team/two-rails" in str(raised.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
PATHS = (
    *(
        "spec",
        "spec.devices",
        "metadata",
        "metadata.uid",
        "metadata.annotations",
        "metadata.ownerReferences",
        "status",
        "status.allocation",
    ),
    *("status.allocation.devices", "status.allocation.devices.results", "status.allocation.devices.results.0"),
    *("status.allocation.devices.results.0.shareID", "status.allocation.devices.results.0.consumedCapacity"),
    *("status.allocation.devices.config", "status.allocation.devices.config.0", "status.reservedFor"),
    *("status.allocation.devices.config.0.opaque", "status.reservedFor.0"),
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(PATHS), JSON)
def test_garbage_in_a_claim_gives_an_allocation_or_one_clear_error(path: str, garbage: Any) -> None:
    with contextlib.suppress(ClaimInvalid):
        assert read(changed(path, garbage)).results
