from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agent.config import Resource, Select, SharedPool, parse_pf
from agent.model.device import LinkLayer, Snapshot
from agent.model.unit_id import MAX_UNIT_ID
from agent.offer.offer import Unit
from agent.offer.selection import overlap_problems
from agent.offer.units import plain_offer
from tests.node import change, node, rdma

HCA = Resource("rdma/hca", "hca", shares=3)
VF = Resource("rdma/vf", "vf")
GPU = Resource("nvidia.com/gpu", "gpu")


def vf(**select: object) -> Resource:
    return replace(VF, select=Select(**select))  # type: ignore[arg-type]


def units(resource: Resource, snapshot: Snapshot, **more: Any) -> tuple[Unit, ...]:
    return plain_offer([resource], snapshot, **more).offered[resource.name]


def devices(resource: Resource, snapshot: Snapshot, **more: Any) -> list[str]:
    return [u.device for u in units(resource, snapshot, **more)]


def test_an_hca_offers_its_shares_under_its_node_guid() -> None:
    found = units(HCA, node(rails=2))
    assert [u.unit_id for u in found] == [
        *(f"hca-b83fd20300a00000-{n}" for n in range(3)),
        *(f"hca-b83fd20300a00001-{n}" for n in range(3)),
    ]
    assert {u.device for u in found} == {"0000:12:00.0", "0000:22:00.0"}
    assert [u.numa_node for u in found] == [0, 0, 0, 1, 1, 1]
    assert found[0].rdma_devices == ("mlx5_0",)


def test_an_hca_without_a_usable_guid_is_named_by_its_pci_address() -> None:
    snapshot = change(node(rails=1), "0000:12:00.0", rdma_devices=(rdma(0, "0000:0000:0000:0000"),))
    assert units(HCA, snapshot)[0].unit_id == "hca-0000:12:00.0-0"


def test_an_hca_cannot_be_shared_where_rdma_devices_belong_to_one_namespace_each() -> None:
    snapshot = replace(node(rails=1), rdma_exclusive=True)
    assert {u.health.reason for u in units(HCA, snapshot)} == {"ExclusiveRdma"}
    assert all(u.health.healthy for u in units(VF, snapshot))


def test_an_hca_without_uverbs_is_unhealthy() -> None:
    bare = replace(rdma(0, "b83f:d203:00a0:0000"), char_devices=())
    snapshot = change(node(rails=1), "0000:12:00.0", rdma_devices=(bare,))
    assert {u.health.reason for u in units(HCA, snapshot)} == {"NoCharDevice"}


def test_a_vf_stays_selected_while_its_interface_sits_in_a_pod() -> None:
    snapshot = change(node(rails=1), "0000:12:00.1", netdevs=(), rdma_devices=())
    for resource in (
        VF,
        vf(pf=(parse_pf("rail0#0"),)),
        vf(link_layers=(LinkLayer.ETHERNET,), drivers=("mlx5_core",)),
        vf(vendors=(0x15B3,), pci_addresses=("0000:12:00.1",)),
    ):
        assert "0000:12:00.1" in devices(resource, snapshot)


def test_a_vf_selected_by_its_own_interface_stays_when_the_ledger_knows_the_name() -> None:
    snapshot = change(node(rails=1), "0000:12:00.1", netdevs=())
    resource = vf(netdevs=("rail0v0",))
    assert devices(resource, snapshot) == []
    assert devices(resource, snapshot, host_names={"0000:12:00.1": "rail0v0"}) == ["0000:12:00.1"]


def test_link_layer_is_told_by_the_pci_class_when_nothing_else_does() -> None:
    snapshot = node(rails=1)
    for address in ("0000:12:00.0", "0000:12:00.1"):
        snapshot = change(snapshot, address, netdevs=(), rdma_devices=(), pci_class=0x020700)
    assert devices(vf(link_layers=(LinkLayer.INFINIBAND,)), snapshot)
    assert devices(vf(link_layers=(LinkLayer.ETHERNET,)), snapshot) == []


def test_an_overlap_names_both_resources_and_the_device() -> None:
    resources = [vf(pf=(parse_pf("rail0#0-2"),)), replace(VF, name="rdma/other", select=Select(vendors=(0x15B3,)))]
    (problem,) = overlap_problems(resources, node(rails=1))
    assert problem == (
        "rdma/other selects rail0: VFs 0–2, which rdma/vf has already: a device serves one resource, so narrow one of"
        " the two selectors"
    )


@given(
    rails=st.integers(1, 6),
    vfs=st.integers(0, 7),
    shares=st.integers(1, 70),
    guids=st.lists(st.sampled_from(["", "0000:0000:0000:0000", "b83f:d203:00a0:0001", "1:2:3:4"]), max_size=6),
)
def test_unit_ids_are_unique_over_all_resources_and_short_enough(
    rails: int, vfs: int, shares: int, guids: list[str]
) -> None:
    snapshot = node(rails=rails, vfs=vfs)
    for rail, guid in enumerate(guids[:rails]):
        snapshot = change(snapshot, f"0000:{0x12 + rail * 0x10:02x}:00.0", rdma_devices=(rdma(rail, guid),))
    found = [u for us in plain_offer([replace(HCA, shares=shares), VF, GPU], snapshot).offered.values() for u in us]
    ids = [u.unit_id for u in found]
    assert len(ids) == len(set(ids)) == rails * (shares + vfs + 1)
    assert max(map(len, ids)) <= MAX_UNIT_ID


def test_every_pci_device_that_is_offered_is_known_with_its_resource() -> None:
    snapshot = node(rails=2)
    pfs = {"0000:12:00.0", "0000:22:00.0"}
    vfs = {device.address for device in snapshot.devices if device.is_vf}

    def found(*resources: Resource) -> dict[str, str]:
        return dict(plain_offer(resources, snapshot).network_devices)

    late = replace(VF, binding="late")
    assert plain_offer([late], snapshot).adapters == {("rdma/vf", pf) for pf in pfs}
    assert found(HCA, late, GPU) == dict.fromkeys(pfs, "rdma/hca") | dict.fromkeys(vfs, "rdma/vf")
    pool = replace(HCA, compat=SharedPool(hca_max=5))
    assert plain_offer([pool], snapshot).adapters == {("rdma/hca", pf) for pf in pfs}
    assert found(pool).keys() == pfs
    snapshot = change(snapshot, "0000:22:00.1", rdma_devices=(rdma(9, "1:2:3:4"),))
    assert found(pool).keys() == pfs
    assert plain_offer([pool], snapshot).adapters_of_pool(pool.name) == {*pfs, "0000:22:00.1"}
