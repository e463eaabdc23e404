"""What pods' objects and other drivers' slices tell."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.errors import Unavailable
from deviceplugin.dra.pods import claim_names, container_names, container_of, named_gpus, names_all_of
from tests.deviceplugin.dra.test_allocated_claim import JSON


@pytest.mark.parametrize(
    ("request_name", "number"),
    [("container-2-request-0", 2), ("container-x-request-0", None), ("nic", None), ("container-1-request-0/a", None)],
)
def test_a_request_for_extended_resources_names_its_container(request_name: str, number: int | None) -> None:
    assert container_of(request_name) == number


def test_gpus_are_named_by_uuid_and_pci_address_in_any_drivers_domain() -> None:
    attributes = {
        "gpu.nvidia.com/uuid": {"string": "GPU-1"},
        "resource.kubernetes.io/pciBusID": {"string": "0000:1B:00.0"},
        "uuid": {"int": 7},
        "type": {"string": "gpu"},
    }
    device = {"name": "gpu-0", "attributes": attributes}
    document = {"spec": {"pool": {"name": "n"}, "devices": [device]}}

    assert list(named_gpus([document])) == [(("n", "gpu-0"), ["GPU-1", "0000:1b:00.0"])]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(("spec", "status", "metadata")), JSON, JSON)
def test_garbage_in_a_pod_or_a_slice_is_one_clear_error(key: str, one: Any, other: Any) -> None:
    keys = ("resourceClaims", "containers", "resourceClaimStatuses", "pool", "devices")
    document = {key: one, "spec": dict.fromkeys(keys, other) if key != "spec" else one}
    reads = claim_names, container_names, partial(names_all_of, claim="x"), lambda pod: list(named_gpus([pod]))
    for read in reads:
        with contextlib.suppress(Unavailable):
            read(document)
