"""Offer → devices: early ones and places, capacities, taints, and what is left out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.config import Dra, Resource
from agent.hardware.lldp import Neighbour
from agent.model.allocation import is_place
from agent.model.device import LinkLayer, Snapshot
from agent.model.health import Reason, unhealthy
from agent.offer.offer import Offer, Unit
from agent.offer.units import plain_offer
from agent.placement import Distances
from deviceplugin.dra.attributes import Facts, StableFacts, leaves_in, stable_facts, version
from deviceplugin.dra.devices import (
    MAX_DEVICES,
    Document,
    DraDevice,
    Taint,
    devices_of,
    object_name,
    pair_up,
    slices_of,
)
from tests.deviceplugin.dra.nodes import (
    DRIVER,
    GPU_NODES,
    HCA,
    NIC,
    NODE,
    VF,
    Offered,
    late,
    recorded_node,
    value,
    with_vfs,
)
from tests.deviceplugin.machines import change, node

PF, FIRST, SECOND = "0000:12:00.0", "0000:12:00.1", "0000:12:00.2"
TELLING = ("gpu.nvidia.com/uuid",)


def ill(offer: Offer, reason: Reason, *devices: str) -> Offer:
    """Return an offer in which devices are ill."""

    def told(unit: Unit) -> Unit:
        return replace(unit, health=unhealthy(reason)) if unit.device in devices else unit

    return replace(offer, claimable={name: tuple(map(told, units)) for name, units in offer.claimable.items()})


def by_name(devices: tuple[DraDevice, ...]) -> dict[str, DraDevice]:
    found = {device.name: device for device in devices}
    assert len(found) == len(devices)
    return found


def test_a_whole_adapter_is_one_device() -> None:
    found = by_name(Offered(node(rails=2, vfs=0), [NIC]).devices)
    assert list(found) == ["nic-0000-12-00-0", "nic-0000-22-00-0"]
    assert not any(device.allow_multiple or device.capacity for device in found.values())


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


def test_capacities_are_qualified_with_the_drivers_domain() -> None:
    for resource, name in ((HCA, "shares"), (late(VF), "units")):
        [device] = Offered(node(rails=1, vfs=1), [resource], Dra(driver="fabric.example.com")).devices
        assert list(device.capacity) == [f"fabric.example.com/{name}"]


def test_without_gpus_a_place_is_a_numa_node_and_where_none_is_known_an_adapter() -> None:
    snapshot = replace(node(rails=4, vfs=2), gpus=())
    assert places(snapshot) == {"slots-rdma-vf-numa-0", "slots-rdma-vf-numa-1"}
    for device in snapshot.devices:
        snapshot = change(snapshot, device.address, numa_node=-1)
    assert places(snapshot) == {f"slots-rdma-vf-0000-{bus}-00-0" for bus in ("12", "22", "32", "42")}


def test_an_adapter_near_no_gpu_is_a_place_of_its_own_beside_gpus() -> None:
    snapshot = node(rails=3, vfs=2)
    assert places(replace(snapshot, gpus=snapshot.gpus[:2])) == {
        *("slots-rdma-vf-gpu-0000-14-00-0", "slots-rdma-vf-gpu-0000-24-00-0", "slots-rdma-vf-0000-32-00-0")
    }


def places(snapshot: Snapshot) -> set[str]:
    """Name the places of a node's VFs: of their parts, the ones without a number."""
    names = set(by_name(Offered(snapshot, [late(VF)]).devices))
    return {name for name in names if name.rpartition("-")[0] not in names}


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


def test_resources_whose_names_become_alike_have_places_of_different_names() -> None:
    names = ("a.b/vf", "a-b/vf", "very-long-domain.of.an-organisation.example.com/sriov-vf-of-rail")
    resources = [
        late(Resource(name, "vf", offer="dra", select=replace(VF.select, pci_addresses=(vf,))))
        for name, vf in zip(names, (FIRST, SECOND, "0000:22:00.1"), strict=True)
    ]
    found = by_name(Offered(node(rails=2, vfs=2), resources).devices)
    assert len(found) == 3
    assert all(len(name) <= 63 for name in found)


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


def test_a_vf_tells_what_it_is_and_where() -> None:
    device = Offered(recorded_node("h100-8gpu"), [VF]).devices[0]
    assert device.name == "vf-0000-18-00-1"
    assert device.attributes == {
        "resource": {"string": "rdma/vf"},
        "kind": {"string": "vf"},
        "linkLayer": {"string": "Ethernet"},
        "pf": {"string": "0000:18:00.0"},
        "pfName": {"string": "ens1f0np0"},
        "vendor": {"string": "15b3"},
        "device": {"string": "101e"},
        "driver": {"string": "mlx5_core"},
        "switch": {"string": "0000:16:00.0"},
        "vf": {"int": 0},
        "rail": {"int": 0},
        "plane": {"int": 0},
        "speed": {"int": 400},
        "firmware": {"version": "28.39.3004"},
        "nearGpu": {"string": "GPU-6b3fd5a0-0000-4000-8000-000000000000"},
        "resource.kubernetes.io/pciBusID": {"string": "0000:18:00.1"},
        "resource.kubernetes.io/pcieRoot": {"string": "pci0000:15"},
        "resource.kubernetes.io/numaNode": {"int": 0},
        "k8s.cni.cncf.io/resourceName": {"string": "rdma/vf"},
        "k8s.cni.cncf.io/deviceID": {"string": "0000:18:00.1"},
    }


@pytest.mark.parametrize("binding", ["early", "late"])
def test_towards_gpus_a_vf_is_where_its_data_direct_function_is(binding: str) -> None:
    names = ("nearGpu", "resource.kubernetes.io/pcieRoot", "switch", "pfPcieRoot", "resource.kubernetes.io/numaNode")

    def told(snapshot: Snapshot) -> dict[str, tuple[Any, ...]]:
        found = Offered(snapshot, [replace(VF, binding=binding)]).devices
        return {value(device, "pf"): tuple(value(device, name) for name in names) for device in found}

    snapshot, pf = recorded_node("gb300-4gpu"), "0000:03:00.0"
    gpu = next(gpu.uuid for gpu in snapshot.gpus if gpu.pci_address == "0009:06:00.0")
    function = snapshot.by_address["0009:03:00.0"]
    whole = told(snapshot)
    assert whole[pf] == (gpu, "pci0009:00", function.path[-3], "pci0000:00", 0)
    unread = told(replace(snapshot, adapter_ids=tuple(each for each in snapshot.adapter_ids if each[0] != pf)))
    assert unread == {**whole, pf: (None, None, None, "pci0000:00", 0)}


def test_a_shared_hca_tells_its_rdma_device_and_is_not_for_multus() -> None:
    device = Offered(recorded_node("h100-8gpu"), [HCA]).devices[0]
    assert device.name == "hca-946dae0300000000"
    assert value(device, "rdmaDevice") == "mlx5_0"
    assert not [name for name in device.attributes if name.startswith("k8s.cni.cncf.io/")]


def test_an_infiniband_adapter_tells_its_guid() -> None:
    [device] = Offered(recorded_node("ib-dual-port"), [HCA]).devices
    assert (value(device, "linkLayer"), value(device, "guid")) == ("InfiniBand", "f4521403007bcba0")
    assert "guid" not in Offered(recorded_node("h100-8gpu"), [HCA]).devices[0].attributes


def test_a_place_tells_what_all_that_stand_there_have_in_common() -> None:
    [here] = [d for d in Offered(recorded_node("v100-16gpu"), [late(VF)]).devices if value(d, "nearGpu")][:1]
    assert value(here, "kind") == "slots"
    assert value(here, "resource.kubernetes.io/pcieRoot") == "pci0000:10"
    assert "vf" not in here.attributes


@pytest.mark.parametrize("shares", ["capacity", "devices"])
def test_a_place_is_called_by_its_own_name_to_multus_and_the_name_is_known_for_a_places(shares: str) -> None:
    for snapshot in (recorded_node("v100-16gpu"), replace(node(rails=2, vfs=4), gpus=())):
        for device in Offered(snapshot, [late(VF)], Dra(shares=shares)).devices:
            assert value(device, "k8s.cni.cncf.io/resourceName") == "rdma/vf"
            assert value(device, "k8s.cni.cncf.io/deviceID") == device.name
            assert is_place(device.name)
        for device in Offered(snapshot, [VF, late(HCA)], Dra(shares=shares)).devices:
            assert value(device, "k8s.cni.cncf.io/deviceID") == (
                None if device.units[0].kind == "hca" else device.units[0].device
            )
            assert is_place(device.name) == (device.units[0].kind == "hca")


def test_a_place_of_one_device_does_not_tell_which() -> None:
    [here] = Offered(node(rails=1, vfs=1), [late(VF)], Dra(aliases=())).devices
    assert "resource.kubernetes.io/pciBusID" not in here.attributes


def test_a_place_says_the_pci_address_of_its_gpu_and_what_is_bound_early_its_own() -> None:
    for name, count in (("h100-8gpu", 8), ("mi300x-8gpu", 8)):
        snapshot = recorded_node(name)
        for resource in (VF, HCA):
            places = Offered(snapshot, [late(resource)]).devices
            told = [address for place in places if (address := value(place, "resource.kubernetes.io/pciBusID"))]
            assert sorted(told) == sorted(gpu.pci_address for gpu in snapshot.all_gpus)
            assert len(told) == count
            for shares in ("capacity", "devices"):
                for device in Offered(snapshot, [resource], Dra(shares=shares)).devices:
                    (unit,) = device.units
                    assert value(device, "resource.kubernetes.io/pciBusID") == unit.device


def test_what_is_not_known_is_left_out() -> None:
    snapshot = node(rails=1, vfs=1)
    for address in (PF, FIRST):
        snapshot = change(snapshot, address, numa_node=-1, driver=None, netdevs=(), rdma_devices=())
    [device] = Offered(snapshot).devices
    unknown = {"resource.kubernetes.io/numaNode", "driver", "pfName", "speed", "firmware", "linkLayer", "rail"}
    assert device.attributes.keys().isdisjoint(unknown)


@pytest.mark.parametrize(
    ("text", "is_told"),
    [
        ("28.39.1002", True),
        ("1.0.0-rc.1+build.7", True),
        ("0.0.0.0", False),
        ("01.2.3", False),
        ("1.2", False),
        ("", False),
        ("1.2.3-" + "a" * 60, False),
        ("1.2.\u0663", False),
    ],
)
def test_firmware_is_told_where_it_is_a_semantic_version(text: str, is_told: bool) -> None:
    assert (version(text) is not None) is is_told


def test_other_drivers_names_are_as_configured() -> None:
    snapshot = recorded_node("h100-8gpu")
    names = ("gpu.amd.com/numaNode", "dra.net/numaNode", "gpu.nvidia.com/uuid", "gpu.example.com/pciBusID")
    first = Offered(snapshot, [late(VF)], Dra(aliases=names)).devices[0]
    assert [value(first, name) for name in names] == [0, 0, "GPU-6b3fd5a0-0000-4000-8000-000000000000", "0000:1b:00.0"]
    none = Offered(snapshot, [late(VF)], Dra(aliases=())).devices[0]
    assert none.attributes.keys().isdisjoint(names)


def test_the_switch_port_at_the_end_of_the_link_is_told_and_a_name_too_long_is_not() -> None:
    snapshot = node(rails=2, vfs=1)
    offer = plain_offer([VF], snapshot)
    leaves = {PF: Neighbour("aa:bb", "Ethernet1/7", "leaf-3"), "0000:22:00.0": Neighbour("aa:bc", "p" * 65, "")}
    first, second = devices_of(Offered(snapshot).config, offer, Facts(stable_facts(offer, StableFacts()), leaves))
    assert (value(first, "leaf"), value(first, "leafPort")) == ("leaf-3", "Ethernet1/7")
    assert (value(second, "leaf"), value(second, "leafPort")) == ("aa:bc", None)


def test_rails_are_the_adapters_nearest_to_gpus_by_address_the_same_for_their_vfs() -> None:
    found = Offered(recorded_node("b200-8gpu-2nic"), [VF, HCA]).devices
    by_pf = {value(d, "pf"): value(d, "rail") for d in found if d.resource_name == "rdma/hca"}
    assert list(by_pf.values()) == sorted(by_pf.values()) == list(range(8))
    assert {(value(d, "pf"), value(d, "rail")) for d in found} == set(by_pf.items())


def test_a_whole_adapter_says_the_same_while_a_pod_has_it() -> None:
    before = node(rails=2, vfs=0)
    offer = plain_offer([NIC], before)
    seen = stable_facts(offer, StableFacts())
    config = Offered(before, [NIC]).config
    away = [
        replace(rdma, absent=True, node_guid="", fw_version="", ports=()) for rdma in before.by_address[PF].rdma_devices
    ]
    taken = change(before, PF, netdevs=(), rdma_devices=tuple(away))
    later = stable_facts(plain_offer([NIC], taken), seen)
    assert devices_of(config, offer, Facts(later)) == devices_of(config, offer, Facts(seen))


def test_speed_is_the_highest_that_was_seen() -> None:
    before = node(rails=1, vfs=1)
    seen = stable_facts(plain_offer([VF], before), StableFacts())
    rdma = before.by_address[PF].rdma_devices[0]
    down = change(
        before,
        PF,
        netdevs=(),
        rdma_devices=(replace(rdma, ports=(replace(rdma.ports[0], state="DOWN", rate_gbps=10.0),)),),
    )
    assert stable_facts(plain_offer([VF], down), seen).speeds == seen.speeds == {PF: 400}
    assert stable_facts(plain_offer([VF], down), StableFacts()).speeds == {}


def test_the_subnet_is_told_from_when_its_port_was_up_first() -> None:
    down = recorded_node("ib-dual-port")
    [address] = [device.address for device in down.devices if device.rdma_devices]
    [rdma] = down.by_address[address].rdma_devices
    first, second = rdma.ports
    ports = (replace(first, subnet_prefix="fec00000000000a1"), replace(second, subnet_prefix="fec00000000000a2"))
    up = change(down, address, rdma_devices=(replace(rdma, ports=ports),))
    config = Offered(down, [HCA]).config

    def told(seen: StableFacts) -> object:
        [device] = devices_of(config, plain_offer([HCA], down), Facts(seen))
        return device.attributes.get("subnetPrefix")

    seen = stable_facts(plain_offer([HCA], down), StableFacts())
    assert told(seen) is None
    seen = stable_facts(plain_offer([HCA], up), seen)
    assert told(seen) == {"string": "fec00000000000a1"}
    assert told(stable_facts(plain_offer([HCA], down), seen)) == {"string": "fec00000000000a1"}


def test_a_port_without_a_link_layer_says_none() -> None:
    [device, *_] = Offered(recorded_node("efa"), [HCA]).devices
    assert "linkLayer" not in device.attributes
    assert LinkLayer.UNSPECIFIED.value not in str(device.attributes)


def test_switches_are_read_back_from_slices_into_which_others_have_written() -> None:
    def text(**attributes: str) -> dict[str, Any]:
        return {name: {"string": value} for name, value in attributes.items()}

    devices = [
        {"name": "bare"},
        {"name": "odd", "attributes": {"pf": {"int": 1}, "leaf": {"bool": True}}},
        {"name": "vf-0", "attributes": text(pf="0000:12:00.0", leaf="leaf-1", leafPort="swp1")},
        {"name": "vf-1", "attributes": text(pf="0000:22:00.0", leaf="leaf-2")},
        {"name": "vf-2", "attributes": text(pf="0000:32:00.0")},
    ]

    assert leaves_in([{"spec": {"devices": devices}}, {"spec": {}}]) == {
        "0000:12:00.0": Neighbour("", "swp1", "leaf-1"),
        "0000:22:00.0": Neighbour("", "", "leaf-2"),
    }


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


def test_vfs_of_a_port_that_is_nearest_to_two_gpus_take_turns() -> None:
    snapshot = recorded_node("a100-8gpu-4nic")
    vfs = [d.address for d in snapshot.devices if d.is_vf]
    paired = pair_up(vfs, Distances(snapshot))
    assert {len(gpus) for gpus in paired.near.values()} == {2}
    assert set(Counter(paired.gpu.values()).values()) == {len(vfs) // 8}


def test_vfs_that_are_left_are_shared_out_evenly_where_every_port_is_as_near() -> None:
    snapshot = recorded_node("one-numa-node")
    paired = pair_up([d.address for d in snapshot.devices if d.is_vf], Distances(snapshot))
    assert sorted(Counter(paired.gpu.values()).values()) == [2, 2, 2, 2]


def test_an_adapter_that_is_nearest_to_no_gpu_names_none() -> None:
    snapshot = node(rails=3, vfs=1)
    distances = Distances(Offered(snapshot).snapshot)
    without_gpu = type(snapshot)(snapshot.devices, snapshot.gpus[:2])
    paired = pair_up(["0000:12:00.1", "0000:22:00.1", "0000:32:00.1"], Distances(without_gpu))
    assert list(paired.gpu) == ["0000:12:00.1", "0000:22:00.1"]
    assert pair_up([], distances).gpu == {}


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([name for name in GPU_NODES if name != "efa"]), st.data())
def test_however_the_devices_come_each_names_the_same_gpu(name: str, data: st.DataObject) -> None:
    snapshot = recorded_node(name)
    vfs = [d.address for d in snapshot.devices if d.is_vf]
    mine = data.draw(st.permutations(data.draw(st.lists(st.sampled_from(vfs), unique=True, max_size=24))))
    distances = Distances(snapshot)
    assert pair_up(mine, distances) == pair_up(sorted(mine), distances)


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


def names(slices: Sequence[Document]) -> list[list[str]]:
    return [[device["name"] for device in one["spec"]["devices"]] for one in slices]


def test_few_devices_are_in_one_slice_by_turns_of_their_adapters() -> None:
    [found] = Offered(node(rails=2, vfs=3)).slices
    assert found["metadata"] == {"name": "00000-nodefabric.io-node-1"}
    spec = {key: value for key, value in found["spec"].items() if key != "devices"}
    assert spec == {"driver": DRIVER, "nodeName": NODE, "pool": {"name": NODE, "resourceSliceCount": 1}}
    assert names([found]) == [[f"vf-0000-{bus}-00-{n}" for n in (1, 2, 3) for bus in (12, 22)]]


def test_many_devices_are_in_slices_of_their_adapters() -> None:
    slices = Offered(with_vfs(recorded_node("h100-8gpu"), 16)).slices
    assert [one["metadata"]["name"][:6] for one in slices] == [f"0000{n}-" for n in range(8)]
    assert {one["spec"]["pool"]["resourceSliceCount"] for one in slices} == {8}
    for one in slices:
        assert len({device["attributes"]["pf"]["string"] for device in one["spec"]["devices"]}) == 1


def test_an_adapter_of_many_vfs_has_several_slices() -> None:
    slices = Offered(node(rails=1, vfs=100)).slices
    assert [len(one["spec"]["devices"]) for one in slices] == [64, 36]


def test_a_port_that_fails_changes_its_own_slice_alone() -> None:
    snapshot = with_vfs(recorded_node("h100-8gpu"), 16)
    offer = plain_offer([VF], snapshot)
    before = Offered(snapshot, offer=offer).slices
    port = list(snapshot.by_address["0000:3a:00.0"].vfs)
    after = Offered(snapshot, offer=ill(offer, Reason.LINK_DOWN, *port)).slices
    assert [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b] == [1]
    assert names(before) == names(after)


def test_names_that_would_be_too_long_are_digests_that_keep_the_order() -> None:
    driver, node_name = "d" * 63, ".".join(["n" * 60] * 4)
    found = [object_name(index, driver, node_name) for index in (0, 1, 15, 16, 255)]
    assert found == sorted(found)
    assert len(set(found)) == 5
    assert all(len(name) <= 253 for name in found)
    assert object_name(0, driver, node_name) != object_name(0, driver, f"{node_name[:-1]}m")


def test_a_cluster_that_drops_taints_is_not_told_of_ill_devices() -> None:
    snapshot = node(rails=1, vfs=2)
    offer = ill(plain_offer([VF], snapshot), Reason.NO_DRIVER, "0000:12:00.1")
    devices = Offered(snapshot, offer=offer).devices
    assert names(slices_of(devices, DRIVER, NODE, {"taints"})) == [["vf-0000-12-00-2"]]
    assert len(names(slices_of(devices, DRIVER, NODE))[0]) == 2


def test_a_cluster_that_drops_capacity_is_told_of_whole_devices_alone() -> None:
    devices = Offered(node(rails=1, vfs=2), [VF, HCA]).devices
    assert names(slices_of(devices, DRIVER, NODE, {"capacity"})) == [["vf-0000-12-00-1", "vf-0000-12-00-2"]]
    assert slices_of(Offered(node(), [late(VF)]).devices, DRIVER, NODE, {"capacity"}) == ()
    as_devices = Offered(node(rails=1, vfs=2), [late(VF)], Dra(shares="devices")).devices
    assert len(names(slices_of(as_devices, DRIVER, NODE, {"capacity"}))[0]) == 2


def test_a_cluster_that_drops_lists_is_told_of_the_first_of_each() -> None:
    devices = Offered(recorded_node("a100-8gpu-4nic"), [HCA], Dra(list_attributes=True)).devices

    def aliases(slices: Sequence[Document]) -> list[Any]:
        return [device["attributes"]["gpu.nvidia.com/uuid"] for one in slices for device in one["spec"]["devices"]]

    lists, scalars = (
        aliases(slices_of(devices, DRIVER, NODE)),
        aliases(slices_of(devices, DRIVER, NODE, {"listAttributes"})),
    )
    assert scalars == [{"string": value["strings"][0]} for value in lists]


def test_a_node_of_1024_vfs_takes_a_megabyte_early_and_a_few_kilobytes_late() -> None:
    snapshot = replace(node(rails=16, vfs=64), gpus=())
    sizes = [len(json.dumps(Offered(snapshot, [resource]).slices)) for resource in (VF, late(VF))]
    assert sizes[0] < 1_100_000
    assert sizes[1] < 6_000


def test_no_slice_is_larger_than_the_api_allows_whatever_becomes_of_its_devices() -> None:
    assert max(len(each) for each in names(Offered(recorded_node("v100-16gpu"), [VF, HCA]).slices)) <= MAX_DEVICES
