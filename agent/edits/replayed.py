"""What kubelet replays for containers that start again: the answers of Allocate that it keeps in its checkpoint. Pure.

An answer with CDI names of ours stays true. One that names device files (of a version before CDI names, on a node
without CDI, or of a pool that does as another project's plugin) is right only while their numbers are: after a reboot,
or when a driver was loaded anew, a path may be another device's, and kubelet would hand that over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from agent.kubelet.checkpoint import Entry, answer_of
from agent.model.device import PciDevice, Snapshot
from agent.offer.offer import Offer

Owners = Mapping[str, frozenset[str]]
"""Device file of the host → the devices whose it is: PCI addresses, or a GPU's UUID. Files of all are not there."""


@dataclass(frozen=True, slots=True)
class Misled:
    """A container that would get another's device if it started again."""

    entry: Entry
    path: str
    now_of: tuple[str, ...]
    """The devices whose file it is now."""


def owners(snapshot: Snapshot) -> Owners:
    """Tell whose each device file is. The devices of an IOMMU group have one together."""
    found: dict[str, set[str]] = {}
    for device in snapshot.devices:
        for path in files_of(device):
            found.setdefault(path, set()).add(device.address)
    for gpu in snapshot.gpus:
        if gpu.minor is not None:
            found.setdefault(f"/dev/nvidia{gpu.minor}", set()).add(gpu.uuid)
    return {path: frozenset(devices) for path, devices in found.items()}


def files_of(device: PciDevice) -> Iterator[str]:
    """List the device files of the host that are one function's, or its IOMMU group's."""
    yield from (file.path for rdma in device.rdma_devices for file in rdma.char_devices)
    if device.iommu_group is not None:
        yield f"/dev/vfio/{'noiommu-' if device.noiommu else ''}{device.iommu_group}"
    if device.uio:
        yield f"/dev/{device.uio}"
    if device.cxi:
        yield f"/dev/{device.cxi}"
    if device.vdpa is not None and device.vdpa.path:
        yield device.vdpa.path


def stranger(paths: Iterable[str], mine: Collection[str], whose: Owners) -> tuple[str, tuple[str, ...]] | None:
    """Find a path that is other devices' than `mine`; None if there is none. One that is nobody's opens nothing."""
    found = ((path, whose[path]) for path in paths if path in whose)
    return next(((path, tuple(sorted(its))) for path, its in found if its.isdisjoint(mine)), None)


def misled(
    entries: Sequence[Entry], granted: Mapping[str, tuple[str, ...]], resource_names: Collection[str], offer: Offer
) -> tuple[Misled, ...]:
    """List the containers whose answer names a device file that is another device's now.

    `granted` maps units to devices as the books have it, `resource_names` are ours.
    """
    whose = owners(offer.snapshot)
    found = []
    for entry in entries:
        answer = answer_of(entry.answer) if entry.resource_name in resource_names else None
        if answer is None or not answer.paths:
            continue
        mine = {
            device for unit_id in entry.unit_ids for device in _devices(entry.resource_name, unit_id, granted, offer)
        }
        strange = stranger(answer.paths, mine, whose) if mine else None
        if strange is not None:
            found.append(Misled(entry, *strange))
    return tuple(found)


def _devices(resource_name: str, unit_id: str, granted: Mapping[str, tuple[str, ...]], offer: Offer) -> Iterator[str]:
    """List the devices that a unit stands for."""
    unit = offer.find(resource_name, unit_id)
    if unit is not None and unit.is_counted:
        yield from offer.adapters_of_pool(resource_name)
        return
    yield from granted.get(unit_id, ())
    if unit is not None:
        yield from (*unit.devices, unit.gpu)
        yield from (gpu.uuid for gpu in offer.snapshot.gpus if any(m.uuid == unit.device for m in gpu.mig_devices))
