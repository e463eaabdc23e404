"""Books that are lost while pods live: no device that a container has goes to another pod."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from agent.errors import DeviceBusy
from agent.kubelet.checkpoint import FILE
from agent.kubelet.cri import Sandbox
from agent.ledger import Ledger
from agent.offer.selection import assign
from agent.offer.units import Holdings, Inputs, Reading, make_offer
from agent.reconcile.units import is_over
from tests.agent.books import open_books
from tests.cni.slots.binding import OTHER, POD, RESOURCES, Rig, call, slot, snapshot_with_rdma, stock_of

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


def note(rig: Rig, container: str, *slots: str) -> None:
    """Write kubelet's checkpoint."""
    entry = {"PodUID": POD.uid, "ContainerName": container, "ResourceName": "rdma/vf", "DeviceIDs": {"0": list(slots)}}
    (rig.folder / FILE).parent.mkdir(exist_ok=True)
    (rig.folder / FILE).write_text(json.dumps({"Data": {"PodDeviceEntries": [entry]}}))


def free_for_another(rig: Rig, *taken: str) -> list[str]:
    """List the devices that another pod could get, one after the other."""
    slots = [slot(n) for n in range(20, 24)]
    rig.grant(OTHER, *slots)
    found: list[str] = []
    for n in range(4, 0, -1):
        rig.pods.pop(OTHER)
        rig.grant(OTHER, *slots[:n])
        try:
            found = list(rig.bind(call("c9", OTHER), lambda: False).values())
            break
        except DeviceBusy:
            continue
    rig.binder.unbind("c9", "eth0")
    return found


def test_the_devices_of_a_living_pod_are_bound_again_and_go_to_no_other_pod(loss: Loss) -> None:
    rig = loss.rig
    rig.grant(POD, slot(0), slot(1))
    before = rig.bind(call("c1"))
    written = [rig.spec(s) for s in before]
    rig = loss.lose_books()
    assert set(rig.mend(rig.known([RUNS]))) == {("slot-rebind", slot(0)), ("slot-rebind", slot(1))}
    assert {b.unit_id: b.device for b in rig.ledger.bindings()} == before
    assert {(b.pod, b.container, b.container_id, b.resource_name, b.kind) for b in rig.ledger.bindings()} == {
        (POD, "worker", "c1", "rdma/vf", "vf")
    }
    assert rig.mend(rig.known([RUNS])) == ()
    assert [rig.spec(s) for s in before] == written
    assert set(free_for_another(rig)) == set(rig.vfs) - set(before.values())
    assert rig.bind(call("c1")) == before
    rig.binder.unbind("c1", "eth0")
    assert rig.ledger.bindings() == ()
    assert rig.spec(slot(0)) is None


def test_the_list_shows_kubelet_a_slot_less_for_each_device_that_is_bound_again(loss: Loss) -> None:
    rig = loss.rig
    rig.grant(POD, slot(0))
    bound = rig.bind(call("c1"))
    rig = loss.lose_books()
    rig.mend(rig.known([RUNS]))
    snapshot = rig.stock.snapshot
    held = Holdings(rig.ledger.granted_slots(), {b.unit_id: b.device for b in rig.ledger.bindings()})
    listed = make_offer(Inputs(RESOURCES, snapshot, assign(RESOURCES, snapshot), Reading(held=held))).units["rdma/vf"]
    assert {u.unit_id: u.device for u in listed if u.device} == bound
    assert len(listed) == len(rig.vfs)


def test_a_device_is_held_while_kubelet_is_silent_and_bound_when_it_speaks(loss: Loss) -> None:
    rig = loss.rig
    rig.grant(POD, slot(0))
    before = rig.bind(call("c1"))
    rig = loss.lose_books()
    silent = replace(rig.known(), held_units=None, pods=None)
    assert rig.mend(silent) == (("slot-hold", slot(0)),)
    assert rig.mend(silent) == ()
    assert rig.bound.release(lambda binding: is_over(binding, rig.known([OTHER_RUNS]))) == ()
    assert set(free_for_another(rig)) == set(rig.vfs) - set(before.values())
    rig.pods.pop(OTHER)
    assert rig.mend(rig.known()) == (("slot-rebind", slot(0)),)  # by kubelet's word
    assert [(b.pod.name, b.container_id) for b in rig.ledger.bindings()] == [("a", "")]
    assert rig.mend(rig.known([RUNS])) == (("slot-rebind", slot(0)),)  # and by the runtime's
    assert [(b.pod, b.container_id) for b in rig.ledger.bindings()] == [(POD, "c1")]
    assert rig.spec(slot(0)) is not None


def test_what_is_held_is_free_when_nobody_has_the_slot(loss: Loss) -> None:
    rig = loss.rig
    rig.grant(POD, slot(0))
    rig.bind(call("c1"))
    rig = loss.lose_books()
    rig.mend(replace(rig.known(), held_units=None, pods=None))
    rig.pods.clear()
    assert rig.mend(rig.known()) == (("spec-remove", slot(0)),)
    assert rig.ledger.bindings() == ()
    assert rig.spec(slot(0)) is None


def test_what_is_held_is_free_when_kubelet_gives_the_slot_to_another_pod(loss: Loss) -> None:
    rig = loss.rig
    rig.grant(POD, slot(0))
    rig.bind(call("c1"))
    rig = loss.lose_books()
    rig.mend(replace(rig.known(), held_units=None, pods=None))
    rig.grant(OTHER, slot(0))
    assert rig.ledger.bindings() == ()
    assert rig.bind(call("c2", OTHER)).keys() == {slot(0)}


def test_an_init_containers_device_stays_its_own(loss: Loss) -> None:
    rig = loss.rig
    rig.ledger.grant("rdma/vf", {slot(0): ""})
    note(rig, "setup", slot(0))
    before = rig.bind(call("c1"))
    assert before.keys() == {slot(0)}
    rig = loss.lose_books()
    assert rig.mend(rig.known([RUNS])) == (("slot-rebind", slot(0)),)
    (binding,) = rig.ledger.bindings()
    assert (binding.device, binding.pod, binding.container) == (before[slot(0)], POD, "setup")


def test_another_sandbox_of_the_pod_takes_its_slots_over_whoever_could_be_asked(loss: Loss) -> None:
    rig = loss.rig
    rig.grant(POD, slot(0))
    rig.ledger.grant("rdma/vf", {slot(1): ""})
    note(rig, "setup", slot(1))
    rig.bind(call("c1"))
    rig = loss.lose_books()
    rig.mend(replace(rig.known(), held_units=None, pods=None))
    rig.ledger.grant("rdma/vf", {slot(0): "", slot(1): ""})  # as kubelet tells again
    bound = rig.bind(call("c2"))
    assert bound.keys() == {slot(0), slot(1)}
    assert {b.container_id for b in rig.ledger.bindings()} == {"c2"}


def test_a_pod_that_ended_while_the_books_were_lost_leaves_nothing(loss: Loss) -> None:
    rig = loss.rig
    rig.grant(POD, slot(0))
    rig.bind(call("c1"))
    rig = loss.lose_books()
    assert rig.mend(rig.known([OTHER_RUNS])) == (("spec-remove", slot(0)),)
    assert rig.ledger.bindings() == ()


def test_a_spec_that_tells_no_device_is_said_once_and_left_to_its_container(
    loss: Loss, caplog: pytest.LogCaptureFixture
) -> None:
    rig = loss.rig
    rig.grant(POD, slot(0), slot(1))
    bound = rig.bind(call("c1"))
    rig = loss.lose_books()
    (rig.specs.folder / f"nodefabric-{slot(1)}.json").write_text('{"kind": "nodefabric.io/vf", "devices"')
    with caplog.at_level(logging.ERROR):
        assert rig.bound.mend(rig.known([RUNS]), rig.stock.snapshot) == (("slot-rebind", slot(0)),)
        rig.bound.mend(rig.known([RUNS]), rig.stock.snapshot)
    said = [record.getMessage() for record in caplog.records if slot(1) in record.getMessage()]
    assert len(said) == 1
    assert "recreate its pod" in said[0]
    assert [b.device for b in rig.ledger.bindings()] == [bound[slot(0)]]
    assert slot(1) in rig.specs.slots()
