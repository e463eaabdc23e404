"""What a device publishes of itself, and what all devices of a place share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agent.config import Dra
from agent.hardware.lldp import Neighbour
from agent.model.allocation import is_place
from agent.model.device import Snapshot
from agent.offer.units import plain_offer
from deviceplugin.dra.attributes import Facts, StableFacts, leaves_in, stable_facts, version
from deviceplugin.dra.devices import devices_of
from tests.deviceplugin.dra.nodes import FIRST, HCA, NIC, PF, VF, Offered, late, recorded_node, value
from tests.node import change, node


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
    assert "linkLayer" not in Offered(recorded_node("efa"), [HCA]).devices[0].attributes


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
