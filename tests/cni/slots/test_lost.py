"""Whose the slots are that no books tell of, and what stands behind them."""

from __future__ import annotations

from collections.abc import Sequence

from agent.edits.cdi import SlotSpec
from agent.kubelet.checkpoint import Entry
from agent.kubelet.cri import Sandbox
from agent.model.allocation import PodRef
from agent.model.device import Snapshot
from agent.reconcile import HeldUnit
from agent.reconcile.units import SlotView
from cni.slots.bound import Holder, slot_devices, slot_holders
from tests.cni.slots.binding import slot, snapshot_with_rdma
from tests.deviceplugin.machines import node

POD = PodRef("default", "a", "uid-a")
UNNAMED = PodRef("default", "a")
"""As PodResources tells of it."""
HELD = HeldUnit(UNNAMED, "rdma/vf", slot(0), "worker")
NOTED = Entry("uid-a", "setup", "rdma/vf", (slot(0),))
RUNS = Sandbox("c1", POD, ready=True)


def who(
    held_units: Sequence[HeldUnit] | None = (),
    sandboxes: Sequence[Sandbox] | None = None,
    noted: Sequence[Entry] | None = (),
    pods: Sequence[tuple[str, str]] = (("kube-system", "nodefabric"),),
) -> Holder | None:
    """Ask for the first slot's holder; None if it is nobody's."""
    known = SlotView(20.0, (), None if held_units is None else set(pods), sandboxes, held_units)
    return slot_holders([slot(0)], known, noted).get(slot(0))


def test_a_slot_is_the_pods_that_kubelet_counts_it_to_and_the_runtime_runs() -> None:
    stopped = Sandbox("c0", POD, ready=False)
    assert who([HELD], [stopped, RUNS]) == Holder(POD, "worker", "rdma/vf", "c1")
    assert who([HELD], [stopped]) == Holder(POD, "worker", "rdma/vf", "c0")


def test_a_runtime_that_cannot_be_asked_leaves_the_sandbox_open() -> None:
    assert who([HELD]) == Holder(UNNAMED, "worker", "rdma/vf")


def test_a_pod_without_a_sandbox_has_no_container_whatever_kubelet_counts_to_it() -> None:
    other = Sandbox("c2", PodRef("default", "b", "uid-b"), ready=True)
    assert who([HELD], [other], [NOTED]) is None
    assert who([], [other], [NOTED]) is None


def test_an_init_containers_slot_is_known_from_the_checkpoint_by_the_pods_uid() -> None:
    assert who([], [RUNS], [NOTED]) == Holder(POD, "setup", "rdma/vf", "c1")
    assert who([], None, [NOTED]) == Holder(container="setup", resource_name="rdma/vf")


def test_a_slot_that_neither_list_of_kubelets_has_is_nobodys() -> None:
    assert who([], [RUNS]) is None
    assert who([], noted=None) is None


def test_nothing_is_believed_of_a_kubelet_that_is_silent_or_knows_no_pods_at_all() -> None:
    assert who(None) == Holder()
    assert who(None, [RUNS]) == Holder()
    assert who([], noted=None, pods=()) == Holder()
    assert who(None, [RUNS], [NOTED]) == Holder(POD, "setup", "rdma/vf", "c1")


def spec(addresses: Sequence[str], *files: str) -> SlotSpec:
    nodes = [{"path": path, "permissions": "rw"} for path in (*files, "/dev/infiniband/rdma_cm")]
    return SlotSpec("vf", {"env": ["OTHER=1", f"PCIDEVICE_RDMA_VF={','.join(addresses)}"], "deviceNodes": nodes})


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
    bare = SlotSpec("vf", {"env": [f"PCIDEVICE_RDMA_VF={a},{b}"]})
    assert slot_devices({slot(0): bare, far: bare}, snapshot, (), ()) == {slot(0): a, far: b}
    assert slot_devices({far: bare}, snapshot, (), [a]) == {far: a}  # the other one has left already
    assert slot_devices({far: bare}, snapshot, [a], ()) == {far: b}


def test_a_device_is_no_two_slots() -> None:
    snapshot = snapshot_with_rdma()
    a, *_ = vfs_of(snapshot)
    two = {slot(0): spec([a]), slot(1): spec([a])}
    assert slot_devices(two, snapshot, (), ()) == {slot(0): a}
    assert slot_devices(two, snapshot, [a], ()) == {}
    pods = {slot(0): spec([a]), slot(1): SlotSpec("vf", {"env": [f"PCIDEVICE_RDMA_VIP={a}"]})}
    assert len(slot_devices(pods, snapshot, (), ())) == 1


def test_a_device_that_has_left_the_node_is_still_the_slots() -> None:
    assert slot_devices({slot(0): spec(["0000:99:00.1"])}, Snapshot(), (), ()) == {slot(0): "0000:99:00.1"}


def test_a_spec_that_names_no_device_gives_none() -> None:
    for edits in (
        {},
        {"env": "PCIDEVICE_RDMA_VF=0000:99:00.1"},
        {"env": [7, "PCIDEVICE_RDMA_VF=none"], "deviceNodes": [None]},
        {"env": ["PCIDEVICE_RDMA_VF="]},
    ):
        assert slot_devices({slot(0): SlotSpec("vf", edits)}, Snapshot(), (), ()) == {}
