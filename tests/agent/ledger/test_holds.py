"""Rails, each of whose NICs the books know, and bound slots: one device each, gone with sandbox or boot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agent.errors import ClaimConflict, DeviceBusy
from agent.ledger import Ledger
from agent.model.allocation import Claim, ClaimRef, ClaimState, Spec
from tests.node import POD, VF, attach, bound_slot, claimed, granted, open_books, owner

OTHER_VF = "0000:3b:00.3"
SLOT = "slot-rdma:vf-0-0"
SECOND = "slot-rdma:vf-0-1"
BOUND = bound_slot(SLOT, "rdma/vf", "vf", VF, "worker", "c1", "eth0", POD, {"env": ["A=1"]})
UNBOUND = {SLOT: ()}


def test_slots_are_listed_as_they_were_bound_also_after_a_restart(tmp_path: Path) -> None:
    with open_books(tmp_path, clock=lambda: 5.0) as books:
        books.grant(granted("rdma/vf", {SLOT: (), SECOND: ()}))
        books.bind_slots([replace(BOUND, key=SECOND), replace(BOUND, devices=(OTHER_VF,))])
        assert [slot.key for slot in books.bound_slots()] == [SECOND, SLOT]
    with open_books(tmp_path) as books:
        assert [slot.key for slot in books.bound_slots()] == [SECOND, SLOT]


def test_a_slot_bound_anew_is_not_unbound_by_its_former_owner(books: Ledger) -> None:
    books.grant(granted("rdma/vf", UNBOUND))
    (old,) = books.bind_slots([BOUND])
    (new,) = books.bind_slots([replace(BOUND, container_id="c2", devices=(OTHER_VF,))])
    assert books.unbind([old]) == ()
    assert books.bound_slots() == (new,)
    books.bind([SLOT], replace(POD, uid=""))  # as kubelet names it, meanwhile
    assert [slot.key for slot in books.unbind([new])] == [SLOT]
    assert books.unbind([new]) == ()
    assert books.bound_slots() == ()
    assert [(hold.devices, hold.spec, hold.pod) for hold in books.holds()] == [((), None, replace(POD, uid=""))]


def test_a_slot_bound_anew_is_not_named_as_its_former_owners_by_an_add_that_took_long(books: Ledger) -> None:
    other = replace(POD, name="other", uid="other")
    books.grant(granted("rdma/vf", UNBOUND))
    books.bind_slots([BOUND])
    books.bind_slots([replace(BOUND, pod=other, container_id="c2", devices=(OTHER_VF,))])
    attach(books, OTHER_VF, owner("c2", "eth0", other), unit_id=SLOT)
    attach(books, VF, owner("c1", "eth0"), unit_id=SLOT)
    assert [hold.pod for hold in books.holds()] == [other]


def test_slots_that_are_bound_anew_together_may_exchange_their_devices(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        books.bind_slots([BOUND, replace(BOUND, key=SECOND, devices=(OTHER_VF,))])
        books.bind_slots([replace(BOUND, devices=(OTHER_VF,)), replace(BOUND, key=SECOND)])
        with pytest.raises(DeviceBusy):
            books.bind_slots([replace(BOUND, devices=(OTHER_VF,)), replace(BOUND, key=SECOND, devices=(OTHER_VF,))])
    with open_books(tmp_path) as books:
        assert {slot.key: slot.devices for slot in books.bound_slots()} == {SLOT: (OTHER_VF,), SECOND: (VF,)}


def test_a_slot_that_is_bound_stays_though_kubelet_counts_it_to_no_pod(books: Ledger) -> None:
    (made,) = books.bind_slots([BOUND])
    books.release([SLOT])
    assert books.holds() == (made,)
    books.unbind([made])
    books.release([SLOT])
    assert books.holds() == ()


def test_a_slot_bound_in_another_boot_leaves_its_device_though_nobody_wrote_that(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        books.bind_slots([BOUND])
    with open_books(tmp_path, "another boot") as books:
        books.bind_slots([replace(BOUND, key=SECOND)])
        assert [hold.devices for hold in books.holds()] == [(), (VF,)]
        books.bind_slots([replace(BOUND, devices=(OTHER_VF,))])
        books.bind_slots([replace(BOUND, key="slot-rdma:vf-0-2", devices=("x",))])
    with open_books(tmp_path, "another boot") as books:
        assert {slot.key: slot.device for slot in books.bound_slots()} == {
            SLOT: OTHER_VF,
            SECOND: VF,
            "slot-rdma:vf-0-2": "x",
        }


RAIL, NICS = "rail-GPU-1", ("0000:3b:00.0", "0000:3c:00.0", "0000:3d:00.0")
OTHER = "0000:5b:00.0"
SPEC = Spec("rail", {"env": ["A=1"]}, beside=(RAIL,)).with_nodes(NICS[1], [{"path": "/dev/infiniband/uverbs1"}])


def claim(device: str) -> Claim:
    found = claimed("nic", "node", "nic", "rdma/nic", "nic", device, "name")
    return Claim(ClaimRef("uid-c", "default", "c"), ClaimState.PREPARING, (found,))


@pytest.mark.parametrize("nic", NICS)
def test_no_claim_gets_any_nic_of_a_granted_rail_nor_a_rail_any_that_is_claimed(books: Ledger, nic: str) -> None:
    books.grant(granted("rdma/rail", {RAIL: NICS}))
    with pytest.raises(ClaimConflict, match=f"{RAIL} of rdma/rail"):
        books.prepare_claim(claim(nic))
    books.release([RAIL])
    assert (books.holds_on(nic), books.resource_held(nic)) == ((), None)
    books.prepare_claim(claim(nic))
    with pytest.raises(ClaimConflict, match=nic):
        books.grant(granted("rdma/rail", {RAIL: NICS}))
    assert books.holds() == ()
