"""Grants of rails with several NICs: the books know each of these by its rail, and give none of them away."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from agent.errors import ClaimConflict
from agent.ledger import database
from agent.model.allocation import Claim, ClaimDevice, ClaimRef, ClaimState, UnitSpec
from tests.node import POD, open_books

RAIL, NICS = "rail-GPU-1", ("0000:3b:00.0", "0000:3c:00.0", "0000:3d:00.0")
OTHER = "0000:5b:00.0"
SPEC = UnitSpec("rail", (RAIL,), {"env": ["A=1"]}).with_nodes(NICS[1], [{"path": "/dev/infiniband/uverbs1"}])


def claim(device: str) -> Claim:
    found = ClaimDevice("nic", "node", "nic", "rdma/nic", "nic", device, "name")
    return Claim(ClaimRef("uid-c", "default", "c"), ClaimState.PREPARING, (found,))


def test_each_nic_of_a_rail_is_found_with_its_grant_also_after_a_restart(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        books.grant("rdma/rail", {RAIL: NICS}, {RAIL: SPEC})
        books.bind([RAIL], POD)
    for boot in ("boot-1", "boot-2"):
        with open_books(tmp_path, boot) as books:
            (grant,) = books.grants()
            assert (grant.devices, grant.device, grant.others, grant.pod) == (NICS, NICS[0], NICS[1:], POD)
            assert grant.spec == SPEC
            assert books.granted_devices(["rdma/rail"]) == {RAIL: NICS}
            for nic in NICS:
                assert books.granted_resource(nic) == "rdma/rail"
                assert books.granted_units(nic) == (RAIL,)
                assert books.specs_of(nic) == {RAIL: SPEC}
    assert database.read_books(tmp_path / "ledger.db").grants == (grant,)


@pytest.mark.parametrize("nic", NICS)
def test_no_claim_gets_any_nic_of_a_granted_rail_nor_a_rail_any_that_is_claimed(tmp_path: Path, nic: str) -> None:
    with open_books(tmp_path) as books:
        books.grant("rdma/rail", {RAIL: NICS})
        with pytest.raises(ClaimConflict, match=f"{RAIL} of rdma/rail"):
            books.prepare_claim(claim(nic))
        books.release([RAIL])
        assert (books.granted_units(nic), books.granted_resource(nic)) == ((), None)
        books.prepare_claim(claim(nic))
        with pytest.raises(ClaimConflict, match=nic):
            books.grant("rdma/rail", {RAIL: NICS})
        assert books.grants() == ()


def test_a_rail_that_moves_has_its_new_nics_alone(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        books.grant("rdma/rail", {RAIL: NICS})
        books.move_grants({RAIL: (NICS[1], OTHER)})
        assert [books.granted_units(nic) for nic in (*NICS, OTHER)] == [(), (RAIL,), (), (RAIL,)]
    with open_books(tmp_path) as books:
        assert books.grants()[0].devices == (NICS[1], OTHER)


def test_binding_and_saying_specs_leaves_all_nics_in_the_file(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        books.grant("rdma/rail", {RAIL: NICS}, {RAIL: SPEC})
        books.bind([RAIL], POD)
        books.set_specs({RAIL: SPEC})
        (tmp_path / "ledger.db").write_bytes(b"damaged" * 4096)
        books.probe()  # the file is made anew from memory
    assert database.read_books(tmp_path / "ledger.db").grants[0].devices == NICS


def test_a_file_of_the_format_before_has_one_device_for_each_grant(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        books.grant("rdma/rail", {RAIL: NICS[0]})
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as db:
        db.executescript("ALTER TABLE grants DROP COLUMN others; PRAGMA user_version = 7;")
    assert database.read_books(tmp_path / "ledger.db").grants[0].devices == NICS[:1]
    with open_books(tmp_path) as books:
        assert books.grants()[0].devices == NICS[:1]
        books.grant("rdma/rail", {RAIL: NICS})
    with open_books(tmp_path) as books:
        assert books.grants()[0].devices == NICS
