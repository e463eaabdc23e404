"""Bindings: one device a slot, one slot a device, gone with their sandbox or their boot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agent.errors import DeviceBusy
from agent.ledger import database
from agent.model.allocation import Binding
from tests.node import POD, VF, open_books

OTHER = "0000:3b:00.3"
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
        books.bind_slots([replace(BINDING, device=OTHER), replace(BINDING, unit_id=SECOND)])
        assert {b.unit_id: b.device for b in books.bindings()} == {SLOT: OTHER, SECOND: VF}


def test_a_slot_bound_anew_is_not_unbound_by_its_former_owner(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        books.grant("rdma/vf", {SLOT: ""})
        (old,) = books.bind_slots([BINDING])
        (new,) = books.bind_slots([replace(BINDING, container_id="c2", device=OTHER)])
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
