"""The one builder of a node for tests: its hardware as a snapshot, its books, and what pods and claims hold in them."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from agent.config import HealthSettings
from agent.hardware import recorded
from agent.hardware.adapter_ids import with_adapter_ids
from agent.hardware.sysfs.scan import scan
from agent.health_history import HealthHistory
from agent.ledger import Ledger
from agent.model.allocation import (
    NO_SPECS,
    Attachment,
    Claim,
    ClaimRef,
    ClaimState,
    Hold,
    NetnsId,
    Owner,
    PodRef,
    Spec,
    Undo,
)
from agent.model.device import CharDevice, Gpu, LinkLayer, Netdev, PciDevice, RdmaDevice, RdmaPort, Snapshot
from agent.process.conditions import Conditions
from agent.report.events import Events
from agent.report.metrics import Metrics
from agent.report.report import Report

VF = "0000:3b:00.2"
POD = PodRef("default", "trainer", "uid-1")


def rdma(number: int, guid: str, *, state: str = "ACTIVE", layer: LinkLayer = LinkLayer.ETHERNET) -> RdmaDevice:
    """Make an HCA with one port and all its character devices."""
    return RdmaDevice(
        name=f"mlx5_{number}",
        node_type="CA",
        node_guid=guid,
        fw_version="28.39.1002",
        ports=(RdmaPort(1, state, layer, 400.0),),
        char_devices=(
            CharDevice("uverbs", f"/dev/infiniband/uverbs{number}"),
            CharDevice("umad", f"/dev/infiniband/umad{number}", 1),
            CharDevice("issm", f"/dev/infiniband/issm{number}", 1),
        ),
    )


def netdev(name: str, *, carrier: bool | None = True) -> Netdev:
    """Make an Ethernet interface."""
    return Netdev(name, 10, "b8:3f:d2:00:00:01", 1500, "up", carrier, LinkLayer.ETHERNET, 100_000)


def pci(address: str, path: tuple[str, ...] = ("pci0000:3a",), numa_node: int = 0, **more: Any) -> PciDevice:
    """Make a PCI function below `path`: an adapter, unless more is said."""
    plain = PciDevice(address, (*path, address), 0x020000, 0x15B3, 0x1021, "mlx5_core", numa_node, None)
    return replace(plain, **more)


def node(rails: int = 4, vfs: int = 4, generation: int = 1) -> Snapshot:
    """Make a node of two sockets; each rail is one PCIe switch with a NIC (and its VFs) and a GPU."""
    devices: list[PciDevice] = []
    gpus = []
    for rail in range(rails):
        bus = 0x10 + rail * 0x10
        numa = rail * 2 // rails
        switch = (f"pci0000:{bus:02x}", f"0000:{bus:02x}:01.0", f"0000:{bus + 1:02x}:00.0")
        pf = f"0000:{bus + 2:02x}:00.0"
        vf_addresses = tuple(f"0000:{bus + 2:02x}:{(i + 1) // 8:02x}.{(i + 1) % 8}" for i in range(vfs))
        nic_path = (*switch, f"0000:{bus + 1:02x}:01.0")
        guid = f"b83f:d203:00a0:{rail:04x}"
        devices.append(
            pci(
                pf,
                nic_path,
                numa,
                vfs=vf_addresses,
                sriov_totalvfs=max(vfs, 1),
                netdevs=(netdev(f"rail{rail}"),),
                rdma_devices=(rdma(rail, guid),),
            )
        )
        devices += [
            pci(a, nic_path, numa, physfn=pf, vf_index=i, netdevs=(netdev(f"rail{rail}v{i}"),))
            for i, a in enumerate(vf_addresses)
        ]
        gpu = f"0000:{bus + 4:02x}:00.0"
        gpu_path = (*switch, f"0000:{bus + 1:02x}:02.0")
        devices.append(replace(pci(gpu, gpu_path, numa), pci_class=0x030200, vendor=0x10DE, driver="nvidia"))
        gpus.append(Gpu(gpu_uuid(rail), rail, rail, gpu, "NVIDIA H100 80GB HBM3", 80 << 30))
    return Snapshot(
        devices=tuple(sorted(devices, key=lambda d: d.address)),
        gpus=tuple(gpus),
        rdma_cm=True,
        generation=generation,
    )


def split(snapshot: Snapshot, planes: int = 2, vfs: int = 0, device: int = 0x1023) -> Snapshot:
    """Make each adapter one with several PFs, each with VFs; `snapshot` is a node without VFs."""
    devices: list[PciDevice] = []
    for card in snapshot.devices:
        if card.vendor != 0x15B3:
            devices.append(card)
            continue
        for plane in range(planes):
            address = f"{card.address[:-1]}{plane}"
            mine = tuple(f"{card.address[:-4]}{plane + 1:02x}.{i}" for i in range(vfs))
            name = f"{card.netdevs[0].name}p{plane}"
            number = int(card.rdma_devices[0].name.removeprefix("mlx5_")) * planes + plane
            own = {"rdma_devices": (rdma(number, f"b83f:d203:00a1:{number:04x}"),), "netdevs": (netdev(name),)}
            devices.append(pci(address, card.path[:-1], card.numa_node, vfs=mine, sriov_totalvfs=max(vfs, 1), **own))
            devices[-1] = replace(devices[-1], device=device)
            devices += [
                pci(a, card.path[:-1], card.numa_node, physfn=address, vf_index=i, netdevs=(netdev(f"{name}v{i}"),))
                for i, a in enumerate(mine)
            ]
    return replace(snapshot, devices=tuple(sorted(devices, key=lambda d: d.address)))


@cache
def recorded_node(name: str) -> Snapshot:
    """Scan a modelled node, GPUs included."""
    recording = recorded.load(recorded.find(name))
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # thousands of small files
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        recorded.unpack(recording, Path(folder))
        found = with_adapter_ids(scan(Path(folder)), Path(folder))
    return replace(found, gpus=recording.gpus, generation=1)


def gpu_uuid(rail: int) -> str:
    """Name the GPU of a rail."""
    return f"GPU-{rail:08x}-1111-2222-3333-444444444444"


def change(snapshot: Snapshot, address: str, **changes: object) -> Snapshot:
    """Change one device."""
    devices = tuple(
        replace(d, **changes) if d.address == address else d  # type: ignore[arg-type]
        for d in snapshot.devices
    )
    return replace(snapshot, devices=devices, generation=snapshot.generation + 1)


def without(snapshot: Snapshot, *addresses: str) -> Snapshot:
    """Take devices away."""
    devices = tuple(d for d in snapshot.devices if d.address not in addresses)
    return replace(snapshot, devices=devices, generation=snapshot.generation + 1)


@contextmanager
def open_books(folder: Path, boot_id: str = "boot", clock: Callable[[], float] = time.time) -> Iterator[Ledger]:
    """Open the ledger in a folder, and close it."""
    with closing(Ledger.open(folder / "ledger.db", boot_id, clock)) as books:
        yield books


def new_report(conditions: Conditions | None = None) -> Report:
    """Make what parts report to."""
    return Report(Metrics(CollectorRegistry()), conditions or Conditions(), Events(), HealthHistory(HealthSettings()))


def owner(container_id: str = "c1", cni_ifname: str = "net1", pod: PodRef = POD) -> Owner:
    """Name a container of a pod."""
    return Owner(container_id, cni_ifname, pod, NetnsId(4, 4026531840))


UNDO = Undo("ens1f0v0", "02:00:00:00:01:00", 1500, False)


def attach(books: Ledger, device: str = VF, who: Owner | None = None, **more: Any) -> Attachment:
    """Begin an attachment."""
    who = who or owner()
    plain: dict[str, Any] = {
        "ifname": who.cni_ifname,
        "resource_name": "rdma/vf",
        "undo": UNDO,
        "netns_path": "/nowhere",
        "request": {"name": "net", "network": None},
    }
    return books.begin_attach(who, device=device, **{**plain, **more})


def granted(
    resource_name: str, units: Mapping[str, str | Sequence[str]], specs: Mapping[str, Spec] = NO_SPECS
) -> list[Hold]:
    """Say that kubelet was given units (unit ID → device, or all NICs of a rail)."""
    return [
        Hold(key, resource_name, (its,) if its and isinstance(its, str) else tuple(its), spec=specs.get(key))
        for key, its in units.items()
    ]


def bound_slot(
    key: str,
    resource_name: str,
    kind: str,
    device: str,
    container: str,
    container_id: str,
    cni_ifname: str,
    pod: PodRef | None,
    edits: Mapping[str, Any],
    boot_id: str = "",
    since: float = 0.0,
) -> Hold:
    """Say that a slot has a device, for a container of a sandbox."""
    return Hold(
        key,
        resource_name,
        (device,),
        pod=pod,
        spec=Spec(kind, edits),
        kind=kind,
        container=container,
        container_id=container_id,
        cni_ifname=cni_ifname,
        bound_at=since,
        boot_id=boot_id,
    )


def claimed(
    request: str,
    pool: str,
    device_name: str,
    resource_name: str,
    kind: str,
    device: str,
    key: str,
    share_id: str = "",
    *,
    edits: Mapping[str, Any] | None = None,
    exclusive: bool = True,
    **more: Any,
) -> Hold:
    """Say that a claim has a device for one of its requests."""
    return Hold(
        key,
        resource_name,
        (device,),
        spec=Spec("claim", edits or {"env": ["NODEFABRIC_CLAIM=default/nics"]}),
        kind=kind,
        exclusive=exclusive,
        request=request,
        pool=pool,
        device_name=device_name,
        share_id=share_id,
        **more,
    )


def claimed_vf(device: str = VF, **more: Any) -> Hold:
    """Say that a claim has a VF."""
    return replace(claimed("nic", "node", "vf", "rdma/vf", "vf", device, f"name-{device}"), **more)


def prepare(
    books: Ledger,
    name: str = "nics",
    *devices: Hold,
    pod: PodRef = POD,
    state: ClaimState = ClaimState.PREPARED,
    **more: Any,
) -> Claim:
    """Bring a claim of one pod into a state, with one VF if nothing else is said."""
    ref = ClaimRef(f"uid-{name}", "default", name)
    claim = Claim(ref, ClaimState.PREPARING, devices or (claimed_vf(),), (pod,), pod.uid)
    books.prepare_claim(replace(claim, **more))
    books.set_claim_state(ref.uid, state)
    found = books.claim(ref.uid)
    assert found is not None
    return found
