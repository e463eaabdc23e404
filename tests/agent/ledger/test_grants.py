"""Grants of rails, each of whose NICs the books know, and bindings: one device a slot, gone with sandbox or boot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agent.errors import ClaimConflict, DeviceBusy
from agent.ledger import database
from agent.model.allocation import Binding, Claim, ClaimDevice, ClaimRef, ClaimState, UnitSpec
from tests.node import POD, VF, open_books

OTHER_VF = "0000:3b:00.3"
SLOT = "slot-rdma:vf-0-0"
SECOND = "slot-rdma:vf-0-1"
BINDING = Binding(SLOT, "rdma/vf", "vf", VF, "worker", "c1", "eth0", POD, {"env": ["A=1"]})


def test_a_binding_is_kept_with_all_it_says_and_the_grant_names_its_device(tmp_path: Path) -> None:
    with open_books(tmp_path, clock=lambda: 5.0) as books:
        books.grant("rdma/vf", {SLOT: ""})
        (made,) = books.bind_slots([BINDING])
        assert made == replace(BINDING, boot_id="boot", since=5.0)
    with open_books(tmp_path) as books:
        assert books.bindings() == (made,)
        assert books.binding_of(SLOT) == made
        assert [(grant.device, grant.pod) for grant in books.grants()] == [(VF, POD)]
        assert books.granted_resource(VF) == "rdma/vf"
    assert database.read_books(tmp_path / "ledger.db").bindings == (made,)


def test_a_device_is_bound_to_one_slot_only(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        (made,) = books.bind_slots([BINDING])
        with pytest.raises(DeviceBusy, match=VF):
            books.bind_slots([replace(BINDING, unit_id=SECOND)])
        assert books.bindings() == (made,)
        books.bind_slots([replace(BINDING, device=OTHER_VF), replace(BINDING, unit_id=SECOND)])
        assert {b.unit_id: b.device for b in books.bindings()} == {SLOT: OTHER_VF, SECOND: VF}


def test_a_slot_bound_anew_is_not_unbound_by_its_former_owner(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        books.grant("rdma/vf", {SLOT: ""})
        (old,) = books.bind_slots([BINDING])
        (new,) = books.bind_slots([replace(BINDING, container_id="c2", device=OTHER_VF)])
        assert books.unbind([old]) == ()
        assert books.bindings() == (new,)
        assert books.unbind([new]) == (new,)
        assert books.unbind([new]) == ()
        assert books.bindings() == ()
        assert [grant.device for grant in books.grants()] == [""]


def test_a_reboot_voids_bindings_and_keeps_the_grants_of_their_slots(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        books.grant("rdma/vf", {SLOT: ""})
        books.bind_slots([BINDING])
    with open_books(tmp_path, "another boot") as books:
        assert books.bindings() == ()
        assert [(grant.unit_id, grant.device) for grant in books.grants()] == [(SLOT, "")]
        (made,) = books.bind_slots([replace(BINDING, unit_id=SECOND)])  # the device is free again
    assert database.read_books(tmp_path / "ledger.db").bindings == (made,)


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
                assert books.grants_on(nic) == (grant,)
    assert database.read_books(tmp_path / "ledger.db").grants == (grant,)


@pytest.mark.parametrize("nic", NICS)
def test_no_claim_gets_any_nic_of_a_granted_rail_nor_a_rail_any_that_is_claimed(tmp_path: Path, nic: str) -> None:
    with open_books(tmp_path) as books:
        books.grant("rdma/rail", {RAIL: NICS})
        with pytest.raises(ClaimConflict, match=f"{RAIL} of rdma/rail"):
            books.prepare_claim(claim(nic))
        books.release([RAIL])
        assert (books.grants_on(nic), books.granted_resource(nic)) == ((), None)
        books.prepare_claim(claim(nic))
        with pytest.raises(ClaimConflict, match=nic):
            books.grant("rdma/rail", {RAIL: NICS})
        assert books.grants() == ()


def test_a_rail_that_moves_has_its_new_nics_alone(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        books.grant("rdma/rail", {RAIL: NICS})
        books.move_grants({RAIL: (NICS[1], OTHER)})
        assert [len(books.grants_on(nic)) for nic in (*NICS, OTHER)] == [0, 1, 0, 1]
    with open_books(tmp_path) as books:
        assert books.grants()[0].devices == (NICS[1], OTHER)


def test_binding_and_saying_specs_leaves_all_nics_in_the_file(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        books.grant("rdma/rail", {RAIL: NICS}, {RAIL: SPEC})
        books.bind([RAIL], POD)
        books.set_specs({RAIL: SPEC})
    assert database.read_books(tmp_path / "ledger.db").grants[0].devices == NICS
