"""Which devices a pod's network gets, by what kubelet says and the books know."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent.config import Config, RailNic, Resource, SharedPool
from agent.config.networks import ADAPTER, network_of_keys
from agent.edits.specs import Specs
from agent.errors import RequestInvalid, Unavailable, UnknownUnit
from agent.hardware.host import Host
from agent.kubelet.podresources import (
    MAX_ASKING,
    ContainerDevices,
    DeviceAssignment,
    KubeletAsker,
    PodDevices,
    PodResources,
)
from agent.ledger import Ledger
from agent.model.allocation import Hold, PodRef, Spec
from agent.model.device import PciDevice, Snapshot
from agent.model.health import HEALTHY
from agent.offer.offer import Offer, Unit
from agent.offer.units import plain_offer
from agent.state import Latest
from cni.add_facts import FactsWriter
from cni.call import GrantedDevice, Holding, Node
from cni.pod_devices import HeldDevices
from cni.pods_file import PodsFile
from tests.awaiting import until
from tests.cni.networks import network
from tests.node import UNDO, attach, bound_slot, granted, node, open_books, owner, pci, rdma, without


def granted_of(
    config: Config,
    books: Ledger,
    kubelet: PodResources,
    loop: asyncio.AbstractEventLoop,
    *units: Unit,
    devices: tuple[PciDevice, ...] = (),
    noted: Collection[str] = (),
) -> HeldDevices:
    """Join the parts. `units` are offered, `devices` the node's, `noted` the UIDs of pods in kubelet's notes."""
    snapshot = Snapshot(devices=devices)
    names = dict.fromkeys(unit.resource_name for unit in units)
    offer = Offer(snapshot, {name: tuple(u for u in units if u.resource_name == name) for name in names})
    holders = cast(PodsFile, SimpleNamespace(noted=noted, is_settled=True, look=int))
    node = Node(cast(Host, None), books, Latest(snapshot))
    cell, asker = Latest(config), KubeletAsker(kubelet, loop)
    return HeldDevices(cell, node, asker, Latest(offer), holders, Latest(None))


POD = PodRef("default", "p", "uid-p")
VF, OTHER, SLOT = "0000:12:00.1", "0000:12:00.2", "slot-rdma:vf-0-0"
RAILS = network({"name": "rails", "mode": "vf"})
ACCELERATOR = "0000:6b:00.1"


NODE = (PciDevice(ACCELERATOR, (), 0x120000, 0x8086, 0, None, 0, None),)


class Kubelet(PodResources):
    """Knows one pod, with one container."""

    def __init__(self, *units: str, name: str = "rdma/vf", **others: tuple[str, ...]) -> None:
        """`units` are of the resource `name`; `others` are those of further resources below rdma/."""
        super().__init__(Path("/nowhere"))
        self.held = {name: units, **{f"rdma/{other}": found for other, found in others.items()}}
        self.asked = 0

    async def get(self, pod: PodRef) -> PodDevices | None:
        self.asked += 1
        held = tuple(DeviceAssignment(name, units) for name, units in self.held.items())
        return PodDevices(pod, (ContainerDevices("main", held),)) if pod == POD else None


def told(folder: Path, kubelet: Kubelet, binding: str, **units: str) -> tuple[GrantedDevice, ...]:
    """Ask where one resource is configured. `units` are those in the books, and their devices."""
    resource = Resource("rdma/vf", "vf", binding=binding, network="rails")

    with open_books(folder) as books:
        books.grant(granted("rdma/vf", units))
        return asked(Config(resources=(resource,), networks=(RAILS,)), books, kubelet, devices=NODE)


def asked(config: Config, books: Ledger, kubelet: Kubelet, *units: Unit, **more: Any) -> tuple[GrantedDevice, ...]:
    """Ask what the pod's network gets, on a thread of a call's."""

    async def work() -> tuple[GrantedDevice, ...]:
        found = granted_of(config, books, kubelet, asyncio.get_running_loop(), *units, **more)
        return tuple(await asyncio.to_thread(found.devices, POD))

    return asyncio.run(work())


def test_a_pod_gets_the_vf_that_kubelet_gave_it(tmp_path: Path) -> None:
    kubelet = Kubelet(VF)
    expected = GrantedDevice(VF, "rdma/vf", RAILS, VF)
    assert told(tmp_path, kubelet, "early", **{VF: VF, OTHER: OTHER}) == (expected,)


def test_a_vf_from_before_its_resource_was_bound_late_comes_into_a_new_sandbox_of_its_pod(tmp_path: Path) -> None:
    expected = GrantedDevice(VF, "rdma/vf", RAILS, VF)
    assert told(tmp_path, Kubelet(VF, SLOT), "late", **{VF: VF, SLOT: OTHER}) == (expected,)


@pytest.mark.parametrize(
    ("netconf", "mode"),
    [
        ({}, "nic"),
        ({"mtu": 9000}, "nic"),
        ({"mode": "vf"}, "vf"),
        ({"vfio": True}, "vf"),
        ({"functionReset": True}, "vf"),
    ],
)
@pytest.mark.parametrize("kind", ["nic", "rail"])
def test_a_whole_adapter_joins_a_network_as_such(tmp_path: Path, kind: str, netconf: dict[str, Any], mode: str) -> None:
    resource = Resource("rdma/nic", kind, network="rails", nic=RailNic("nic"))
    config = Config(resources=(resource,), networks=(network({**netconf, "name": "rails"}),))
    with open_books(tmp_path) as books, contextlib.closing(asyncio.new_event_loop()) as loop:
        granted = granted_of(config, books, Kubelet(), loop)
        joined = granted.network_of("rdma/nic", "0000:12:00.0")
        assert joined is not None
        assert (joined.name, joined.setup) == ("rails", replace(network(netconf).setup, mode=mode))


@pytest.mark.parametrize(
    ("resource_name", "unit", "device"),
    [
        ("rdma/vf", VF, VF),
        ("rdma/rail", "rail-GPU-1", VF),
        ("rdma/hca", "hca-0c42a10300651234-7", VF),
        ("rdma/late", SLOT, VF),
        ("nvidia.com/gpu", "GPU-1", "GPU-1"),
        ("intel.com/accelerator", ACCELERATOR, ACCELERATOR),
    ],
)
@pytest.mark.parametrize("holder", [None, POD, PodRef("default", "other", "uid-o")])
def test_a_device_whose_resource_is_gone_is_missed_by_the_pod_that_has_it(
    tmp_path: Path, resource_name: str, unit: str, device: str, holder: PodRef | None
) -> None:
    kubelet = Kubelet(unit, name=resource_name)

    config = Config(resources=(Resource("rdma/new", "vf"),))
    with open_books(tmp_path) as books:
        books.grant(granted(resource_name, {unit: device}))
        if holder is not None:
            books.bind([unit], holder)
        if resource_name in ("rdma/vf", "rdma/rail") and holder in (None, POD):
            with pytest.raises(UnknownUnit, match=f"main has {unit} of {resource_name}, .* put the resource back"):
                asked(config, books, kubelet, devices=NODE)
            books.grant(granted(resource_name, {unit: device}))
            kubelet.get = Kubelet("another").get  # type: ignore[method-assign]
        assert asked(config, books, kubelet, devices=NODE) == ()
        assert kubelet.asked <= 1


@pytest.mark.parametrize(("noted", "found"), [("uid-p", (VF,)), ("uid-o", ())])
def test_a_pod_in_kubelets_notes_has_its_vf_though_its_grant_has_ended(
    tmp_path: Path, noted: str, found: tuple[str, ...]
) -> None:
    """So it is after a start of kubelet while the API server was away: it lists no pods then."""
    config = Config(resources=(Resource("rdma/vf", "vf", network="rails"),), networks=(RAILS,))
    unit = Unit(VF, "rdma/vf", "vf", VF, HEALTHY, 0)
    with open_books(tmp_path) as books:
        assert tuple(each.device for each in asked(config, books, Kubelet(VF), unit, noted=(noted,))) == found


def test_a_whole_adapter_whose_resource_names_no_network_comes_as_it_is(tmp_path: Path) -> None:
    config, unit = Config(resources=(Resource("rdma/nic", "nic"),)), Unit(PF, "rdma/nic", "nic", PF, HEALTHY, 0)
    with open_books(tmp_path) as books:
        found = asked(config, books, Kubelet(PF, name="rdma/nic"), unit, noted=(POD.uid,))
    assert found == (GrantedDevice(PF, "rdma/nic", ADAPTER, PF),)


def test_kubelet_is_not_asked_where_all_that_is_granted_are_slots(tmp_path: Path) -> None:
    kubelet = Kubelet(SLOT)
    assert told(tmp_path, kubelet, "late", **{SLOT: VF}) == ()
    assert kubelet.asked == 0


async def test_slices_that_pods_had_from_another_plugin_are_claimed_though_no_resource_is_called_so(
    tmp_path: Path,
) -> None:
    slices = Unit("MIG-1", "nvidia.com/mig-1g.10gb", "gpu", "MIG-1", HEALTHY, 0)

    class Others(Kubelet):
        async def list(self) -> tuple[PodDevices, ...]:
            units = (("nvidia.com/mig-1g.10gb", "MIG-1"), ("else.where/mig", "MIG-1"), ("else.where/x", "x"))
            devices = tuple(DeviceAssignment(name, (unit,)) for name, unit in units)
            return (PodDevices(POD, (ContainerDevices("main", devices),)),)

    config = Config(resources=(Resource("nvidia.com/gpu", "gpu", mig="mixed"),))
    with open_books(tmp_path) as books:
        found = await granted_of(config, books, Others(), asyncio.get_running_loop(), slices).held_units()
        assert [(held.resource_name, held.unit_id) for held in found] == [("nvidia.com/mig-1g.10gb", "MIG-1")]


def test_few_calls_wait_at_once_for_a_kubelet_that_does_not_answer(tmp_path: Path) -> None:
    answers = asyncio.Event()

    class Stuck(Kubelet):
        async def get(self, pod: PodRef) -> PodDevices | None:
            self.asked += 1
            await answers.wait()
            return None

    kubelet = Stuck()

    async def work(books: Ledger) -> None:
        loop = asyncio.get_running_loop()
        granted = granted_of(Config(), books, kubelet, loop)
        with concurrent.futures.ThreadPoolExecutor(MAX_ASKING + 1) as threads:
            waiting = [loop.run_in_executor(threads, granted.pod_devices, POD) for _ in range(MAX_ASKING)]
            await until(lambda: kubelet.asked == MAX_ASKING)
            with pytest.raises(Unavailable, match=f"^{MAX_ASKING} calls wait for kubelet"):
                await loop.run_in_executor(threads, granted.pod_devices, POD)
            answers.set()
            assert await asyncio.gather(*waiting) == [None] * MAX_ASKING
            assert await loop.run_in_executor(threads, granted.pod_devices, POD) is None

    with open_books(tmp_path) as books:
        asyncio.run(work(books))


def test_a_device_joins_what_its_place_makes_of_a_network_and_of_a_claims_name(tmp_path: Path) -> None:
    of_rails = network_of_keys({"name": "rails", "ifName": "rail{rail}", "vlan": "{rail+100}"})
    config = Config(resources=(Resource("rdma/vf", "vf", network="rails"),), networks=(of_rails,))
    snapshot = node(rails=2, vfs=1)
    of_no_rail = pci("0000:02:00.0", ("pci0000:00",), 0)
    with open_books(tmp_path) as books, contextlib.closing(asyncio.new_event_loop()) as loop:
        books.keep_rails(plain_offer(config.resources, node(rails=4, vfs=1)).rails)
        granted = granted_of(config, books, Kubelet(), loop, devices=(of_no_rail, *without(snapshot, VF).devices))
        of_claim = granted.settled(GrantedDevice("0000:22:00.1", "rdma/vf", None, ifname="nic{rail*10}"))
        assert (of_claim.ifname, of_claim.usual, of_claim.network) == ("", "nic10", None)
        joined = granted.network_of("rdma/vf", "0000:22:00.1")
        assert joined is not None
        assert (joined.ifname, joined.setup.settings.vlan) == ("rail1", 101)
        assert granted.network_of("rdma/vf", of_no_rail.address) is None
        with pytest.raises(RequestInvalid, match=r"asks for the rail of a device of adapter 0000:02:00\.0"):
            granted.settled(GrantedDevice(of_no_rail.address, "rdma/vf", of_rails))
        assert granted.named_network("rails", "0000:22:00.1").setup.settings.vlan == 101


RAIL, NICS = "rail-GPU-1", ("0000:3b:00.0", "0000:3c:00.0")


class Devices:
    """RDMA devices in pods, whose verbs nodes are numbered as a test says."""

    def __init__(self, **numbers: int) -> None:
        self.numbers = numbers

    def devices(self, netns: int) -> list[Any]:
        return [SimpleNamespace(name=name, index=int(name[-1]), node_guid="") for name in self.numbers]

    def char_device(self, found: Any, kind: str, port: int | None, netns: int | None) -> str:
        return f"{kind}{self.numbers[found.name]}"


def test_only_the_files_of_the_nic_that_has_others_change_in_the_spec(tmp_path: Path) -> None:
    common = {"path": "/dev/infiniband/rdma_cm"}
    spec = Spec("rail", {"env": []}, beside=(RAIL,))
    for number, nic in enumerate(NICS):
        spec = spec.with_nodes(nic, [{"path": f"/dev/infiniband/uverbs{number}"}, common])
    with open_books(tmp_path) as books:
        specs = Specs(books, tmp_path / "cdi")
        specs.grant(granted("rdma/rail", {RAIL: NICS}, {RAIL: spec}))
        host = cast(Host, SimpleNamespace(rdma=Devices(mlx5_0=8, mlx5_1=9)))
        node = Node(host, books, Latest(Snapshot()))
        facts = FactsWriter(Latest(Config()), node, specs, cast(Any, None), {})
        for number in (1, 0):
            undo = replace(UNDO, rdma=f"mlx5_{number}", extra={"rdma_index": number})
            row = attach(books, NICS[number], owner(cni_ifname=f"net{number}"), undo=undo)
            facts.entered(row, 0)
            (hold,) = books.holds_on(NICS[0])
            said = hold.edits["deviceNodes"]
            first = "/dev/infiniband/uverbs8" if number == 0 else "/dev/infiniband/uverbs0"
            expected = [first, "/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs9"]
            assert [node["path"] for node in said] == expected
        assert "uverbs8" in (tmp_path / f"cdi/nodefabric-unit-{RAIL}.json").read_text()


MOVED, NEW, BOUND, FOREIGN = (f"0000:12:00.{n}" for n in range(2, 6))
PF, POOL, RAIL_NIC = "0000:13:00.0", "0000:14:00.0", "0000:15:00.0"
SHARE, LATE, STRANGE = "hca-0c42a10300651234-7", "slot-rdma:late-0-0", "slot-rdma:late-0-1"
RESOURCES = (
    Resource("rdma/vf", "vf"),
    Resource("rdma/late", "vf", binding="late"),
    Resource("rdma/hca", "hca"),
    Resource("rdma/rail", "rail", nic=RailNic("hca")),
    Resource("rdma/pool", "hca", compat=SharedPool(10)),
)
OFFERED = (
    Unit(VF, "rdma/vf", "vf", VF, HEALTHY, 0),
    Unit(NEW, "rdma/vf", "vf", NEW, HEALTHY, 0),
    Unit(SHARE, "rdma/hca", "hca", PF, HEALTHY, 0),
    Unit("rail-GPU-1", "rdma/rail", "rail", RAIL_NIC, HEALTHY, 0),
    Unit("3", "rdma/pool", "hca", "", HEALTHY, 0, rdma_devices=("mlx5_4",)),
)
OF_POOL = PciDevice(POOL, (), 0x020000, 0x15B3, 0, None, 0, None, rdma_devices=(rdma(4, "0c42:a103:0065:0004"),))


STRANGER = PodRef("default", "other", "uid-o")


def bound(slot: str, device: str, pod: PodRef) -> Hold:
    return bound_slot(slot, "rdma/late", "vf", device, "one", "c1", "eth0", pod, {})


def holding(folder: Path, pod: PodRef) -> Holding | None:
    async def ask(books: Ledger) -> Holding | None:
        config, loop = Config(resources=RESOURCES), asyncio.get_running_loop()
        kubelet = Kubelet(
            *(VF, MOVED, NEW), late=(LATE, STRANGE), hca=(SHARE,), rail=("rail-GPU-1",), pool=("3",), foreign=(FOREIGN,)
        )
        granted = granted_of(config, books, kubelet, loop, *OFFERED, devices=(OF_POOL,))
        return await asyncio.to_thread(granted.holding, pod)

    with open_books(folder) as books:
        books.grant(granted("rdma/vf", {VF: VF, MOVED: "0000:99:00.1"}))
        books.grant(granted("rdma/late", {LATE: "", STRANGE: ""}))
        books.bind_slots([bound(LATE, BOUND, POD), bound(STRANGE, "0000:12:01.0", STRANGER)])
        return asyncio.run(ask(books))


def test_units_of_all_kinds_stand_for_their_devices(tmp_path: Path) -> None:
    assert holding(tmp_path, POD) == Holding(
        whole=frozenset({VF, "0000:99:00.1", NEW, BOUND, FOREIGN}), shared=frozenset({PF, RAIL_NIC, POOL})
    )


def test_a_pod_that_kubelet_does_not_know_holds_nothing_that_is_known(tmp_path: Path) -> None:
    assert holding(tmp_path, STRANGER) is None
