"""Slots over the life of pods: bound once for a sandbox, written down first, and never taken from a new owner."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.errors import DeviceBusy, Unavailable, UnknownUnit
from agent.kubelet.checkpoint import FILE
from agent.kubelet.podresources import ContainerDevices, DeviceAssignment, PodDevices
from agent.model.allocation import Undo
from agent.model.locality import Locality
from proto.deviceplugin.v1beta1 import api_pb2
from tests.cni.slots.binding import LATE, OTHER, POD, RESOURCES, Rig, call, slot, stock_of
from tests.deviceplugin.dra.nodes import recorded_node
from tests.node import attach, change, gpu_uuid, granted, node, open_books, owner
from tests.waiting import soon


def note(rig: Rig, *entries: tuple[str, str, list[str]]) -> None:
    """Have kubelet write into its checkpoint which container (of a pod, by UID) has which slots."""
    note_all(
        rig,
        *(
            {"PodUID": uid, "ContainerName": name, "ResourceName": "rdma/vf", "DeviceIDs": {"0": slots}}
            for uid, name, slots in entries
        ),
    )


def note_all(rig: Rig, *entries: Mapping[str, Any]) -> None:
    (rig.folder / FILE).parent.mkdir()
    (rig.folder / FILE).write_text(json.dumps({"Data": {"PodDeviceEntries": entries}}))


def test_kubelet_is_not_asked_where_no_slot_is_granted(rig: Rig) -> None:
    rig.ledger.grant(granted("nvidia.com/gpu", {gpu_uuid(0): gpu_uuid(0)}))
    assert rig.bind(call("c1")) == {}
    assert rig.asked == 0
    rig.settled = False  # the books may be new ones
    assert rig.bind(call("c1")) == {}
    assert rig.asked == 1


def test_a_pod_gets_a_device_for_each_slot_and_a_spec_that_says_what_it_is(rig: Rig) -> None:
    rig.grant(POD, slot(0), slot(1), gpus=(gpu_uuid(0),))
    bound = rig.bind(call("c1"))
    assert bound.keys() == {slot(0), slot(1)}
    assert len(set(bound.values())) == 2
    for slot_id, device in bound.items():
        spec = rig.spec(slot_id)
        assert spec is not None
        n = rig.vfs.index(device)
        assert [entry["path"] for entry in spec["deviceNodes"]] == [
            f"/dev/infiniband/uverbs{10 + n}",
            "/dev/infiniband/rdma_cm",
        ]
        assert spec["env"] == [f"PCIDEVICE_RDMA_VF={','.join(bound.values())}"]
    assert {grant.key: grant.device for grant in rig.ledger.holds()} == bound
    assert (rig.bind(call("c1")), rig.asked) == (bound, 1)  # the same sandbox once more


def test_a_late_or_repeated_del_leaves_the_new_pods_spec_alone(rig: Rig) -> None:
    rig.grant(POD, slot(0))
    old = rig.bind(call("c1"))[slot(0)]
    row = rig.attach(old, call("c1"))
    rig.grant(OTHER, slot(0))
    assert rig.spec(slot(0)) is None  # until its sandbox is made
    new = rig.bind(call("c2", OTHER))[slot(0)]
    assert new != old
    written = rig.spec(slot(0))
    for _ in range(3):
        rig.binder.unbind("c1", "eth0")
    assert rig.spec(slot(0)) == written
    assert rig.bind(call("c2", OTHER)) == {slot(0): new}
    assert [a.attachment_id for a in rig.ledger.attachments()] == [row]
    rig.binder.unbind("c2", "eth0")
    assert rig.spec(slot(0)) is None
    assert rig.ledger.bound_slots() == ()


def test_another_sandbox_of_the_pod_is_bound_before_or_after_the_old_ones_del(rig: Rig) -> None:
    rig.grant(POD, slot(0))
    first = rig.bind(call("c1"))[slot(0)]
    rig.attach(first, call("c1"))
    second = rig.bind(call("c2"))[slot(0)]
    assert second != first
    rig.binder.unbind("c1", "eth0")
    assert rig.spec(slot(0)) is not None
    rig.binder.unbind("c2", "eth0")
    third = rig.bind(call("c3"))[slot(0)]
    assert third != first  # whose VF is still in the first sandbox
    assert [b.container_id for b in rig.ledger.bound_slots()] == ["c3"]


def test_a_device_whose_adapter_another_pod_has_is_passed_over(rig: Rig) -> None:
    """ADD would refuse it, and the next choice be the same."""
    rig.stock = stock_of(node(rails=2, vfs=2))
    undo = Undo("rail0", "02:00:00:00:00:09", 1500, up=True, mode="nic")
    attach(rig.ledger, "0000:12:00.0", owner("c9", pod=OTHER), undo=undo)
    rig.grant(POD, slot(0), gpus=(gpu_uuid(0),))
    assert rig.bind(call("c1"))[slot(0)].startswith("0000:22:")


def test_devices_in_use_are_waited_for_and_then_told(rig: Rig) -> None:
    rig.grant(POD, slot(0))
    rows = [rig.attach(device, call(f"old-{n}")) for n, device in enumerate(rig.vfs)]
    with pytest.raises(DeviceBusy, match=r"1 devices of rdma/vf are wanted and 0 are free: of 4, 4 in use"):
        rig.bind(call("c1"))
    rig.binder = rig.make(busy_seconds=60)
    looks: list[bool] = []

    def wanted() -> bool:
        looks.append(True)
        return False  # its DEL has come

    with pytest.raises(DeviceBusy):
        rig.bind(call("c1"), wanted)
    assert len(looks) == 1
    row = next(a for a in rig.ledger.attachments() if a.attachment_id == rows[2])
    with soon(0.05, rig.ledger.finish_detach, row):
        assert rig.bind(call("c1")) == {slot(0): row.device}


def test_sick_devices_are_named_by_their_reason(rig: Rig) -> None:
    snapshot = rig.stock.snapshot
    for device in rig.vfs:
        snapshot = change(snapshot, device, driver=None)
    rig.stock = stock_of(snapshot)
    rig.grant(POD, slot(0))
    with pytest.raises(DeviceBusy, match=r"0 are free: of 4, 0 in use, 4 NoDriver"):
        rig.bind(call("c1"))


def test_a_device_that_a_pod_has_under_its_own_name_is_not_given_away(rig: Rig) -> None:
    rig.ledger.grant(granted("rdma/vf", {rig.vfs[0]: rig.vfs[0]}))  # from before the resource was bound late
    rig.grant(POD, slot(0))
    assert rig.bind(call("c1"))[slot(0)] == rig.vfs[1]


def test_variables_for_libraries_name_all_devices_of_the_container(rig: Rig) -> None:
    rig.resources = (replace(LATE, environment=("nccl",)), *RESOURCES[1:])
    rig.grant(POD, slot(0), slot(1))
    (share, *_) = rig.stock.units["rdma/hca"]
    (container,) = rig.pods[POD].containers
    early = DeviceAssignment("rdma/hca", (share.unit_id,))
    rig.pods[POD] = PodDevices(POD, (replace(container, devices=(*container.devices, early)),))
    bound = rig.bind(call("c1"))
    names = [f"mlx5_{10 + rig.vfs.index(device)}" for device in bound.values()]
    for slot_id in bound:
        assert f"NCCL_IB_HCA=={','.join([*names, 'mlx5_0'])}" in (rig.spec(slot_id) or {})["env"]


def test_what_only_an_init_container_has_is_bound_too(rig: Rig) -> None:
    rig.grant(POD, slot(0))
    rig.ledger.grant(granted("rdma/vf", {slot(1): "", slot(2): ""}))
    note(
        rig,
        (POD.uid, "worker", [slot(0)]),
        (POD.uid, "setup", [slot(0), slot(1)]),
        (OTHER.uid, "setup", [slot(2)]),
    )
    assert rig.bind(call("c1")).keys() == {slot(0), slot(1)}
    # A pod of which PodResources tells nothing has slots all the same.
    assert rig.bind(call("c2", OTHER)).keys() == {slot(2)}
    # Its next sandbox, before the first one's DEL.
    assert rig.bind(call("c3")).keys() == {slot(0), slot(1)}


@pytest.mark.parametrize("others", [(), (slot(2),)])
def test_what_only_an_init_container_has_is_bound_in_a_sandbox_after_its_grant_has_ended(
    rig: Rig, others: tuple[str, ...]
) -> None:
    """PodResources tells of no init container: to the reconciler its slot is nobody's, a minute after Allocate."""
    rig.ledger.grant(granted("rdma/vf", dict.fromkeys((slot(1), *others), "")))
    rig.pods[POD] = PodDevices(POD, (ContainerDevices("worker"),))
    note(rig, (POD.uid, "setup", [slot(1)]))
    rig.ledger.release([slot(1)])  # as the reconciler does
    if others:
        rig.grant(OTHER, *others)
    assert rig.bind(call("c1")).keys() == {slot(1)}
    assert rig.spec(slot(1)) is not None


def test_what_an_init_container_had_before_another_pod_is_left_to_that(rig: Rig) -> None:
    rig.grant(OTHER, slot(1))
    bound = rig.bind(call("c2", OTHER))
    rig.pods[POD] = PodDevices(POD, (ContainerDevices("worker"),))
    note(rig, (POD.uid, "setup", [slot(1)]))
    assert rig.bind(call("c1")) == {}
    assert {b.key: b.device for b in rig.ledger.bound_slots()} == bound


def test_an_interface_that_multus_asks_for_lets_go_of_its_own_slot(rig: Rig) -> None:
    rig.grant(POD, slot(0), slot(1))
    bound = rig.bind(call("c1", ifname="net1", device=slot(0)))
    assert rig.bind(call("c1", ifname="net2", device=slot(1))) == bound
    rig.binder.unbind("c1", "net2")
    assert [b.key for b in rig.ledger.bound_slots()] == [slot(0)]
    rig.binder.unbind("c1", "net1")
    assert rig.ledger.bound_slots() == ()
    assert rig.specs.names() == frozenset()


def test_a_spec_that_cannot_be_written_leaves_nothing_bound(rig: Rig) -> None:
    (rig.folder / "cdi").write_text("not a folder")
    rig.grant(POD, slot(0))
    with pytest.raises(Unavailable, match="cannot be written"):
        rig.bind(call("c1"))
    assert rig.ledger.bound_slots() == ()
    assert [grant.device for grant in rig.ledger.holds()] == [""]


# -------------------------------------------------------------------------------- what no call asks for any more, and


def test_a_resource_that_is_configured_no_more_is_named_with_what_helps(rig: Rig) -> None:
    rig.grant(POD, slot(0))
    for others in (RESOURCES[1:], (replace(LATE, binding="early"), *RESOURCES[1:])):
        rig.resources = others
        with pytest.raises(
            UnknownUnit, match=r"container worker has slots of rdma/vf.*put the resource back, or recre"
        ):
            rig.bind(call("c1"))
        with pytest.raises(UnknownUnit):  # by a new agent too
            rig.make().bind(call("c1"), lambda: True)
    assert rig.ledger.bound_slots() == ()
    rig.resources = RESOURCES
    assert rig.bind(call("c1")).keys() == {slot(0)}


def test_pods_without_slots_start_whatever_became_of_late_binding(rig: Rig) -> None:
    rig.grant(POD, slot(0))
    rig.resources = RESOURCES[1:]
    assert rig.bind(call("c2", OTHER)) == {}
    rig.ledger.release([slot(0)])
    asked = rig.asked
    assert rig.bind(call("c2", OTHER)) == {}
    assert rig.asked == asked  # nobody has any slots


def test_what_kubelets_checkpoint_counts_to_a_pod_stays_though_kubelet_lists_static_pods_alone(rig: Rig) -> None:
    """Where no runtime can be asked."""
    rig.grant(POD, slot(0), slot(1))
    rig.bind(call("c1"))
    first, _ = rig.ledger.bound_slots()
    note(rig, (POD.uid, "worker", [slot(0)]))
    rig.pods.clear()
    rig.outside.says_noted = lambda: None
    view = replace(rig.known(), asked_at=time.time() + 1)
    rig.grants.heal(view)
    assert len(rig.ledger.bound_slots()) == 2
    assert rig.heal(view) == [("slot-release", "sandbox-gone")]
    assert rig.ledger.bound_slots() == (first,)


def test_a_slot_that_a_call_makes_its_own_while_it_is_judged_keeps_its_spec(rig: Rig) -> None:
    rig.grant(POD, slot(0), slot(1))
    rig.bind(call("c1", ifname="net1", device=slot(0)))
    judged = rig.ledger.bound_slots()[1:]
    rig.bind(call("c1", ifname="net2", device=slot(1)))
    assert rig.specs.let_go(judged) == ()
    assert rig.ledger.hold(slot(1)) is not None
    assert rig.spec(slot(1)) is not None


# -------------------------------------------------------------------------------- NICs beside GPUs that other vendors


AMD_GPU = "amd.com/gpu"


@pytest.fixture
def amd(tmp_path: Path) -> Iterator[Rig]:
    with open_books(tmp_path) as books:
        yield Rig(tmp_path, books, stock_of(recorded_node("mi300x-8gpu")))


def bound_near(rig: Rig, resource: str, gpus: tuple[str, ...], count: int) -> list[str]:
    """Let a pod have these GPUs and so many slots; give what is bound, in the order of the slots."""
    slots = tuple(slot(n) for n in range(count))
    rig.grant(POD, *slots)
    devices = (DeviceAssignment("rdma/vf", slots), DeviceAssignment(resource, gpus))
    rig.pods[POD] = PodDevices(POD, (ContainerDevices("worker", devices),))
    found = rig.bind(call("c1"))
    return [found[each] for each in slots]


def response(*paths: str) -> str:
    files = [api_pb2.DeviceSpec(host_path=path, container_path=path, permissions="rw") for path in paths]
    return base64.b64encode(api_pb2.ContainerAllocateResponse(devices=files).SerializeToString()).decode()


GAUDI, NPU = "habana.ai/gaudi", "example.com/npu"
SEVENTH = response("/dev/kfd", "/dev/dri/card6", "/dev/dri/renderD134")


@pytest.mark.parametrize(
    ("resource", "entry", "near"),
    [
        (GAUDI, {"AllocResp": SEVENTH}, 6),
        (NPU, {"AllocResp": SEVENTH}, 6),  # of no plugin that is known
        *((GAUDI, {"AllocResp": SEVENTH, key: "other"}, None) for key in ("ResourceName", "ContainerName", "PodUID")),
        (GAUDI, {"AllocResp": response("/dev/vfio/6", "/dev/dri/card66", "/tmp/card6", "")}, None),
        (GAUDI, {"AllocResp": "not Base64"}, None),
        (GAUDI, {"AllocResp": base64.b64encode(b"no message").decode()}, None),
        (GAUDI, {"AllocResp": ["a list"]}, None),
        (GAUDI, {"DeviceIDs": 7}, None),
    ],
)
def test_a_gpu_whose_id_says_nothing_is_found_by_the_device_files_that_kubelet_keeps(
    amd: Rig, resource: str, entry: dict[str, Any], near: int | None
) -> None:
    own = {"PodUID": POD.uid, "ContainerName": "worker", "ResourceName": resource, "DeviceIDs": {"1": ["AN24001234"]}}
    note_all(amd, own | entry)
    (vf,) = bound_near(amd, resource, ("AN24001234",), 1)
    distances = amd.stock.distances
    beside = [n for n, gpu in enumerate(distances.gpus) if distances.distance(gpu, vf) is Locality.PXB]
    assert beside == [near if near is not None else 0], "else the slot's own NUMA node, and there the first"
