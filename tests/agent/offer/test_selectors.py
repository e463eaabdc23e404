"""What selectors ask of a device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent.config import PfSelector, Resource, Select
from agent.edits.build import build
from agent.model.device import CharDevice, LinkLayer, PciDevice, RdmaDevice, RdmaPort, Snapshot, VdpaDevice
from agent.offer.selection import ACCELERATOR_CLASS, alternative, candidates, choosing, conditions, may_be_nic, takes
from agent.offer.units import plain_offer
from tests.deviceplugin.machines import change, node

PF, VF = "0000:12:00.0", "0000:12:00.2"
IB_PORT = RdmaPort(1, "ACTIVE", LinkLayer.INFINIBAND, 400.0, pkey=0x8001)


def ib(snapshot: Snapshot) -> Snapshot:
    """Give the VF an InfiniBand device."""
    rdma = RdmaDevice("mlx5_9", "CA", "", "", (IB_PORT,), (CharDevice("uverbs", "/dev/infiniband/uverbs9"),))
    return change(snapshot, VF, rdma_devices=(rdma,))


MADE: Snapshot = change(
    ib(node(rails=1, vfs=3)),
    "0000:12:00.1",
    vdpa=VdpaDevice("vdpa0", "vhost_vdpa", "/dev/vhost-vdpa-0"),
)


def chosen(select: Select, snapshot: Snapshot = MADE, kind: str = "vf") -> list[str]:
    return [c.device[-4:] for c in candidates(kind, snapshot) if takes(conditions(select), c)]


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
        (Select(acpi_indexes=("101",)), []),
    ],
)
def test_a_selector_takes(select: Select, expected: list[str]) -> None:
    assert chosen(select) == expected


def test_an_acpi_index_is_that_of_the_function_itself() -> None:
    snapshot = change(node(rails=1, vfs=0), PF, acpi_index="101", sriov_totalvfs=8)
    assert chosen(Select(acpi_indexes=("101",)), snapshot, "nic") == ["00.0"]
    assert chosen(Select(acpi_indexes=("102",)), snapshot, "nic") == []


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


def given(snapshot: Snapshot, select: Select, device: PciDevice | None = None) -> list[tuple[str, str]]:
    """List the files that a container gets with the first VF, with their paths in the host."""
    resource = Resource("rdma/vf", "vf", select)
    units = plain_offer([resource], snapshot).offered["rdma/vf"]
    return [(node.path, node.host_path) for node in build(resource, units[:1], snapshot).devices]


def test_vhost_net_comes_with_what_the_selector_takes_that_asks_for_it() -> None:
    with_vhost = replace(node(rails=1, vfs=2), vhost_net=True)
    select = Select(any_of=(Select(pf=(PfSelector("rail0", frozenset({0})),), need_vhost_net=True), Select()))
    assert given(with_vhost, select) == [("/dev/vhost-net", ""), ("/dev/net/tun", "")]
    assert given(with_vhost, Select()) == []
    assert given(node(rails=1, vfs=2), select) == []


def test_uio_and_vdpa_devices_come_with_their_files() -> None:
    uio = change(node(rails=1, vfs=2), "0000:12:00.1", driver="uio_pci_generic", uio="uio3")
    assert given(uio, Select()) == [("/dev/uio3", "")]
    assert given(MADE, Select(vdpa_type="vhost")) == [("/dev/vhost-vdpa-0", "")]


def test_a_vfio_group_without_an_iommu_has_another_name_in_the_host() -> None:
    vfio = change(node(rails=1, vfs=2), "0000:12:00.1", driver="vfio-pci", iommu_group=7, noiommu=True)
    assert given(vfio, Select()) == [("/dev/vfio/vfio", ""), ("/dev/vfio/7", "/dev/vfio/noiommu-7")]


def test_an_accelerator_is_told_from_adapters_and_from_what_has_left_the_node() -> None:
    snapshot = change(node(rails=1, vfs=1), "0000:12:00.1", pci_class=ACCELERATOR_CLASS << 16)
    assert may_be_nic("0000:12:00.0", snapshot)
    assert not may_be_nic("0000:12:00.1", snapshot)
    assert may_be_nic("0000:7f:00.0", snapshot)
