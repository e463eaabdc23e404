"""Files that tell containers of their devices: replaced as a whole, numbered, and removed with their claim's spec."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.edits.claim_specs import IN_CONTAINERS, ClaimSpecs, mounted, requests_with_files
from agent.errors import Unavailable
from agent.model.allocation import Claim, ClaimDevice, ClaimRef, ClaimState

UID = "0d4a6f0e-66f8-4e7b-9d5d-3b6f0c6a8a11"
DOCUMENT: dict[str, Any] = {
    "metadata": {"uid": UID},
    "requests": [{"name": "nic/near", "devices": [{"name": "vf-1", "pool": "n"}, {"name": "vf-2", "pool": "n"}]}],
}
NETWORK = {"interfaceName": "net1", "ips": ["192.0.2.1/24"]}


def devices(path: Path) -> dict[str, Any]:
    (request,) = json.loads(path.read_text())["requests"]
    return {device["name"]: device.get("networkData") for device in request["devices"]}


def test_a_device_is_told_of_in_a_new_file_with_a_higher_number(tmp_path: Path) -> None:
    files = ClaimSpecs(tmp_path).metadata
    files.write(UID, "nic", DOCUMENT)
    path = files.path(UID, "nic")
    assert json.loads(path.read_text()) == {**DOCUMENT, "metadata": {"uid": UID, "generation": 1}}
    assert path.stat().st_mode & 0o777 == 0o644  # containers have users of their own
    with path.open() as opened:  # as a container that has it already
        files.add_networks(UID, {"nic": {"vf-1": NETWORK}})
        assert json.load(opened)["metadata"]["generation"] == 1
    assert devices(path) == {"vf-1": NETWORK, "vf-2": None}
    files.add_networks(UID, {"nic": {"vf-1": {}}})
    assert devices(path) == {"vf-1": None, "vf-2": None}
    files.write(UID, "nic", DOCUMENT)
    assert json.loads(path.read_text())["metadata"]["generation"] == 4
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_to_be_told_of_in_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    files = ClaimSpecs(tmp_path).metadata
    with pytest.raises(Unavailable, match=rf"{UID}\.nic\.metadata is gone.*recreate the pod"):
        files.add_networks(UID, {"nic": {"vf-1": NETWORK}})


def test_they_go_with_the_spec_of_their_claim_and_those_of_others_stay(tmp_path: Path) -> None:
    specs = ClaimSpecs(tmp_path)
    specs.metadata.write(UID, "nic", DOCUMENT)
    specs.metadata.write(UID, "rail", DOCUMENT)
    specs.metadata.write(f"{UID}2", "nic", DOCUMENT)
    assert specs.uids() == {UID, f"{UID}2"}
    specs.remove(UID)
    specs.remove(UID)
    assert specs.uids() == {f"{UID}2"}


def test_a_claim_wants_those_that_its_containers_have_bound_into_them(tmp_path: Path) -> None:
    files = ClaimSpecs(tmp_path).metadata
    plain = ClaimDevice("nic", "node", "vf-1", "rdma/vf", "vf", "0000:3b:00.2", f"{UID}-0-vf-1", edits={"env": ["A=1"]})
    claim = Claim(ClaimRef(UID, "default", "nics"), ClaimState.PREPARED, (plain,))
    assert (requests_with_files(claim), files.missing(claim)) == (frozenset(), False)

    edits = mounted(plain.edits, files.path(UID, "nic"), f"{IN_CONTAINERS}/resourceclaims/nics/nic/x-metadata.json")
    claim = replace(claim, devices=(replace(plain, edits=edits),))
    assert requests_with_files(claim) == {"nic"}
    assert files.missing(claim)
    files.write(UID, "nic", DOCUMENT)
    assert not files.missing(claim)
    assert edits["env"] == ["A=1"]
    assert edits["mounts"][0]["hostPath"] == str(files.path(UID, "nic"))
