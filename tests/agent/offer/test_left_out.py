"""Each adapter, VF and accelerator that is not offered has one reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from agent.config import Config, parse
from agent.model.device import MigDevice, PciDevice, Snapshot, is_accelerator
from agent.offer.left_out import LeftOut, left_out, left_out_by
from agent.offer.selection import Why
from agent.offer.units import plain_offer
from agent.report.chart import is_nic

Snapshots = Callable[[str], Snapshot]
Edit = Callable[[Snapshot], Snapshot]
EXAMPLES = sorted((Path(__file__).parents[3] / "daemonset/examples").glob("config-*.yaml"))
NODES = sorted(path.stem for path in (Path(__file__).parents[2] / "nodes").glob("*.json"))
PF, VF, GPU = "0000:18:00.0", "0000:18:00.1", "0000:1b:00.0"


def each(change: Callable[[PciDevice], PciDevice]) -> Edit:
    return lambda snapshot: replace(snapshot, devices=tuple(map(change, snapshot.devices)))


def one(address: str, **changes: object) -> Edit:
    return each(lambda d: replace(d, **changes) if d.address == address else d)  # type: ignore[arg-type]


def without_vfs(snapshot: Snapshot) -> Snapshot:
    kept = (replace(d, vfs=()) for d in snapshot.devices if not d.is_vf)
    return replace(snapshot, devices=tuple(kept))


def all_of(*edits: Edit) -> Edit:
    def edit(snapshot: Snapshot) -> Snapshot:
        for each_edit in edits:
            snapshot = each_edit(snapshot)
        return snapshot

    return edit


def in_a_bond(device: PciDevice) -> PciDevice:
    return replace(device, netdevs=tuple(replace(n, is_enslaved=True) for n in device.netdevs))


def routed(snapshot: Snapshot) -> Snapshot:
    return replace(snapshot, only_ways=frozenset({"ens1f0np0"}))


def cut(snapshot: Snapshot) -> Snapshot:
    part = MigDevice("MIG-1", "1g.10gb", 1, 0, 10 << 30)
    gpus = (replace(g, mig_mode=True, mig_devices=(part,)) if g.pci_address == GPU else g for g in snapshot.gpus)
    return replace(snapshot, gpus=tuple(gpus))


def unseen(snapshot: Snapshot) -> Snapshot:
    return replace(snapshot, gpus=())


def absent(device: PciDevice) -> PciDevice:
    return replace(device, rdma_devices=tuple(replace(r, absent=True) for r in device.rdma_devices))


def without_sriov(device: PciDevice) -> PciDevice:
    return replace(device, sriov_totalvfs=0)


def same(snapshot: Snapshot) -> Snapshot:
    return snapshot


VFS, NICS, HCAS = "{name: a/vf, kind: vf}", "{name: a/nic, kind: nic}", "{name: a/hca, kind: hca}"
FIRST = "{name: a/first, kind: hca, select: {pf: [ens1f0np0]}}"
MELLANOX = "select: {vendors: ['15b3']}"
RAILS = "{name: a/rail, kind: rail, nic: {kind: hca, shares: 1, select: {pf: [PFS]}}}"
FOUR = RAILS.replace("PFS", "ens1f0np0, ens2f0np0, ens3f0np0, ens4f0np0")
THREES = "{name: a/rail, kind: rail, nic: {kind: hca, shares: 1, count: 3}}"
RDMA_NICS = "{name: a/nic, kind: nic, select: {isRdma: true}}"
ALL_BUT_LITTLE = "{name: a/rail, kind: rail, gpu: {pciAddresses: ['0000:1b:00.0']}, nic: {kind: hca}}"


@pytest.mark.parametrize(
    ("edit", "resources", "device", "why", "detail"),
    [
        (one(VF, driver=None), VFS, VF, Why.UNHEALTHY, "NoDriver"),
        (same, FOUR, "0000:dd:00.0", Why.NO_NIC, ""),
        (same, ALL_BUT_LITTLE, "0000:da:00.0", Why.NO_GPU, ""),
        (unseen, FOUR, PF, Why.NO_GPU_HERE, ""),
        (cut, "{name: a/gpu, kind: gpu, mig: mixed}", GPU, Why.SLICED, ""),
        (without_vfs, f"{{name: a/vf, kind: vf, {MELLANOX}}}", PF, Why.NO_VFS, ""),
        (without_vfs, "{name: a/vf, kind: vf, select: {pf: ['ens1f0np0#0-3'], isRdma: true}}", PF, Why.NO_VFS, ""),
        (all_of(without_vfs, each(without_sriov)), f"{{name: a/vf, kind: vf, {MELLANOX}}}", PF, Why.NO_SRIOV, ""),
        (
            all_of(without_vfs, each(without_sriov), routed),
            *(f"{{name: a/vf, kind: vf, {MELLANOX}}}", PF, Why.DEFAULT_ROUTE, ""),
        ),
        (same, NICS, PF, Why.HAS_VFS, ""),
        (all_of(without_vfs, each(in_a_bond)), NICS, PF, Why.HOST_PORT, ""),
        (all_of(without_vfs, routed), NICS, PF, Why.DEFAULT_ROUTE, ""),
        (one(PF, pci_class=0x088000, vfs=()), NICS, PF, Why.NOT_NETWORK, ""),
        (one(PF, rdma_devices=()), HCAS, PF, Why.NO_RDMA, ""),
        (one(VF, rdma_devices=()), "{name: a/vf, kind: vf, select: {isRdma: true}}", VF, Why.NO_RDMA, ""),
        (one(VF, driver=None), "{name: a/vf, kind: vf, select: {drivers: [mlx5_core]}}", VF, Why.NO_DRIVER, ""),
        (each(absent), HCAS, PF, Why.IN_A_POD, ""),
        (unseen, "{name: a/gpu, kind: gpu}", GPU, Why.NOT_IN_NVML, ""),
        (same, "{name: a/vf, kind: vf, select: {pf: [ens2f0np0]}}", VF, Why.NOT_SELECTED, "select.pf"),
        (
            *(same, "{name: a/vf, kind: vf, select: [{pf: [ens2f0np0]}, {pf: [ens3f0np0]}]}"),
            *(VF, Why.NOT_SELECTED, "select"),
        ),
        (same, HCAS, VF, Why.OTHER_KIND, "vf"),
        (same, VFS, GPU, Why.NOT_HANDED_OUT, ""),
        (unseen, VFS, GPU, Why.NOT_HANDED_OUT, ""),
        (same, "{name: a/acc, kind: accelerator}", GPU, Why.NOT_HANDED_OUT, ""),
        (same, THREES, "0000:da:00.0", Why.TOO_FEW, ""),
        (all_of(without_vfs, routed, one(PF, rdma_devices=())), RDMA_NICS, PF, Why.DEFAULT_ROUTE, ""),
        (all_of(without_vfs, each(in_a_bond)), "{name: a/nic, kind: nic, select: {pf: [x]}}", PF, Why.HOST_PORT, ""),
        (same, VFS, PF, None, ""),
        (same, "", PF, Why.OTHER_KIND, "hca or vf"),
        (without_vfs, "", PF, Why.OTHER_KIND, "hca or nic"),
    ],
)
def test_a_device_that_is_not_offered_has_the_reason_that_is_nearest(
    node_snapshot: Snapshots, edit: Edit, resources: str, device: str, why: Why | None, detail: str
) -> None:
    found = reasons(parse(f"resources: [{resources}]", "test"), edit(node_snapshot("h100-8gpu")))
    assert [(each.why, each.detail) for each in found if device in each.devices] == ([(why, detail)] if why else [])


@pytest.mark.parametrize(
    ("edit", "config", "resource", "device", "why", "detail"),
    [
        (same, f"resources: [{FIRST}, {HCAS}]", "a/hca", PF, Why.TAKEN, "a/first"),
        (same, f"resources: [{FOUR}, {HCAS}]", "a/hca", PF, Why.TAKEN, "a/rail"),
        (same, f"{{cni: {{protect: [ens1f0np0]}}, resources: [{HCAS}]}}", "a/hca", PF, Why.PROTECTED, ""),
        (same, f"resources: [{VFS}]", "a/vf", PF, Why.OTHER_KIND, "hca or vf"),
    ],
)
def test_a_resource_has_its_own_reason_for_each_device_that_it_does_not_offer(
    node_snapshot: Snapshots, edit: Edit, config: str, resource: str, device: str, why: Why, detail: str
) -> None:
    read, snapshot = parse(config, "test"), edit(node_snapshot("h100-8gpu"))
    found = left_out_by(read.resources, plain_offer(read.resources, snapshot))[resource]
    assert [(each.why, each.detail) for each in found if device in each.devices] == [(why, detail)]


@pytest.mark.parametrize("node", NODES)
def test_each_device_that_an_example_leaves_out_has_exactly_one_reason(node_snapshot: Snapshots, node: str) -> None:
    snapshot = node_snapshot(node)
    for example in EXAMPLES:
        check_reasons(parse(example.read_text(), example.name), snapshot)


def check_reasons(config: Config, snapshot: Snapshot) -> None:
    offer = plain_offer(config.resources, snapshot)
    found = reasons(config, snapshot)
    counts = Counter(device for each in found for device in each.devices)
    offered = {
        device for units in (*offer.offered.values(), *offer.pools.values()) for u in units for device in names(u)
    }
    offered |= {adapter for _, adapter in offer.adapters}
    offered |= {gpu.pci_address for gpu in snapshot.gpus if gpu.uuid in offered}
    devices = {d.address for d in snapshot.devices if is_counted(d)}
    ill = {device for each in found if each.why is Why.UNHEALTHY for device in each.devices}
    assert set(counts.values()) <= {1}
    assert counts.keys() - ill == devices - offered
    assert not [each for each in found if each.why is Why.NOT_YET]


def is_counted(device: PciDevice) -> bool:
    return device.is_vf or bool(device.netdevs) or is_nic(device) or is_accelerator(device)


def names(unit: object) -> tuple[str, ...]:
    return (*unit.devices, unit.gpu)  # type: ignore[attr-defined]


def reasons(config: Config, snapshot: Snapshot) -> tuple[LeftOut, ...]:
    return left_out(config.resources, plain_offer(config.resources, snapshot))
