"""Books that are lost while pods live: no device that a container has goes to another pod."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from agent.errors import LedgerError
from agent.kubelet.cri import Sandbox
from agent.ledger import Ledger
from agent.model.allocation import Hold
from agent.reconcile.lost_books import LostBooks
from tests.cni.slots.binding import OTHER, POD, Rig, call, slot, snapshot_with_rdma, stock_of
from tests.node import claimed_vf, open_books, prepare

RUNS = Sandbox("c1", POD, ready=True)
OTHER_RUNS = Sandbox("c2", OTHER, ready=True)
"""A third pod's, so that the runtime is known to answer."""


@dataclass
class Loss:
    """A rig whose books can be lost."""

    rig: Rig
    reopen: Callable[[], Ledger]

    def lose_books(self) -> Rig:
        """Go on with new books, and all else as it is. Nothing is granted there but what kubelet tells again."""
        self.rig.ledger = self.reopen()
        self.rig.binder = self.rig.make()
        return self.rig


@pytest.fixture
def loss(tmp_path: Path) -> Iterator[Loss]:
    (tmp_path / "new").mkdir()
    with open_books(tmp_path) as books, open_books(tmp_path / "new") as others:
        yield Loss(Rig(tmp_path, books, stock_of(snapshot_with_rdma())), lambda: others)


PUT_BACK = ("slot-rebind", "books-lost")


def test_the_devices_of_a_living_pod_are_bound_again_and_go_to_no_other_pod(loss: Loss) -> None:
    rig = loss.rig
    rig.grant(POD, slot(0), slot(1))
    before = rig.bind(call("c1"))
    slots = rig.ledger.bound_slots()
    written = [rig.spec(s) for s in before]
    rig = loss.lose_books()
    silent = replace(rig.known(), held_units=None, pods=None)
    assert rig.heal(silent) == [PUT_BACK] * 2
    assert [replace(each, since=0.0) for each in rig.ledger.bound_slots()] == [replace(s, since=0.0) for s in slots]
    assert rig.heal(rig.known([RUNS])) == []
    assert [rig.spec(s) for s in before] == written
    rig.grant(OTHER, slot(20), slot(21))
    assert set(rig.bind(call("c9", OTHER)).values()) == set(rig.vfs) - set(before.values())
    rig.binder.unbind("c9", "eth0")
    assert rig.bind(call("c1")) == before
    rig.binder.unbind("c1", "eth0")
    assert rig.ledger.bound_slots() == ()
    assert rig.spec(slot(0)) is None


def test_a_device_that_a_claim_has_by_now_keeps_no_other_slot_from_its_own(
    loss: Loss, caplog: pytest.LogCaptureFixture
) -> None:
    rig = loss.rig
    rig.grant(POD, slot(0))
    (claimed,) = rig.bind(call("c1")).values()
    rig.grant(OTHER, slot(1))
    (left,) = rig.bind(call("c2", OTHER)).values()
    rig = loss.lose_books()
    prepare(rig.ledger, "nics", claimed_vf(claimed))
    assert rig.heal(rig.known([RUNS, OTHER_RUNS])) == [PUT_BACK, ("spec-remove", "slot-gone")]
    assert {hold.key: hold.device for hold in rig.ledger.bound_slots()} == {slot(1): left}
    assert f"slot {slot(0)} of pod default/a was lost with the books, and cannot be put back" in caplog.text


def test_what_is_put_back_is_free_when_nobody_has_it(loss: Loss) -> None:
    rig = loss.rig
    rig.grant(POD, slot(0))
    rig.bind(call("c1"))
    rig.pods.clear()
    rig = loss.lose_books()
    assert rig.heal(rig.known()) == [PUT_BACK, ("slot-release", "sandbox-gone")]
    assert rig.ledger.bound_slots() == ()
    assert rig.specs.names() == frozenset()


def test_slots_of_an_earlier_boot_are_not_put_back(loss: Loss, tmp_path: Path) -> None:
    rig = loss.rig
    rig.grant(POD, slot(0))
    rig.bind(call("c1"))
    (tmp_path / "later").mkdir()
    with open_books(tmp_path / "later", "boot-2") as rig.ledger:
        assert rig.heal(rig.known([RUNS])) == [("spec-remove", "slot-gone")]
        assert rig.ledger.bound_slots() == ()
        assert rig.specs.names() == frozenset()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("devices", [{}]),
        ("key", None),
        ("bound_at", "yesterday"),
        ("network", None),
        ("spec", {"kind": "vf", "edits": [1]}),
        ("pod", {"namespace": "default", "name": None}),
    ],
)
def test_a_copy_that_is_damaged_keeps_no_other_slot_from_its_device(loss: Loss, field: str, value: object) -> None:
    rig = loss.rig
    rig.grant(POD, slot(0), slot(1))
    before = rig.bind(call("c1"))
    copy = rig.folder / f"cdi/nodefabric-{slot(0)}.slot"
    copy.write_text(json.dumps({**json.loads(copy.read_text()), field: value}))
    rig = loss.lose_books()
    assert rig.heal(rig.known([RUNS])) == [PUT_BACK, ("spec-remove", "slot-gone")]
    assert {hold.key: hold.device for hold in rig.ledger.bound_slots()} == {slot(1): before[slot(1)]}


def test_what_cannot_be_written_into_the_books_keeps_no_other_slot_from_its_device_and_is_tried_again(
    loss: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = loss.rig
    rig.grant(POD, slot(0), slot(1))
    before = rig.bind(call("c1"))
    rig = loss.lose_books()
    bind, refused = rig.ledger.bind_slots, [slot(0)]

    def refusing(slots: Sequence[Hold]) -> tuple[Hold, ...]:
        if slots[0].key in refused:
            raise LedgerError("its disk is full")
        return bind(slots)

    monkeypatch.setattr(rig.ledger, "bind_slots", refusing)
    healer = LostBooks(rig.ledger, rig.specs, rig.outside)
    with pytest.raises(LedgerError, match="full"):
        healer.heal(rig.known([RUNS]))
    assert [hold.key for hold in rig.ledger.bound_slots()] == [slot(1)]
    refused.clear()
    healer.heal(rig.known([RUNS]))
    assert {hold.key: hold.device for hold in rig.ledger.bound_slots()} == before
