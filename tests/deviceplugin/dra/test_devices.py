"""Offer → devices: early ones and places, capacities, taints, and what is left out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from agent.config import Dra, Resource
from agent.model.device import Snapshot
from agent.model.health import Reason
from agent.offer.offer import Offer
from agent.offer.units import plain_offer
from agent.placement import Distances
from deviceplugin.dra.devices import DraDevice, Taint, pair_up
from tests.deviceplugin.dra.nodes import FIRST, GPU_NODES, HCA, PF, SECOND, VF, Offered, ill, late, recorded_node, value
from tests.node import change, node

TELLING = ("gpu.nvidia.com/uuid",)


def by_name(devices: tuple[DraDevice, ...]) -> dict[str, DraDevice]:
    found = {device.name: device for device in devices}
    assert len(found) == len(devices)
    return found


def test_a_shared_adapter_is_one_device_with_its_shares_as_capacity() -> None:
    [device] = Offered(node(rails=1), [HCA]).devices
    assert device.allow_multiple
    assert device.capacity == {
        "nodefabric.io/shares": {
            "value": "63",
            "requestPolicy": {"default": "1", "validRange": {"min": "1", "step": "1"}},
        }
    }


def test_no_more_shares_of_a_place_are_to_be_had_at_once_than_one_adapter_has() -> None:
    crowded = replace(node(rails=16), gpus=())  # eight adapters a NUMA node, in four parts
    for device in Offered(crowded, [late(replace(HCA, shares=4))]).devices:
        policy = {"default": "1", "validRange": {"min": "1", "max": "4", "step": "1"}}
        assert device.capacity == {"nodefabric.io/shares": {"value": "8", "requestPolicy": policy}}


def test_a_place_is_one_device_with_the_number_of_its_devices_as_capacity() -> None:
    found = by_name(Offered(recorded_node("h100-8gpu"), [late(VF)]).devices)
    assert len(found) == 8
    device = found["slots-rdma-vf-gpu-0000-1b-00-0"]
    assert device.allow_multiple
    assert device.capacity == {
        "nodefabric.io/units": {
            "value": "8",
            "requestPolicy": {"default": "1", "validRange": {"min": "1", "max": "1"}},
        }
    }
    assert {unit.device for unit in device.units} == {f"0000:18:00.{n}" for n in range(1, 8)} | {"0000:18:01.0"}
    assert device.adapter == "0000:18:00.0"


def test_a_place_is_a_gpu_or_a_numa_node_and_an_adapter_where_it_is_near_to_neither() -> None:
    snapshot = replace(node(rails=4, vfs=2), gpus=())
    assert places(snapshot) == {"numa-0", "numa-1"}
    for device in snapshot.devices:
        snapshot = change(snapshot, device.address, numa_node=-1)
    assert places(snapshot) == {f"0000-{bus}-00-0" for bus in ("12", "22", "32", "42")}
    snapshot = node(rails=3, vfs=2)
    found = places(replace(snapshot, gpus=snapshot.gpus[:2]))
    assert found == {"gpu-0000-14-00-0", "gpu-0000-24-00-0", "0000-32-00-0"}


def places(snapshot: Snapshot) -> set[str]:
    """Name the places of a node's VFs: of their parts, the ones without a number."""
    names = set(by_name(Offered(snapshot, [late(VF)]).devices))
    return {name.removeprefix("slots-rdma-vf-") for name in names if name.rpartition("-")[0] not in names}


@pytest.mark.parametrize("name", GPU_NODES)
@pytest.mark.parametrize("kind", ["vf", "nic", "hca"])
def test_places_are_called_alike_whether_the_gpus_driver_answers_or_not(name: str, kind: str) -> None:
    told = recorded_node(name)
    silent = replace(told, gpus=())
    resource = late(replace(VF, name="rdma/any", kind=kind))

    def rooms(snapshot: Snapshot) -> dict[str, object]:
        return {device.name: device.capacity for device in Offered(snapshot, [resource]).devices}

    assert [gpu.pci_address for gpu in silent.all_gpus] == [gpu.pci_address for gpu in told.all_gpus]
    assert rooms(silent) == rooms(told)
    assert all(len(place) <= 63 for place in rooms(told))


def test_where_there_are_few_places_each_is_divided_so_that_a_request_can_have_several_devices() -> None:
    found = by_name(Offered(node(rails=2, vfs=6), [late(VF)]).devices)
    first = [f"slots-rdma-vf-gpu-0000-14-00-0{part}" for part in ("-1", "-2", "-3", "")]
    second = [name.replace("0000-14", "0000-24") for name in first]
    assert list(found) == [*first[:3], *second[:3], first[3], second[3]]
    values = [int(found[name].capacity["nodefabric.io/units"]["value"]) for name in first]
    assert values == [2, 1, 1, 2]
    assert [TELLING[0] in found[name].attributes for name in first] == [False, False, False, True]
    assert {len(device.units) for device in found.values()} == {6}


def test_a_place_has_no_more_parts_than_devices_so_that_each_of_a_request_s_is_another() -> None:
    assert len(Offered(node(rails=1, vfs=3), [late(VF)]).devices) == 3
    [shared] = Offered(node(rails=1), [late(HCA)]).devices
    assert shared.capacity["nodefabric.io/shares"]["value"] == "63"
    assert len(Offered(replace(node(rails=4), gpus=()), [late(HCA)]).devices) == 4


@pytest.mark.parametrize("binding", ["early", "late"])
def test_what_pods_have_by_grants_is_left_out_or_subtracted(binding: str) -> None:
    snapshot = node(rails=1, vfs=2)
    resource = replace(VF, binding=binding)
    offer = replace(plain_offer([resource], snapshot), granted={FIRST: 1})
    devices = Offered(snapshot, [resource], offer=offer).devices
    assert [unit.device for device in devices for unit in device.units] == [SECOND]
    if binding == "late":
        assert devices[0].capacity["nodefabric.io/units"]["value"] == "1"
    everything = replace(offer, granted={FIRST: 1, SECOND: 1})
    assert Offered(snapshot, [resource], offer=everything).devices == ()


def test_shares_that_pods_have_by_grants_are_subtracted() -> None:
    snapshot = node(rails=1)
    for granted, left in ((3, ["60"]), (62, ["1"]), (63, []), (70, [])):
        offer = replace(plain_offer([HCA], snapshot), granted={PF: granted})
        devices = Offered(snapshot, [HCA], offer=offer).devices
        assert [d.capacity["nodefabric.io/shares"]["value"] for d in devices] == left


def test_a_grant_that_ends_moves_no_other_device_to_another_gpu() -> None:
    snapshot = recorded_node("a100-8gpu-4nic")
    offer = plain_offer([VF], snapshot)
    before = by_name(Offered(snapshot, offer=offer).devices)
    granted = {offer.claimable["rdma/vf"][0].device: 1}
    during = by_name(Offered(snapshot, offer=replace(offer, granted=granted)).devices)
    assert {value(device, "nearGpu") for device in before.values()} == {gpu.uuid for gpu in snapshot.gpus}
    assert all(value(before[name], "nearGpu") == value(device, "nearGpu") for name, device in during.items())


@pytest.mark.parametrize(
    "reason", [r for r in Reason if r not in (Reason.DEVICE_GONE,) and not r.name.startswith(("GPU_", "XID"))]
)
def test_an_ill_device_has_a_taint_with_the_reason(reason: Reason) -> None:
    snapshot = node(rails=1, vfs=2)
    offer = ill(plain_offer([VF], snapshot), reason, FIRST)
    found = by_name(Offered(snapshot, offer=offer).devices)
    assert found["vf-0000-12-00-1"].taints == (Taint(f"nodefabric.io/{reason.value}", "NoSchedule"),)
    assert found["vf-0000-12-00-2"].taints == ()


def test_reasons_that_evict_do_so() -> None:
    snapshot = node(rails=1, vfs=1)
    offer = ill(plain_offer([VF], snapshot), Reason.LINK_DOWN, FIRST)
    for evict, effect in ((("LinkDown",), "NoExecute"), (("PortDown",), "NoSchedule")):
        [device] = Offered(snapshot, offer=offer, evict=evict).devices
        assert device.taints == (Taint("nodefabric.io/LinkDown", effect),)


def test_a_place_is_ill_only_when_nothing_behind_it_is_left_and_its_capacity_stays() -> None:
    snapshot = node(rails=1, vfs=2)
    offer = plain_offer([late(VF)], snapshot)
    one, both = ill(offer, Reason.NO_DRIVER, FIRST), ill(offer, Reason.NO_DRIVER, FIRST, SECOND)
    found = [Offered(snapshot, [late(VF)], offer=o).devices for o in (offer, one, both)]
    taint = Taint("nodefabric.io/NoDriver", "NoSchedule")
    assert [{device.taints for device in devices} for devices in found] == [{()}, {()}, {(taint,)}]
    room = [sum(int(d.capacity["nodefabric.io/units"]["value"]) for d in devices) for devices in found]
    assert room == [2, 2, 2]


@pytest.mark.parametrize("shares", ["capacity", "devices"])
def test_what_is_withheld_until_it_is_clean_is_not_to_be_had_in_its_place_and_no_part_goes(shares: str) -> None:
    snapshot, taint = node(rails=1, vfs=2), Taint("nodefabric.io/Quarantined", "NoSchedule")
    offer = plain_offer([late(VF)], snapshot)
    names, rooms = [], []
    for devices in ((), (FIRST,), (FIRST, SECOND)):
        found = Offered(snapshot, [late(VF)], Dra(shares=shares), ill(offer, Reason.QUARANTINED, *devices)).devices
        names.append(sorted(by_name(found)))
        assert {d.taints for d in found} <= {(), (taint,)}
        rooms.append([d for d in found if not d.taints])
    assert names[0] == names[1] == names[2]
    assert [len(each) for each in rooms] == [2, 1, 0]
    assert TELLING[0] in rooms[1][0].attributes
    if shares == "capacity":
        assert [d.capacity["nodefabric.io/units"]["value"] for each in rooms for d in each] == ["1", "1", "1"]


def test_a_part_loses_of_its_room_what_is_withheld() -> None:
    snapshot = node(rails=2, vfs=6)
    offer = ill(plain_offer([late(VF)], snapshot), Reason.QUARANTINED, FIRST, SECOND, "0000:12:00.3")
    found = by_name(Offered(snapshot, [late(VF)], offer=offer).devices)
    place = "slots-rdma-vf-gpu-0000-14-00-0"
    parts = [found[f"{place}{part}"] for part in ("", "-1", "-2", "-3")]
    assert [part.capacity["nodefabric.io/units"]["value"] for part in parts] == ["1", "1", "1", "1"]
    assert [len(part.taints) for part in parts] == [0, 0, 0, 1]


def test_a_place_evicts_only_when_each_device_behind_it_is_ill_enough() -> None:
    snapshot = node(rails=1, vfs=2)
    offer = ill(plain_offer([late(VF)], snapshot), Reason.NO_DRIVER, FIRST)
    effects = []
    for reason in (Reason.LINK_DOWN, Reason.NO_DRIVER):
        both = ill(offer, reason, SECOND)
        device, _ = Offered(snapshot, [late(VF)], offer=both, evict=("NoDriver",)).devices
        effects += [taint.effect for taint in device.taints]
    assert effects == ["NoSchedule", "NoExecute"]


def test_a_device_that_is_gone_is_left_out_unless_a_pod_has_it() -> None:
    snapshot = node(rails=1, vfs=2)
    offer = ill(plain_offer([VF], snapshot), Reason.DEVICE_GONE, FIRST)
    assert list(by_name(Offered(snapshot, offer=offer).devices)) == ["vf-0000-12-00-2"]
    found = by_name(Offered(snapshot, offer=replace(offer, lost=frozenset({FIRST}))).devices)
    assert found["vf-0000-12-00-1"].taints == (Taint("nodefabric.io/DeviceGone", "NoSchedule"),)


def test_an_ill_vf_gives_the_gpu_that_it_is_matched_by_to_another_one() -> None:
    snapshot = node(rails=1, vfs=2)
    offer = plain_offer([VF], snapshot)

    def telling(offer: Offer) -> list[str]:
        return [d.units[0].device for d in Offered(snapshot, offer=offer).devices if TELLING[0] in d.attributes]

    assert telling(offer) == [SECOND]
    assert telling(ill(offer, Reason.QUARANTINED, SECOND)) == [FIRST]
    assert telling(ill(offer, Reason.LINK_DOWN, FIRST, SECOND)) == [SECOND]


def test_where_a_cluster_knows_no_capacity_each_share_and_slot_can_be_a_device() -> None:
    dra = Dra(shares="devices")
    shares = by_name(Offered(node(rails=1), [replace(HCA, shares=3)], dra).devices)
    assert list(shares) == [f"hca-b83fd20300a00000-{n}" for n in range(3)]
    slots = by_name(Offered(node(rails=1, vfs=2), [late(VF)], dra).devices)
    assert list(slots) == [f"slots-rdma-vf-gpu-0000-14-00-0-{n}" for n in range(2)]
    for devices in (shares, slots):
        assert not any(device.capacity or device.allow_multiple for device in devices.values())
        assert [TELLING[0] in device.attributes for device in devices.values()].count(True) == 1
    assert all(len(device.units) == 2 for device in slots.values())


ALIAS = "gpu.nvidia.com/uuid"


def ports(name: str) -> list[str]:
    return [d.address for d in recorded_node(name).devices if d.rdma_devices and not d.is_vf]


@pytest.mark.parametrize("name", [name for name in GPU_NODES if name != "efa"])
def test_each_gpu_is_named_by_vfs_that_are_as_near_to_it_as_any(name: str) -> None:
    snapshot = recorded_node(name)
    distances = Distances(snapshot)
    vfs = [d.address for d in snapshot.devices if d.is_vf]
    paired = pair_up(vfs, distances)
    assert set(paired.gpu.values()) == set(distances.gpus)
    for vf, gpu in paired.gpu.items():
        assert distances.distance(vf, gpu) == min(distances.distance(other, gpu) for other in vfs)


@pytest.mark.parametrize("name", GPU_NODES)
def test_whole_adapters_name_as_many_gpus_as_they_can(name: str) -> None:
    distances = Distances(recorded_node(name))
    paired = pair_up(ports(name), distances)
    near = {port: set(gpus) for port, gpus in paired.near.items()}
    assert all(gpu in near[port] for port, gpu in paired.gpu.items())
    assert len(set(paired.gpu.values())) == most_pairs(near)


def most_pairs(near: dict[str, set[str]]) -> int:
    """Count the pairs of a greatest matching, by augmenting paths."""
    port_of: dict[str, str] = {}

    def finds_one(port: str, tried: set[str]) -> bool:
        for gpu in near[port] - tried:
            tried.add(gpu)
            if gpu not in port_of or finds_one(port_of[gpu], tried):
                port_of[gpu] = port
                return True
        return False

    return sum(finds_one(port, set()) for port in near)


@pytest.mark.parametrize(("name", "gpus"), [("a100-8gpu-4nic", 8), ("one-numa-node", 4)])
def test_vfs_of_ports_that_are_as_near_to_several_gpus_are_shared_out_evenly(name: str, gpus: int) -> None:
    snapshot = recorded_node(name)
    vfs = [d.address for d in snapshot.devices if d.is_vf]
    counts = Counter(pair_up(vfs, Distances(snapshot)).gpu.values())
    assert list(counts.values()) == [len(vfs) // gpus] * gpus


def test_an_adapter_that_is_nearest_to_no_gpu_names_none() -> None:
    snapshot = node(rails=3, vfs=1)
    distances = Distances(Offered(snapshot).snapshot)
    without_gpu = type(snapshot)(snapshot.devices, snapshot.gpus[:2])
    paired = pair_up(["0000:12:00.1", "0000:22:00.1", "0000:32:00.1"], Distances(without_gpu))
    assert list(paired.gpu) == ["0000:12:00.1", "0000:22:00.1"]
    assert pair_up([], distances).gpu == {}


@pytest.mark.parametrize("name", [name for name in GPU_NODES if name != "efa"])
def test_bound_early_one_vf_a_gpu_is_matched_by_it_and_bound_late_one_place(name: str) -> None:
    snapshot = recorded_node(name)
    gpus = Counter({gpu.uuid: 1 for gpu in snapshot.gpus})
    for resource in (VF, late(VF)):
        found = Counter(value(d, ALIAS) for d in Offered(snapshot, [resource]).devices if ALIAS in d.attributes)
        assert found == gpus


def test_the_vf_that_is_matched_comes_last_so_that_others_are_taken_before_it() -> None:
    devices = Offered(recorded_node("h100-8gpu")).devices
    assert [ALIAS in device.attributes for device in devices] == [False] * 56 + [True] * 8


@pytest.mark.parametrize("resource", [VF, late(VF), HCA, late(HCA)])
def test_a_gpu_that_nvml_does_not_show_is_near_by_its_address_and_matched_by_nothing(resource: Resource) -> None:
    snapshot = replace(recorded_node("h100-8gpu"), gpus=())
    devices = Offered(snapshot, [resource]).devices
    assert {value(d, "nearGpu") for d in devices if "nearGpu" in d.attributes} == {
        gpu.pci_address for gpu in recorded_node("h100-8gpu").gpus
    }
    assert not any(ALIAS in d.attributes for d in devices)


def test_shares_of_an_adapter_bound_late_are_divided_among_the_gpus_that_it_is_nearest_to() -> None:
    places = Offered(recorded_node("a100-8gpu-4nic"), [late(HCA)]).devices
    assert len(places) == 8
    assert {int(d.capacity["nodefabric.io/shares"]["value"]) for d in places} == {32, 31}


def test_an_adapter_names_all_its_gpus_where_lists_are_allowed() -> None:
    devices = Offered(recorded_node("a100-8gpu-4nic"), [HCA], Dra(list_attributes=True)).devices
    assert [len(device.attributes[ALIAS]["strings"]) for device in devices] == [2, 2, 2, 2]
    assert all(value(d, "nearGpu") in d.attributes[ALIAS]["strings"] for d in devices)
