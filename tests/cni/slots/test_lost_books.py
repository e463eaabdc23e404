"""Books that are lost while pods live: no device that a container has goes to another pod."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from agent.errors import DeviceBusy
from agent.kubelet.checkpoint import Entry
from agent.kubelet.cri import Sandbox
from agent.kubelet.podresources import HeldUnit
from agent.ledger import Ledger
from agent.model.allocation import PodRef, Spec
from agent.model.device import Snapshot
from agent.reconcile.view import View
from cni.slots.bound import Holder, is_over, slot_devices, slot_holders
from tests.cni.slots.binding import OTHER, POD, Rig, call, slot, snapshot_with_rdma, stock_of
from tests.node import claimed_vf, node, open_books, prepare

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
    assert {b.key: b.device for b in rig.ledger.bound_slots()} == before
    assert {(b.pod, b.container, b.container_id, b.resource_name, b.kind) for b in rig.ledger.bound_slots()} == {
        (POD, "worker", "c1", "rdma/vf", "vf")
    }
    assert rig.mend(rig.known([RUNS])) == ()
    assert [rig.spec(s) for s in before] == written
    assert set(free_for_another(rig)) == set(rig.vfs) - set(before.values())
    assert rig.bind(call("c1")) == before
    rig.binder.unbind("c1", "eth0")
    assert rig.ledger.bound_slots() == ()
    assert rig.spec(slot(0)) is None


def test_a_device_that_a_claim_has_by_now_keeps_no_other_slot_from_its_own(loss: Loss) -> None:
    rig = loss.rig
    rig.grant(POD, slot(0))
    (claimed,) = rig.bind(call("c1")).values()
    rig.grant(OTHER, slot(1))
    (left,) = rig.bind(call("c2", OTHER)).values()
    rig = loss.lose_books()
    prepare(rig.ledger, "nics", claimed_vf(claimed))
    assert rig.mend(rig.known([RUNS, OTHER_RUNS])) == (("slot-rebind", slot(1)),)
    assert {hold.key: hold.device for hold in rig.ledger.bound_slots()} == {slot(1): left}


def test_a_device_is_held_while_kubelet_is_silent_and_bound_when_it_speaks(loss: Loss) -> None:
    rig = loss.rig
    rig.grant(POD, slot(0))
    before = rig.bind(call("c1"))
    rig = loss.lose_books()
    silent = replace(rig.known(), held_units=None, pods=None)
    assert rig.mend(silent) == (("slot-hold", slot(0)),)
    assert rig.mend(silent) == ()
    assert rig.bound.release(lambda slot: is_over(slot, rig.known([OTHER_RUNS]))) == ()
    assert set(free_for_another(rig)) == set(rig.vfs) - set(before.values())
    rig.pods.pop(OTHER)
    assert rig.mend(rig.known()) == (("slot-rebind", slot(0)),)  # by kubelet's word
    assert [(b.pod, b.container_id) for b in rig.ledger.bound_slots()] == [(UNNAMED, "")]
    assert rig.mend(rig.known([RUNS])) == (("slot-rebind", slot(0)),)  # and by the runtime's
    assert [(b.pod, b.container_id) for b in rig.ledger.bound_slots()] == [(POD, "c1")]
    assert rig.spec(slot(0)) is not None


def test_what_is_held_is_free_when_nobody_has_the_slot(loss: Loss) -> None:
    rig = loss.rig
    rig.grant(POD, slot(0))
    rig.bind(call("c1"))
    rig = loss.lose_books()
    rig.mend(replace(rig.known(), held_units=None, pods=None))
    rig.pods.clear()
    assert rig.mend(rig.known()) == (("spec-remove", slot(0)),)
    assert rig.ledger.bound_slots() == ()
    assert rig.spec(slot(0)) is None


def test_a_spec_that_tells_no_device_is_said_once_and_left_to_its_container(
    loss: Loss, caplog: pytest.LogCaptureFixture
) -> None:
    rig = loss.rig
    rig.grant(POD, slot(0), slot(1))
    bound = rig.bind(call("c1"))
    rig = loss.lose_books()
    (rig.folder / f"cdi/nodefabric-{slot(1)}.json").write_text('{"kind": "nodefabric.io/vf", "devices"')
    with caplog.at_level(logging.ERROR):
        assert rig.bound.mend(rig.known([RUNS]), rig.stock.snapshot) == (("slot-rebind", slot(0)),)
        rig.bound.mend(rig.known([RUNS]), rig.stock.snapshot)
    said = [record.getMessage() for record in caplog.records if slot(1) in record.getMessage()]
    assert len(said) == 1
    assert "recreate its pod" in said[0]
    assert [b.device for b in rig.ledger.bound_slots()] == [bound[slot(0)]]
    assert slot(1) in rig.specs.names()


# -------------------------------------------------------------------------------- whose the slots are that no books t


UNNAMED = PodRef("default", "a")
"""As PodResources tells of it."""
HELD = HeldUnit(UNNAMED, "rdma/vf", slot(0), "worker")
NOTED = Entry("uid-a", "setup", "rdma/vf", (slot(0),))


def who(
    held_units: Sequence[HeldUnit] | None = (),
    sandboxes: Sequence[Sandbox] | None = None,
    noted: Sequence[Entry] | None = (),
    pods: Sequence[tuple[str, str]] = (("kube-system", "nodefabric"),),
) -> Holder | None:
    """Ask for the first slot's holder; None if it is nobody's."""
    known = View(20.0, held_units, None if held_units is None else set(pods), sandboxes)
    return slot_holders([slot(0)], known, noted).get(slot(0))


def spec(addresses: Sequence[str], *files: str) -> Spec:
    nodes = [{"path": path, "permissions": "rw"} for path in (*files, "/dev/infiniband/rdma_cm")]
    return Spec("vf", {"env": ["OTHER=1", f"PCIDEVICE_RDMA_VF={','.join(addresses)}"], "deviceNodes": nodes})


def vfs_of(snapshot: Snapshot) -> list[str]:
    return [device.address for device in snapshot.devices if device.is_vf]


def test_a_slots_device_is_the_one_whose_files_its_spec_names() -> None:
    snapshot = snapshot_with_rdma()
    a, b, c, _ = vfs_of(snapshot)
    told = [a, b, c]
    specs = {
        slot(0): spec(told, "/dev/infiniband/uverbs12"),
        slot(1): spec(told, "/dev/infiniband/uverbs10"),
        slot(2): spec(told, "/dev/infiniband/uverbs11"),
    }
    assert slot_devices(specs, snapshot, (), ()) == {slot(0): c, slot(1): a, slot(2): b}
    one = {slot(0): specs[slot(0)]}
    assert slot_devices(one, snapshot, (), [a]) == {slot(0): c}


def test_without_files_a_slot_has_a_device_that_is_in_a_pod_then_one_of_its_own_numa_node() -> None:
    snapshot = node(rails=2, vfs=2)
    a, _, b, _ = vfs_of(snapshot)
    far = "slot-rdma:vf-1-0"
    bare = Spec("vf", {"env": [f"PCIDEVICE_RDMA_VF={a},{b}"]})
    assert slot_devices({slot(0): bare, far: bare}, snapshot, (), ()) == {slot(0): a, far: b}
    assert slot_devices({far: bare}, snapshot, (), [a]) == {far: a}  # the other one has left already
    assert slot_devices({far: bare}, snapshot, [a], ()) == {far: b}


def test_a_device_is_no_two_slots() -> None:
    snapshot = snapshot_with_rdma()
    a, *_ = vfs_of(snapshot)
    two = {slot(0): spec([a]), slot(1): spec([a])}
    assert slot_devices(two, snapshot, (), ()) == {slot(0): a}
    assert slot_devices(two, snapshot, [a], ()) == {}
    pods = {slot(0): spec([a]), slot(1): Spec("vf", {"env": [f"PCIDEVICE_RDMA_VIP={a}"]})}
    assert len(slot_devices(pods, snapshot, (), ())) == 1


def test_a_spec_that_names_no_device_gives_none() -> None:
    for edits in (
        {},
        {"env": "PCIDEVICE_RDMA_VF=0000:99:00.1"},
        {"env": [7, "PCIDEVICE_RDMA_VF=none"], "deviceNodes": [None]},
        {"env": ["PCIDEVICE_RDMA_VF="]},
    ):
        assert slot_devices({slot(0): Spec("vf", edits)}, Snapshot(), (), ()) == {}


STOPPED = Sandbox("c0", POD, ready=False)


@pytest.mark.parametrize(
    ("held", "sandboxes", "noted", "expected"),
    [
        ([HELD], [STOPPED, RUNS], [], Holder(POD, "worker", "rdma/vf", "c1")),
        ([HELD], [STOPPED], [], Holder(POD, "worker", "rdma/vf", "c0")),
        ([HELD], None, [], Holder(UNNAMED, "worker", "rdma/vf")),  # the runtime cannot be asked
        # A pod without a sandbox has no container, whatever kubelet counts to it.
        ([HELD], [OTHER_RUNS], [NOTED], None),
        ([], [OTHER_RUNS], [NOTED], None),
        # An init container's slot is known from the checkpoint, by the pod's UID.
        ([], [RUNS], [NOTED], Holder(POD, "setup", "rdma/vf", "c1")),
        ([], None, [NOTED], Holder(container="setup", resource_name="rdma/vf")),
        (None, [RUNS], [NOTED], Holder(POD, "setup", "rdma/vf", "c1")),
        # Neither list of kubelet's has it, or kubelet is silent.
        ([], [RUNS], [], None),
        ([], None, None, None),
        (None, None, [], Holder()),
        (None, [RUNS], [], Holder()),
    ],
)
def test_whose_a_slot_is_by_kubelet_its_notes_and_the_runtime(
    held: list[HeldUnit] | None, sandboxes: list[Sandbox] | None, noted: list[Entry] | None, expected: Holder | None
) -> None:
    assert who(held, sandboxes, noted) == expected


def test_nothing_is_believed_of_a_kubelet_that_knows_no_pods_at_all() -> None:
    assert who([], noted=None, pods=()) == Holder()
