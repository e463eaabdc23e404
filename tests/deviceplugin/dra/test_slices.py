"""Whatever a node is like, its slices are what the API server takes, and the same for the same node."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.config import Dra, Resource, Select
from agent.model.device import NO_NUMA_NODE, Snapshot
from agent.model.health import Reason, unhealthy
from agent.offer.offer import Offer, Unit
from agent.offer.units import plain_offer
from deviceplugin.dra.devices import Document, object_name, slices_of
from hack.sim.cluster.dra import admitted
from hack.sim.cluster.dra.gates import DEFAULT, LISTS
from hack.sim.cluster.kinds import SLICE
from tests.deviceplugin.dra.nodes import DRIVER, HCA, NODE, VF, Offered, ill, late, recorded_node, with_vfs
from tests.node import change, node

REASONS = [reason for reason in Reason if not reason.name.startswith(("GPU_", "XID"))]
KINDS = st.sampled_from(["vf", "vf", "hca", "nic"])
RECORDED = ("h100-8gpu", "gb200-4gpu", "one-numa-node", "efa", "ib-dual-port")


@st.composite
def machines(draw: st.DrawFn) -> Snapshot:
    if draw(st.booleans()):
        snapshot = recorded_node(draw(st.sampled_from(RECORDED)))
    else:
        snapshot = node(rails=draw(st.integers(1, 5)), vfs=draw(st.sampled_from([0, 1, 2, 7, 70])))
        snapshot = replace(snapshot, gpus=snapshot.gpus[: draw(st.integers(0, 5))])
    for address in draw(st.lists(st.sampled_from([d.address for d in snapshot.devices]), max_size=3)):
        what: dict[str, Any] = draw(st.sampled_from([{"numa_node": NO_NUMA_NODE}, {"driver": None}, {"netdevs": ()}]))
        snapshot = change(snapshot, address, **what)
    return snapshot


@st.composite
def offered(draw: st.DrawFn) -> Offered:
    snapshot = draw(machines())
    resources = []
    for number in range(draw(st.integers(1, 3))):
        name = draw(
            st.sampled_from(["rdma/vf", "a.b/vf", "a-b/vf", "very-long-domain.of.example.com/adapters-of-rail"])
        )
        devices = draw(st.lists(st.sampled_from([d.address for d in snapshot.devices]), max_size=12))
        resources.append(
            Resource(
                f"{name}{number}",
                draw(KINDS),
                Select(pci_addresses=tuple(devices)),
                offer="dra",
                binding=draw(st.sampled_from(["early", "late"])),
                shares=draw(st.sampled_from([1, 2, 63])),
            )
        )
    plain = plain_offer(resources, snapshot)
    every = [unit.device for units in plain.claimable.values() for unit in units]
    granted = draw(st.dictionaries(st.sampled_from(every), st.integers(1, 64), max_size=4)) if every else {}
    ailing = draw(st.dictionaries(st.sampled_from(every), st.sampled_from(REASONS), max_size=9)) if every else {}
    lost = frozenset(device for device in ailing if draw(st.booleans()))

    def told(unit: Unit) -> Unit:
        return replace(unit, health=unhealthy(ailing[unit.device])) if unit.device in ailing else unit

    offer: Offer = replace(
        plain,
        claimable={n: tuple(map(told, units)) for n, units in plain.claimable.items()},
        granted=granted,
        lost=lost,
    )
    aliases = draw(st.sampled_from([("gpu.nvidia.com/uuid",), (), ("dra.net/numaNode", "gpu.nvidia.com/uuid")]))
    dra = Dra(
        driver=draw(st.sampled_from(["nodefabric.io", "f" * 63])),
        aliases=aliases,
        list_attributes=draw(st.booleans()),
        shares=draw(st.sampled_from(["capacity", "devices"])),
    )
    evict = draw(st.sampled_from([(), ("LinkDown", "NoDriver")]))
    return Offered(snapshot, resources, dra, offer, evict)


def devices_in(slices: Sequence[Document]) -> list[Mapping[str, Any]]:
    return [device for one in slices for device in one["spec"]["devices"]]


@settings(max_examples=300, deadline=None)
@given(offered(), st.sets(st.sampled_from(["taints", "capacity", "listAttributes"])))
def test_the_api_server_takes_each_slice(found: Offered, dropped: set[str]) -> None:
    slices = slices_of(found.devices, found.dra.driver, NODE, dropped)
    for one in slices:
        plain = json.loads(json.dumps(one))
        plain["spec"]["pool"]["generation"] = 1
        stored = admitted(SLICE, plain["metadata"]["name"], plain, None, DEFAULT | {LISTS}, "2026-01-01T00:00:00Z")
        for device in stored["spec"]["devices"]:
            for taint in device.get("taints", ()):
                taint.pop("timeAdded")
        assert stored == plain
    names = [device["name"] for device in devices_in(slices)]
    assert len(set(names)) == len(names)
    assert {one["spec"]["pool"]["resourceSliceCount"] for one in slices} <= {len(slices)}
    assert not ("taints" in dropped and any("taints" in device for device in devices_in(slices)))
    assert not ("capacity" in dropped and any("capacity" in device for device in devices_in(slices)))


@settings(max_examples=100, deadline=None)
@given(offered(), st.randoms())
def test_equal_nodes_have_equal_slices_whatever_order_they_were_found_in(found: Offered, chance: Any) -> None:
    assert found.offer is not None
    again = replace(found.snapshot, devices=tuple(chance.sample(found.snapshot.devices, len(found.snapshot.devices))))
    units = {name: tuple(chance.sample(mine, len(mine))) for name, mine in found.offer.claimable.items()}
    other = replace(found.offer, claimable=units, snapshot=again)
    assert json.dumps(Offered(again, found.resources, found.dra, other, found.evict).slices) == json.dumps(found.slices)


@settings(max_examples=100, deadline=None)
@given(offered())
def test_no_unit_is_promised_to_two_claims(found: Offered) -> None:
    assert found.offer is not None
    rooms, free = Counter[str](), Counter[str]()
    by_resource = {resource.name: resource for resource in found.resources}
    for device in found.devices:
        capacity = [int(each["value"]) for each in device.capacity.values()] or [1]
        rooms[device.resource_name] += capacity[0]
        free[device.resource_name] += 0 if device.taints else capacity[0]
    for name, room in rooms.items():
        units = found.offer.claimable[name]
        each = by_resource[name].shares if by_resource[name].kind == "hca" else 1
        left = [max(0, each - found.offer.granted.get(unit.device, 0)) for unit in units]
        gone = [unit.health.reason == Reason.DEVICE_GONE and unit.device not in found.offer.lost for unit in units]
        here = [(n, unit) for n, unit, is_gone in zip(left, units, gone, strict=True) if not is_gone]
        is_late = by_resource[name].binding == "late"
        # What is withheld may be told of, with a taint: all of a place in which none is clean, and parts with none.
        clean = sum(n for n, unit in here if not is_late or unit.health.reason != Reason.QUARANTINED)
        assert free[name] <= clean <= room <= sum(n for n, _ in here)


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
