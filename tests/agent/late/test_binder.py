"""Bindings over the life of pods: made once for a sandbox, written down first, and never taken from a new owner."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from agent.cdi import SlotSpecs
from agent.clients.cri import Sandbox
from agent.clients.kubelet import ContainerDevices, DeviceAssignment, PodDevices
from agent.config import Resource
from agent.errors import DeviceBusy, Unavailable, UnknownUnit
from agent.late.binder import Binder
from agent.late.checkpoint import FILE
from agent.ledger import Ledger
from agent.model.allocation import Binding, NetnsId, Owner, PodRef, Undo
from agent.model.device import Snapshot
from agent.placement import Terrain
from agent.reconcile import Claim
from agent.reconcile.slots import Known
from cni import netconf
from cni.call import Call
from deviceplugin.assignment import assign
from deviceplugin.resources import list_all
from deviceplugin.unit import Unit
from tests.agent.books import open_books
from tests.deviceplugin.machines import change, gpu_uuid, node, rdma

LATE = Resource("rdma/vf", "vf", binding="late")
HELPED = Resource("rdma/hca", "hca", shares=2, environment=("nccl",))
RESOURCES = (LATE, Resource("nvidia.com/gpu", "gpu"), HELPED)
POD = PodRef("default", "a", "uid-a")
OTHER = PodRef("default", "b", "uid-b")


def slot(number: int) -> str:
    return f"slot-rdma:vf-0-{number}"


def snapshot_with_rdma() -> Snapshot:
    """One switch with a GPU and four VFs, each with an RDMA device."""
    snapshot = node(rails=1, vfs=4)
    for n, device in enumerate(d for d in snapshot.devices if d.is_vf):
        snapshot = change(snapshot, device.address, rdma_devices=(rdma(10 + n, f"0000:0000:0000:000{n + 1}"),))
    return snapshot


@dataclass
class Stock:
    """What is offered."""

    snapshot: Snapshot
    pools: Mapping[str, tuple[Unit, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        found = list_all(RESOURCES, assign(RESOURCES, self.snapshot), self.snapshot)
        self.pools = found.pools
        self.units = found.units
        self.terrain = Terrain(self.snapshot)

    def find(self, resource_name: str, unit_id: str) -> Unit | None:
        return next((unit for unit in self.units[resource_name] if unit.unit_id == unit_id), None)


@dataclass
class Rig:
    """A binder with its books, and a kubelet that says what a test tells it."""

    folder: Path
    ledger: Ledger
    stock: Stock
    pods: dict[PodRef, PodDevices] = field(default_factory=dict)
    asked: int = 0
    settled: bool = True
    resources: tuple[Resource, ...] = RESOURCES

    def __post_init__(self) -> None:
        self.specs = SlotSpecs(self.folder / "cdi")
        self.binder = self.make()

    def make(self, busy_seconds: float = 0.2) -> Binder:
        return Binder(
            self.folder,
            self.ledger,
            self.specs,
            resources=lambda: self.resources,
            stock=lambda: self.stock,
            ask_kubelet=self.ask,
            network_of=lambda name: {"name": "rails"},
            is_settled=lambda: self.settled,
            busy_seconds=busy_seconds,
        )

    def mend(self, known: Known) -> tuple[tuple[str, str], ...]:
        """Have a new agent on these books look after bindings and specs."""
        return self.make().mend(known, self.stock.snapshot)

    def known(self, sandboxes: Sequence[Sandbox] | None = None) -> Known:
        """What kubelet says of all pods by now, and the runtime of its sandboxes."""
        claims = [
            Claim(PodRef(pod.namespace, pod.name), devices.resource_name, unit, container.name)
            for pod, found in self.pods.items()
            for container in found.containers
            for devices in container.devices
            for unit in devices.device_ids
        ]
        pods = {(pod.namespace, pod.name) for pod in self.pods} | {("kube-system", "nodefabric")}
        return Known(time.time(), self.ledger.attachments(), pods, sandboxes, claims)

    def ask(self, pod: PodRef) -> PodDevices | None:
        self.asked += 1
        return self.pods.get(pod)

    def grant(self, pod: PodRef, *slots: str, gpus: tuple[str, ...] = (), container: str = "worker") -> None:
        """Have kubelet give a container of a pod these."""
        self.binder.forget(slots)
        self.ledger.grant("rdma/vf", dict.fromkeys(slots, ""))
        devices = (DeviceAssignment("rdma/vf", slots), DeviceAssignment("nvidia.com/gpu", gpus))
        before = self.pods.get(pod) or PodDevices(pod)
        self.pods[pod] = replace(before, containers=(*before.containers, ContainerDevices(container, devices)))

    def bind(self, call: Call, wanted: Callable[[], bool] = lambda: True) -> dict[str, str]:
        return {found.unit_id: found.device for found in self.binder.bind(call, wanted)}

    def attach(self, device: str, call: Call) -> int:
        """Put a device into a sandbox, as far as the books know. Returns the row's number."""
        return self.ledger.begin_attach(
            Owner(call.container_id, call.ifname, call.pod, NetnsId(1, 1)),
            ifname="net1",
            device=device,
            resource_name="rdma/vf",
            undo=Undo("x", "02:00:00:00:00:01", 1500, False),
            netns_path="/nowhere",
            request={"name": "net", "network": None},
        ).attachment_id

    def spec(self, slot_id: str) -> dict[str, Any] | None:
        path = self.folder / f"cdi/nodefabric-{slot_id}.json"
        if not path.exists():
            return None
        (device,) = json.loads(path.read_text())["devices"]
        found: dict[str, Any] = device["containerEdits"]
        return found

    @property
    def vfs(self) -> list[str]:
        return [device.address for device in self.stock.snapshot.devices if device.is_vf]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with open_books(tmp_path) as books:
        yield Rig(tmp_path, books, Stock(snapshot_with_rdma()))


def call(container: str, pod: PodRef = POD, ifname: str = "eth0", device: str | None = None) -> Call:
    conf = netconf.from_document({"cniVersion": "1.0.0", "name": "net", **({"deviceID": device} if device else {})})
    return Call(container, ifname, None, "/nowhere", pod, "", "", conf)


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
    assert {grant.unit_id: grant.device for grant in rig.ledger.grants()} == bound


def test_the_same_sandbox_is_answered_the_same_and_kubelet_asked_once(rig: Rig) -> None:
    rig.grant(POD, slot(0))
    first = rig.bind(call("c1"))
    assert rig.bind(call("c1")) == first
    assert rig.asked == 1


def test_kubelet_is_not_asked_where_no_slot_is_granted(rig: Rig) -> None:
    rig.ledger.grant("nvidia.com/gpu", {gpu_uuid(0): gpu_uuid(0)})
    assert rig.bind(call("c1")) == {}
    assert rig.asked == 0
    rig.settled = False  # the books may be new ones
    assert rig.bind(call("c1")) == {}
    assert rig.asked == 1


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
    assert rig.ledger.bindings() == ()


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
    assert [b.container_id for b in rig.ledger.bindings()] == ["c3"]


def test_a_device_that_died_since_the_grant_is_passed_over(rig: Rig) -> None:
    rig.grant(POD, slot(0))
    expected = rig.vfs[0]
    rig.stock = Stock(change(rig.stock.snapshot, expected, driver=None))
    assert rig.bind(call("c1"))[slot(0)] == rig.vfs[1]


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
    leaving = threading.Timer(0.05, rig.ledger.finish_detach, [row])
    leaving.start()
    assert rig.bind(call("c1")) == {slot(0): row.device}
    leaving.join()


def test_sick_devices_are_named_by_their_reason(rig: Rig) -> None:
    snapshot = rig.stock.snapshot
    for device in rig.vfs:
        snapshot = change(snapshot, device, driver=None)
    rig.stock = Stock(snapshot)
    rig.grant(POD, slot(0))
    with pytest.raises(DeviceBusy, match=r"0 are free: of 4, 0 in use, 4 NoDriver"):
        rig.bind(call("c1"))


def test_a_device_that_a_pod_has_under_its_own_name_is_not_given_away(rig: Rig) -> None:
    rig.ledger.grant("rdma/vf", {rig.vfs[0]: rig.vfs[0]})  # from before the resource was bound late
    rig.grant(POD, slot(0))
    assert rig.bind(call("c1"))[slot(0)] == rig.vfs[1]


def test_several_containers_have_each_their_own_devices(rig: Rig) -> None:
    rig.grant(POD, slot(0), gpus=(gpu_uuid(0),), container="a")
    rig.grant(POD, slot(1), slot(2), container="b")
    bound = rig.bind(call("c1"))
    told = {slot_id: (rig.spec(slot_id) or {})["env"] for slot_id in bound}
    assert told[slot(0)] == [f"PCIDEVICE_RDMA_VF={bound[slot(0)]}"]
    assert told[slot(1)] == told[slot(2)]
    assert set(told[slot(1)][0].partition("=")[2].split(",")) == {bound[slot(1)], bound[slot(2)]}


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
    rig.ledger.grant("rdma/vf", {slot(1): "", slot(2): ""})
    entries = [
        {"PodUID": uid, "ContainerName": name, "ResourceName": "rdma/vf", "DeviceIDs": {"0": ids}}
        for uid, name, ids in (
            (POD.uid, "worker", [slot(0)]),
            (POD.uid, "setup", [slot(0), slot(1)]),
            (OTHER.uid, "setup", [slot(2)]),
        )
    ]
    (rig.folder / FILE).parent.mkdir()
    (rig.folder / FILE).write_text(json.dumps({"Data": {"PodDeviceEntries": entries}}))
    assert rig.bind(call("c1")).keys() == {slot(0), slot(1)}
    # A pod of which PodResources tells nothing has slots all the same.
    assert rig.bind(call("c2", OTHER)).keys() == {slot(2)}
    # Its next sandbox, before the first one's DEL.
    assert rig.bind(call("c3")).keys() == {slot(0), slot(1)}


def test_an_interface_that_multus_asks_for_lets_go_of_its_own_slot(rig: Rig) -> None:
    rig.grant(POD, slot(0), slot(1))
    bound = rig.bind(call("c1", ifname="net1", device=slot(0)))
    assert rig.bind(call("c1", ifname="net2", device=slot(1))) == bound
    rig.binder.unbind("c1", "net2")
    assert [b.unit_id for b in rig.ledger.bindings()] == [slot(0)]
    rig.binder.unbind("c1", "net1")
    assert rig.ledger.bindings() == ()
    assert rig.specs.slots() == frozenset()


def test_a_spec_that_cannot_be_written_leaves_nothing_bound(rig: Rig) -> None:
    (rig.folder / "cdi").write_text("not a folder")
    rig.grant(POD, slot(0))
    with pytest.raises(Unavailable, match="cannot be written"):
        rig.bind(call("c1"))
    assert rig.ledger.bindings() == ()
    assert [grant.device for grant in rig.ledger.grants()] == [""]


def test_specs_are_made_to_fit_the_books(rig: Rig) -> None:
    rig.grant(POD, slot(0), slot(1))
    rig.bind(call("c1"))
    written = [rig.spec(slot(n)) for n in range(2)]
    rig.specs.remove(slot(0))
    rig.specs.write("vf", slot(1), {"env": ["STALE=1"]})
    rig.specs.write("vf", slot(2), {"env": ["NOBODYS=1"]})
    silent = Known(time.time(), (), None, None)
    assert set(rig.mend(silent)) == {("spec-write", slot(0)), ("spec-write", slot(1))}
    assert [rig.spec(slot(n)) for n in range(2)] == written
    assert rig.mend(rig.known()) == (("spec-remove", slot(2)),)
    assert rig.mend(rig.known()) == ()
    assert rig.specs.slots() == {slot(0), slot(1)}


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
    assert rig.ledger.bindings() == ()
    rig.resources = RESOURCES
    assert rig.bind(call("c1")).keys() == {slot(0)}


def test_a_resource_that_leaves_the_configuration_while_its_devices_are_waited_for_is_named(rig: Rig) -> None:
    rig.grant(POD, slot(0))
    for n, device in enumerate(rig.vfs):
        rig.attach(device, call(f"old-{n}"))

    def leave() -> bool:
        rig.resources = RESOURCES[1:]
        return True

    with pytest.raises(UnknownUnit, match="put the resource back"):
        rig.bind(call("c1"), leave)


def test_pods_without_slots_start_whatever_became_of_late_binding(rig: Rig) -> None:
    rig.grant(POD, slot(0))
    rig.resources = RESOURCES[1:]
    assert rig.bind(call("c2", OTHER)) == {}
    rig.ledger.release([slot(0)])
    asked = rig.asked
    assert rig.bind(call("c2", OTHER)) == {}
    assert rig.asked == asked  # nobody has any slots


def test_bindings_are_released_by_what_is_over_and_not_by_what_came_since(rig: Rig) -> None:
    rig.grant(POD, slot(0))
    rig.grant(OTHER, slot(1))
    rig.bind(call("c1"))
    rig.bind(call("c2", OTHER))
    released = rig.binder.release(lambda binding: binding.container_id == "c1")
    assert [b.unit_id for b in released] == [slot(0)]
    assert rig.specs.slots() == {slot(1)}
    assert rig.binder.release(lambda binding: False) == ()


def test_a_binding_that_a_call_makes_its_own_while_it_is_judged_keeps_its_spec(rig: Rig) -> None:
    rig.grant(POD, slot(0), slot(1))
    rig.bind(call("c1", ifname="net1", device=slot(0)))

    def judge(binding: Binding) -> bool:
        if binding.unit_id == slot(1):
            rig.bind(call("c1", ifname="net2", device=slot(1)))
        return binding.unit_id == slot(1)

    assert rig.binder.release(judge) == ()
    assert rig.ledger.binding_of(slot(1)) is not None
    assert rig.spec(slot(1)) is not None


def test_a_pod_without_a_name_has_no_slots(rig: Rig) -> None:
    rig.grant(POD, slot(0))
    assert rig.bind(call("c1", PodRef("", ""))) == {}
