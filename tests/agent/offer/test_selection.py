"""What selectors ask of a device, and that a physical device serves one resource."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.config import PfSelector, RailNic, Resource, Select, SharedPool, SriovPool, parse_pf
from agent.model.device import CharDevice, LinkLayer, RdmaDevice, RdmaPort, Snapshot, VdpaDevice
from agent.offer.selection import (
    ACCELERATOR_CLASS,
    Assignment,
    Candidate,
    alternative,
    assign,
    choosing,
    errors,
    may_be_nic,
    offered_candidates,
)
from agent.offer.units import plain_offer
from tests.node import change, node

PF, VF = "0000:12:00.0", "0000:12:00.2"
IB_PORT = RdmaPort(1, "ACTIVE", LinkLayer.INFINIBAND, 400.0, pkey=0x8001)


def ib(snapshot: Snapshot) -> Snapshot:
    """Give the VF an InfiniBand device."""
    rdma = RdmaDevice("mlx5_9", "CA", "", "", (IB_PORT,), (CharDevice("uverbs", "/dev/infiniband/uverbs9"),))
    return change(snapshot, VF, rdma_devices=(rdma,))


VHOST = VdpaDevice("vdpa0", "vhost_vdpa", "/dev/vhost-vdpa-0")
MADE: Snapshot = change(change(ib(node(rails=1, vfs=3)), "0000:12:00.1", vdpa=VHOST), "0000:12:00.3", acpi_index="101")


def candidates(kind: str, snapshot: Snapshot) -> list[Candidate]:
    return [candidate for _, candidate in offered_candidates(Resource("a/b", kind), kind, snapshot)]


def chosen(select: Select, snapshot: Snapshot = MADE, kind: str = "vf") -> list[str]:
    choose = choosing(select)
    return [c.device[-4:] for c in candidates(kind, snapshot) if choose(c) is not None]


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        (Select(), ["00.1", "00.2", "00.3"]),
        (Select(classes=("02",)), ["00.1", "00.2", "00.3"]),
        (Select(classes=("0207", "03")), []),
        (Select(root_devices=(PfSelector(PF),)), ["00.1", "00.2", "00.3"]),
        (Select(root_devices=(PfSelector(PF, frozenset({1})),)), ["00.2"]),
        (Select(root_devices=(PfSelector("0000:22:00.0"),)), []),
        (Select(pf=(PfSelector("RAIL0", frozenset({0, 2})),)), ["00.1", "00.3"]),
        (Select(pf=(PfSelector("rail0"),), root_devices=(PfSelector(PF, frozenset({2})),)), ["00.3"]),
        (Select(pf=(PfSelector(PF, frozenset({2})), PfSelector("rail0", frozenset({0})))), ["00.1", "00.3"]),
        (Select(vendors=(0x15B3, 0x8086), devices=(0x1021,), drivers=("mlx5_core",)), ["00.1", "00.2", "00.3"]),
        (Select(vendors=(0x15B3,), devices=(0x1572,)), []),
        (Select(is_rdma=True), ["00.2"]),
        (Select(pkeys=(0x8001,)), ["00.2"]),
        (Select(pkeys=(0x7FFF,)), []),
        (Select(vdpa_type="vhost"), ["00.1"]),
        (Select(vdpa_type="virtio"), []),
        (Select(need_vhost_net=True), ["00.1", "00.2", "00.3"]),
        (Select(any_of=(Select(is_rdma=True), Select(vdpa_type="vhost"))), ["00.1", "00.2"]),
        (Select(vendors=(0x8086,), any_of=(Select(),)), []),
        (Select(acpi_indexes=("101",)), ["00.3"]),
        (Select(acpi_indexes=("102",)), []),
    ],
)
def test_a_selector_takes(select: Select, expected: list[str]) -> None:
    assert chosen(select) == expected


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, {"nic", "hca"}),
        ({"pci_class": 0x00FF00}, {"nic", "hca"}),
        ({"pci_class": 0x00FF00, "netdevs": ()}, {"nic", "hca"}),  # as Alibaba's eRDMA
        ({"pci_class": 0x00FF00, "rdma_devices": ()}, {"nic"}),
        ({"pci_class": 0x00FF00, "netdevs": (), "rdma_devices": ()}, set()),
        ({"pci_class": 0x010802, "netdevs": ()}, {"hca"}),
    ],
)
def test_a_function_without_a_class_is_an_adapter_if_it_has_an_rdma_device_or_interface(
    changes: dict[str, object], kinds: set[str]
) -> None:
    snapshot = change(node(rails=1, vfs=0), PF, **changes)
    assert {kind for kind in ("nic", "hca", "vf", "gpu") for c in candidates(kind, snapshot) if c.device == PF} == kinds


def test_accelerators_are_of_class_12() -> None:
    gpu = "0000:14:00.0"
    assert chosen(Select(), change(MADE, gpu, pci_class=0x120000), "accelerator") == ["00.0"]
    assert chosen(Select(), MADE, "accelerator") == []


def test_the_first_alternative_that_takes_a_device_counts() -> None:
    select = Select(any_of=(Select(is_rdma=True), Select(), Select(vdpa_type="vhost")))
    choose = choosing(select)
    found = {c.device[-4:]: choose(c) for c in candidates("vf", MADE)}
    assert found == {"00.1": 1, "00.2": 0, "00.3": 1}
    assert alternative(select, 0).is_rdma
    assert alternative(Select(is_rdma=True), 0).is_rdma


def test_an_accelerator_is_told_from_adapters_and_from_what_has_left_the_node() -> None:
    snapshot = change(node(rails=1, vfs=1), "0000:12:00.1", pci_class=ACCELERATOR_CLASS << 16)
    assert may_be_nic("0000:12:00.0", snapshot)
    assert not may_be_nic("0000:12:00.1", snapshot)
    assert may_be_nic("0000:7f:00.0", snapshot)


POOL = SriovPool("intel.com")


def vfs(name: str, *pf: str, compat: SriovPool | None = None) -> Resource:
    return Resource(name, "vf", Select(pf=tuple(map(parse_pf, pf))), compat=compat)


def devices(found: Assignment, name: str) -> list[str]:
    return [taken.candidate.label for taken in found.taken[name]]


def test_an_hca_and_its_adapter_as_a_whole_are_one_device() -> None:
    snapshot = change(node(rails=1, vfs=0), "0000:12:00.0", vfs=())
    for kinds in (("hca", "nic"), ("nic", "hca")):
        found = assign([Resource(f"a/{kind}", kind) for kind in kinds], snapshot)
        assert [len(taken) for taken in found.taken.values()] == [1, 0]
        assert len(found.overlaps) == 1


def test_a_rail_takes_its_gpu_and_its_nic() -> None:
    rail = Resource("a/rail", "rail", nic=RailNic("vf", Select(pf=(PfSelector("rail0"),))))
    found = assign([rail, Resource("a/gpu", "gpu"), vfs("a/vf")], node(rails=1, vfs=2))
    assert {taken.kind for taken in found.taken["a/rail"]} == {"gpu", "vf"}
    assert (devices(found, "a/gpu"), devices(found, "a/vf")) == ([], [])
    assert [(o.owner, o.loser) for o in found.overlaps] == [("a/rail", "a/gpu")] + [("a/rail", "a/vf")] * 2


def test_vfs_that_carry_the_hosts_default_route_or_are_ports_of_its_bond_are_not_offered() -> None:
    """ADD would refuse them to each pod that kubelet gives them to."""
    snapshot = node(rails=1, vfs=3)
    port = replace(snapshot.by_address["0000:12:00.2"].netdevs[0], is_enslaved=True)
    snapshot = change(snapshot, "0000:12:00.2", netdevs=(port,))
    snapshot = replace(snapshot, only_ways=frozenset({snapshot.by_address["0000:12:00.3"].netdevs[0].name}))
    assert devices(assign([vfs("rdma/vf")], snapshot), "rdma/vf") == ["0000:12:00.1"]


def test_our_own_resource_and_a_pool_that_select_one_device_are_a_mistake() -> None:
    resources = [vfs("rdma/vf"), vfs("intel.com/a", "rail0", compat=POOL)]
    assert len(errors(resources, assign(resources, node(rails=1, vfs=3)).overlaps)) == 3


def test_shared_pools_may_have_adapters_in_common() -> None:
    resources = [Resource(f"rdma/{n}", "hca", compat=SharedPool(3)) for n in "ab"]
    found = assign(resources, node(rails=2, vfs=0))
    assert devices(found, "rdma/a") == devices(found, "rdma/b") == ["0000:12:00.0 (mlx5_0)", "0000:22:00.0 (mlx5_1)"]
    assert found.overlaps == ()


def test_a_device_without_a_driver_is_in_no_pool() -> None:
    snapshot = change(node(rails=1, vfs=2), "0000:12:00.1", driver=None)
    assert devices(assign([vfs("intel.com/a", compat=POOL)], snapshot), "intel.com/a") == ["0000:12:00.2"]


def test_a_device_in_use_stays_with_the_resource_that_it_was_handed_out_under() -> None:
    resources = [vfs("a/low", "rail0#0-1"), vfs("a/high", "rail0#2-3")]
    found = assign(resources, node(rails=1, vfs=4), holders={"0000:12:00.1": "a/high", "0000:12:00.4": "a/high"})
    assert devices(found, "a/low") == ["0000:12:00.2"]
    assert devices(found, "a/high") == ["0000:12:00.1", "0000:12:00.3", "0000:12:00.4"]
    assert found.overlaps == ()


selects = st.builds(
    Select,
    pf=st.lists(st.sampled_from(["rail0", "rail1#0-1", "rail2#1,3"]).map(parse_pf), max_size=2).map(tuple),
    vendors=st.sampled_from([(), (0x15B3,), (0x10DE,)]),
)
kinds = st.sampled_from(["hca", "vf", "nic", "gpu"])


@settings(max_examples=60)
@given(
    st.lists(st.tuples(kinds, selects), max_size=5),
    st.dictionaries(st.sampled_from(["0000:12:00.1", "0000:22:00.2", "0000:32:00.3"]), st.sampled_from(["a/0", "a/9"])),
)
def test_no_part_of_the_node_is_given_out_twice(wanted: list[tuple[str, Select]], holders: dict[str, str]) -> None:
    resources = [Resource(f"a/{i}", kind, select) for i, (kind, select) in enumerate(wanted)]
    found = assign(resources, node(rails=3, vfs=3), holders=holders)
    parts = [part for taken in found.taken.values() for each in taken for part in each.candidate.parts]
    assert len(parts) == len(set(parts))
    units = plain_offer(resources, node(rails=3, vfs=3)).offered
    ids = [unit.unit_id for listed in units.values() for unit in listed]
    assert len(ids) == len(set(ids))
