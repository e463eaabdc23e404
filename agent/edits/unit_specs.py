"""What the CDI specs of granted units are to say: what the hardware is now.

kubelet replays an answer for every later start of a container, also after a reboot, or when a driver was loaded anew
and the numbers of device files are others. So an answer names CDI devices of ours, and what such a name means is worked
out anew whenever the hardware changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from agent.config import Resource
from agent.edits.build import unit_specs
from agent.edits.specs import UNIT, Specs
from agent.errors import UnitUnhealthy
from agent.kubelet.checkpoint import Entry, answer_of
from agent.ledger import Ledger
from agent.model.allocation import NO_SPECS, Hold, Spec
from agent.model.device import PciDevice, Snapshot
from agent.model.health import HEALTHY
from agent.offer.offer import Offer, Unit
from agent.offer.offers import differs_in_pods_only
from agent.state import Latest

REBOUND_MODES = ("infiniband",)


class UnitSpecs:
    """Keeps the specs of units true. Methods block, briefly, and may be called on many threads at once."""

    def __init__(self, ledger: Ledger, specs: Specs, settled: Latest[bool]) -> None:
        """`settled` says whether the holds have agreed with kubelet's word since the start: the books may be new."""
        self._ledger = ledger
        self._specs = specs
        self._settled = settled
        self._gone_by: tuple[Snapshot, Sequence[Resource]] | None = None
        """What specs were compared with last."""
        self._compared: dict[str, tuple[tuple[str, ...], float]] = {}
        """Unit that was → the devices and time of its grant."""

    def adopt(self, entries: Sequence[Entry], offer: Offer, resources: Sequence[Resource]) -> None:
        """Give units that came back into lost books their specs again. Raises LedgerError, and Unavailable.

        `entries` are kubelet's, of containers that were answered CDI names of ours. Slots are passed over: what they
        were bound to stands in their own files.
        """
        by_name = {resource.name: resource for resource in resources}

        def decide() -> Mapping[str, Spec]:
            bare = {hold.key: hold.devices for hold in self._ledger.holds() if hold.spec is None and not hold.is_slot}
            news: dict[str, Spec] = {}
            for entry in entries:
                mine = {i: bare[i] for i in entry.unit_ids if i in bare}
                if mine and entry.resource_name in by_name:
                    found = _of_container(by_name[entry.resource_name], sorted(entry.unit_ids), mine, offer)
                    news |= {i: found[i] for i in mine if i in found}
            return news

        self._specs.change(decide)

    def renew(self, offer: Offer, resources: Sequence[Resource]) -> Sequence[str]:
        """Have books and specs say what the hardware of an offer is; list the units of which they said something else.

        Looks only at what has changed since the last offer; an older one than that is passed over.
        Raises LedgerError, and Unavailable if a spec cannot be written or removed.
        """
        by_name = {resource.name: resource for resource in resources}

        def decide() -> Mapping[str, Spec]:
            if not self._goes_by(offer.snapshot, resources):
                return NO_SPECS
            holds = {hold.key: hold for hold in self._ledger.holds() if hold.spec is not None and not hold.is_slot}
            worked_out: dict[tuple[str, ...], Mapping[str, Spec]] = {}
            news = {}
            for key, hold in holds.items():
                if self._compared.get(key) == (hold.devices, hold.since):
                    continue
                now = self._now(hold, holds, by_name.get(hold.resource_name), offer, worked_out)
                if now != hold.spec:
                    news[key] = now
            # Those that are said anew are looked at once more: the books may refuse them.
            self._compared = {key: (hold.devices, hold.since) for key, hold in holds.items() if key not in news}
            return news

        return self._specs.change(decide)

    def tidy(self) -> Sequence[str]:
        """Remove the specs of units that are granted no more; list them. Raises Unavailable and LedgerError."""
        return self._specs.tidy(UNIT) if self._settled.value else ()

    # -------------------------------------------------------------------------------------------------- one spec

    def _goes_by(self, snapshot: Snapshot, resources: Sequence[Resource]) -> bool:
        """Take a snapshot for the newest, unless it is older than that. What it may change is looked at anew."""
        if self._gone_by is not None:
            last, known = self._gone_by
            if snapshot.generation < last.generation:
                return False
            if known == resources and (snapshot is last or differs_in_pods_only(last, snapshot)):
                return True  # such as each pod makes, and of no account to files of devices
        self._gone_by = snapshot, resources
        self._compared.clear()
        return True

    def _now(
        self,
        hold: Hold,
        holds: Mapping[str, Hold],
        resource: Resource | None,
        offer: Offer,
        worked_out: dict[tuple[str, ...], Mapping[str, Spec]],
    ) -> Spec:
        """Tell what a unit's spec is to say now. `worked_out` is what was found of the same container's other units."""
        spec = hold.spec
        assert spec is not None
        if resource is None or resource.kind != spec.kind or resource.compat is not None:
            # Nobody knows any more what its container is to get, but what it must not.
            paths = (node.get("hostPath", node["path"]) for node in spec.edits.get("deviceNodes", ()))
            is_wrong = stranger(paths, hold.devices, owners(offer.snapshot)) is not None
            return replace(spec, edits={}, added={}, nodes={}) if is_wrong else spec
        came = [device for device in hold.devices if self._has_come_by_add(device)]
        if hold.devices and len(came) == len(hold.devices):
            return spec
        if spec.beside not in worked_out:
            devices = {i: holds[i].devices for i in spec.beside if i in holds}
            worked_out[spec.beside] = _of_container(resource, spec.beside, devices, offer)
        found = worked_out[spec.beside].get(hold.key)
        if found is None:
            return replace(spec, edits={}, added={}, nodes={})
        for device in came:
            found = found.with_nodes(device, spec.nodes.get(device, ()))
        return spec if (found.edits, found.nodes) == (spec.edits, spec.nodes) else found

    def _has_come_by_add(self, device: str) -> bool:
        """Tell whether the device's files are those that it got on its way into a pod: ADD knows them before a scan."""
        row = self._ledger.attachment_on(device)
        if row is None or row.boot_id != self._ledger.boot_id:
            return False
        return row.undo.rdma is not None or "guids" in row.undo.extra or row.undo.mode in REBOUND_MODES


def _of_container(
    resource: Resource, unit_ids: Sequence[str], devices: Mapping[str, tuple[str, ...]], offer: Offer
) -> Mapping[str, Spec]:
    """Work out the specs of the units that one container has, as far as their devices are there.

    `devices` are those that the books know of them.
    """
    units = [_unit(resource, unit_id, devices.get(unit_id, ()), offer) for unit_id in unit_ids]
    try:
        found = unit_specs(resource, [unit for unit in units if unit is not None], offer.snapshot)
    except UnitUnhealthy:
        return NO_SPECS
    return {unit_id: replace(spec, beside=tuple(unit_ids)) for unit_id, spec in found.items()}


def _unit(resource: Resource, unit_id: str, devices: tuple[str, ...], offer: Offer) -> Unit | None:
    """Find a unit on its devices; None if one of them is gone.

    A unit that is offered is what kubelet takes it for. One that is called by an address is offered no more where its
    device has got another: the books know that. So they do of a rail, which keeps the NICs that it was granted with.
    """
    offered = offer.find(resource.name, unit_id)
    there = offer.snapshot.by_address
    found = [there[device] for device in devices if device in there]
    is_whole = bool(found) and len(found) == len(devices)
    if offered is not None and (resource.kind != "rail" or not found or offered.devices == devices):
        return offered if all(device in there for device in offered.devices) else None
    if not is_whole:
        return None
    first, *further = (
        Unit(
            unit_id,
            resource.name,
            resource.nic_kind,
            pci.address,
            HEALTHY,
            pci.numa_node,
            tuple(sorted(rdma.name for rdma in pci.rdma_devices)),
        )
        for pci in found
    )
    return replace(first, further=tuple(further))


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
