"""Specs of claims: one file a claim, one device a result, and nothing of others is touched."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.edits.cdi import SlotSpecs, read_spec
from agent.edits.claim_specs import ClaimSpecs, qualified
from agent.errors import Unavailable
from agent.model.allocation import Claim, ClaimDevice, ClaimRef, ClaimState, PodRef

EDITS = {"env": ["A=1"], "deviceNodes": [{"path": "/dev/infiniband/uverbs3"}]}
UID = "0d4a6f0e-66f8-4e7b-9d5d-3b6f0c6a8a11"
NIC = ClaimDevice("nic", "node", "vf-1", "rdma/vf", "vf", "0000:3b:00.2", f"{UID}-0-vf-1", edits=EDITS)
PLAIN = replace(NIC, request="plain", cdi_name=f"{UID}-1-vf-2", edits={})
CLAIM = Claim(ClaimRef(UID, "default", "nics"), ClaimState.PREPARING, (NIC, PLAIN))


def test_the_spec_of_a_claim_names_each_of_its_devices(tmp_path: Path) -> None:
    specs = ClaimSpecs(tmp_path / "cdi")
    specs.write(CLAIM)
    (file,) = (tmp_path / "cdi").glob("*.json")
    assert file.name == f"nodefabric-claim-{UID}.json"
    assert json.loads(file.read_text()) == {
        "cdiVersion": "0.5.0",
        "kind": "nodefabric.io/claim",
        "devices": [
            {"name": f"{UID}-0-vf-1", "containerEdits": EDITS},
            {"name": f"{UID}-1-vf-2", "containerEdits": {"env": ["NODEFABRIC_CLAIM=default/nics"]}},
        ],
    }
    assert read_spec(file) == ("nodefabric.io/claim", frozenset({NIC.cdi_name, PLAIN.cdi_name}))
    assert qualified(NIC.cdi_name) == f"nodefabric.io/claim={UID}-0-vf-1"
    assert specs.uids() == {UID}


def test_a_spec_that_says_something_else_is_not_the_claims(tmp_path: Path) -> None:
    specs = ClaimSpecs(tmp_path)
    assert not specs.is_written(CLAIM)
    specs.write(CLAIM)
    assert specs.is_written(CLAIM)
    changed = replace(CLAIM, devices=(replace(NIC, edits={"env": ["A=2"]}), PLAIN))
    assert not specs.is_written(changed)
    specs.write(changed)
    assert (specs.is_written(changed), specs.is_written(CLAIM)) == (True, False)


def test_a_claim_whose_devices_no_container_is_to_name_has_no_file(tmp_path: Path) -> None:
    specs = ClaimSpecs(tmp_path)
    specs.write(CLAIM)
    unnamed = replace(CLAIM, devices=(replace(NIC, cdi_name=""),))
    specs.write(unnamed)  # the runtime would refuse a spec without a device
    assert list(tmp_path.glob("*.json")) == []
    assert specs.is_written(unnamed)
    assert specs.uids() == {UID}  # its rows have a copy all the same
    specs.remove(UID)
    assert list(tmp_path.iterdir()) == []


def test_specs_of_claims_and_of_slots_do_not_see_each_other(tmp_path: Path) -> None:
    claims, slots = ClaimSpecs(tmp_path), SlotSpecs(tmp_path)
    claims.write(CLAIM)
    slots.write("vf", "slot-rdma:vf-0-3", EDITS)
    (tmp_path / "nvidia.json").write_text("{}")
    assert claims.uids() == {UID}
    assert slots.slots() == {"slot-rdma:vf-0-3"}
    (tmp_path / f".nodefabric-claim-{UID}.json.1").write_text("{")
    assert claims.uids() == {UID}
    claims.remove(UID)
    claims.remove(UID)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nodefabric-slot-rdma:vf-0-3.json", "nvidia.json"]


def test_a_folder_that_cannot_be_written_is_named_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        Unavailable, match=rf"nodefabric-claim-{UID}\.claim cannot be written.*a pod of this claim.*cdiDir"
    ):
        ClaimSpecs(tmp_path / "file").write(CLAIM)
    assert ClaimSpecs(tmp_path / "absent").uids() == frozenset()


def test_a_copy_of_the_rows_stands_beside_the_spec_where_no_runtime_reads(tmp_path: Path) -> None:
    specs = ClaimSpecs(tmp_path)
    shared = replace(NIC, share_id="s1", exclusive=False, admin=True, identity="i", network={"mtu": 9000}, ifname="x")
    whole = replace(CLAIM, devices=(NIC, shared), pods=(PodRef("default", "p", "uid-p"),), only_pod="uid-p", since=5.0)
    specs.write(whole)
    specs.write(replace(CLAIM, ref=ClaimRef("other", "default", "other")))
    (copy, other) = specs.copies()
    assert (copy, [device.edits for device in copy.devices]) == (whole, [EDITS, EDITS])
    assert other.ref.name == "other"
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".claim"}


def test_only_root_reads_the_copy_for_a_network_may_name_what_its_ipam_logs_in_with(tmp_path: Path) -> None:
    ClaimSpecs(tmp_path).write(replace(CLAIM, devices=(replace(NIC, network={"ipam": {"password": "x"}}),)))
    modes = {path.suffix: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {".json": 0o644, ".claim": 0o600}


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"ref": {"uid": 1}}', '{"ref": {"colour": "red"}}'])
def test_a_copy_that_is_not_understood_is_passed_over(tmp_path: Path, text: str) -> None:
    specs = ClaimSpecs(tmp_path)
    specs.write(CLAIM)
    (tmp_path / "nodefabric-claim-aaa.claim").write_text(text)
    assert [claim.ref.uid for claim in specs.copies()] == [UID]


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
