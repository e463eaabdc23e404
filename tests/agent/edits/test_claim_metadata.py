"""What lies beside the spec of a claim: a copy of its rows, and files that tell containers of its devices."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.edits.claim_metadata import metadata_path
from agent.edits.specs import Specs, file_of_claim
from agent.ledger import Ledger
from agent.model.allocation import Claim, ClaimState, PodRef
from tests.node import claimed, open_books, prepare

EDITS = {"env": ["A=1"], "deviceNodes": [{"path": "/dev/infiniband/uverbs3"}]}
UID = "uid-nics"
NIC = claimed("nic", "node", "vf-1", "rdma/vf", "vf", "0000:3b:00.2", f"{UID}-0-vf-1", edits=EDITS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cdi").mkdir()
    return tmp_path / "cdi"


@pytest.fixture
def specs(books: Ledger, folder: Path) -> Specs:
    return Specs(books, folder)


@pytest.fixture
def claim(books: Ledger) -> Claim:
    return prepare(books, "nics", NIC)


def there(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def as_new(claim: Claim) -> Claim:
    return replace(claim, state=ClaimState.PREPARING, since=0.0)


def test_a_claim_whose_devices_no_container_is_to_name_has_no_spec(books: Ledger, specs: Specs, folder: Path) -> None:
    prepare(books, "nics", replace(NIC, spec=None))
    specs.sync([file_of_claim(UID)])  # the runtime would refuse a spec without a device
    assert there(folder) == {f"nodefabric-claim-{UID}.claim"}
    assert specs.names("claim-") == {file_of_claim(UID)}


def test_the_copy_tells_all_of_the_claim_as_it_is_to_be_prepared_again(books: Ledger, specs: Specs) -> None:
    shared = replace(
        NIC, key="shared", share_id="s1", exclusive=False, admin=True, identity="i", network={"mtu": 9000}, ifname="x"
    )
    whole = prepare(books, "nics", NIC, shared, pods=(PodRef("default", "p", "uid-p"),), only_pod="uid-p")
    other = prepare(books, "other", replace(NIC, key="other", devices=("0000:3b:00.3",)))
    for claim in (whole, other):
        specs.sync([file_of_claim(claim.ref.uid)])
    assert list(specs.copies()) == [as_new(whole), as_new(other)]


def test_a_copy_is_written_again_if_the_claim_has_changed(books: Ledger, specs: Specs, claim: Claim) -> None:
    specs.sync([file_of_claim(UID)])
    assert list(specs.copies()) == [as_new(claim)]
    books.set_claim_pods(UID, [PodRef("default", "another", "uid-a")])
    specs.rewrite()
    assert list(specs.copies()) == [as_new(replace(claim, pods=(PodRef("default", "another", "uid-a"),)))]


def test_a_claim_that_is_ended_or_of_another_boot_gets_neither_copy_nor_spec(
    books: Ledger, claim: Claim, folder: Path, tmp_path: Path
) -> None:
    """The copy that comes last would outlive it, and the spec may name what is another's by now."""

    def write_all(books: Ledger) -> None:
        specs = Specs(books, folder)
        specs.sync([file_of_claim(UID)])
        assert specs.rewrite() == []

    books.set_claim_state(UID, ClaimState.UNPREPARING)
    write_all(books)
    books.set_claim_state(UID, ClaimState.PREPARED)
    books.close()
    with open_books(tmp_path, boot_id="next") as later:
        write_all(later)
    assert there(folder) == set()


def test_only_root_reads_the_copy_for_a_network_may_name_what_its_ipam_logs_in_with(
    books: Ledger, specs: Specs, folder: Path
) -> None:
    prepare(books, "nics", replace(NIC, network={"ipam": {"password": "x"}}))
    specs.sync([file_of_claim(UID)])
    modes = {path.suffix: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {".json": 0o644, ".claim": 0o600}


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"ref": {"uid": 1}}', '{"ref": {"colour": "red"}}'])
def test_a_copy_that_is_not_understood_is_passed_over(specs: Specs, claim: Claim, folder: Path, text: str) -> None:
    specs.sync([file_of_claim(claim.ref.uid)])
    for other in ("claim-aaa.claim", "slot-rdma:vf-0-3.slot"):
        (folder / f"nodefabric-{other}").write_text(text)
    assert list(specs.copies()) == [as_new(claim)]


DOCUMENT: dict[str, Any] = {
    "metadata": {"uid": UID},
    "requests": [{"name": "nic/near", "devices": [{"name": "vf-1", "pool": "n"}, {"name": "vf-2", "pool": "n"}]}],
}
NETWORK = {"interfaceName": "net1", "ips": ["192.0.2.1/24"]}


def devices(path: Path) -> dict[str, Any]:
    (request,) = json.loads(path.read_text())["requests"]
    return {device["name"]: device.get("networkData") for device in request["devices"]}


def test_a_device_is_told_of_in_a_new_file_with_a_higher_number(specs: Specs, folder: Path) -> None:
    specs.metadata.write(UID, "nic", DOCUMENT)
    path = metadata_path(folder, UID, "nic")
    assert json.loads(path.read_text()) == {**DOCUMENT, "metadata": {"uid": UID, "generation": 1}}
    assert path.stat().st_mode & 0o777 == 0o644  # containers have users of their own
    with path.open() as opened:  # as a container that has it already
        specs.metadata.add_networks(UID, {"nic": {"vf-1": NETWORK}})
        assert json.load(opened)["metadata"]["generation"] == 1
    assert devices(path) == {"vf-1": NETWORK, "vf-2": None}
    specs.metadata.add_networks(UID, {"nic": {"vf-1": {}}})
    assert devices(path) == {"vf-1": None, "vf-2": None}
    specs.metadata.write(UID, "nic", DOCUMENT)
    assert json.loads(path.read_text())["metadata"]["generation"] == 4
    assert list(folder.iterdir()) == [path]


def test_they_go_with_the_spec_of_their_claim_and_those_of_others_stay(specs: Specs) -> None:
    specs.metadata.write(UID, "nic", DOCUMENT)
    specs.metadata.write(UID, "rail", DOCUMENT)
    specs.metadata.write(f"{UID}2", "nic", DOCUMENT)
    assert specs.names("claim-") == {file_of_claim(UID), file_of_claim(f"{UID}2")}
    specs.remove(file_of_claim(UID))
    specs.remove(file_of_claim(UID))
    assert specs.names() == {file_of_claim(f"{UID}2")}
