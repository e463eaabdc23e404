"""Devices → slices of the node: which device is in which, names, sizes, and what a cluster drops."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agent.config import Dra
from agent.model.health import Reason
from agent.offer.units import plain_offer
from deviceplugin.dra.devices import Document, object_name, slices_of
from tests.deviceplugin.dra.nodes import DRIVER, HCA, NODE, VF, Offered, ill, late, recorded_node, with_vfs
from tests.node import node


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
