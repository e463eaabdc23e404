"""The CDI specs of granted units: what kubelet keeps of an Allocate answer are their names, and these stay true.

kubelet replays an answer for every later start of a container, also after a reboot, or when a driver was loaded anew
and the numbers of device files are others. So an answer names CDI devices of ours. What such a name means is written
when the unit is granted, and anew whenever that changes. A unit whose device is gone has no spec: the runtime then
creates no container, which is better than one with another's device.

The grant's row says what the spec does, and comes first.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from agent.config import Resource
from agent.edits.build import unit_specs
from agent.edits.cdi import SpecFiles, text_of
from agent.errors import UnitUnhealthy
from agent.kubelet.checkpoint import Entry, answer_of
from agent.ledger import Ledger
from agent.model.allocation import NO_SPECS, Devices, Grant, UnitSpec
from agent.model.device import PciDevice, Snapshot
from agent.model.health import HEALTHY
from agent.model.unit_id import UnitId, cdi_kind
from agent.offer.offer import Offer, Unit
from agent.offer.offers import differs_in_pods_only
from agent.state import Latest

_START = "unit-"
REBOUND_MODES = ("infiniband",)


class UnitSpecs:
    """One spec file for each granted unit that has a spec, `nodefabric-unit-<ID>.json`.

    Methods block, briefly, and may be called on many threads at once.
    """

    def __init__(self, ledger: Ledger, folder: Path, settled: Latest[bool]) -> None:
        """`settled` says whether the grants have agreed with kubelet's word since the start: the books may be new."""
        self._ledger = ledger
        self._files = SpecFiles(folder, _START, "this unit")
        self._settled = settled
        self._guard = threading.Lock()
        """Held while rows and files change together."""
        self._there: set[str] = set()
        """Units that were seen to have a spec, or given one."""
        self._gone_by: tuple[Snapshot, Sequence[Resource]] | None = None
        """What specs were compared with last."""
        self._compared: dict[str, tuple[tuple[str, ...], float]] = {}
        """Unit that was → the devices and time of its grant."""

    def grant(self, resource_name: str, units: Mapping[str, Devices], specs: Mapping[str, UnitSpec] = NO_SPECS) -> None:
        """Record a grant (unit ID → devices), then write the specs of its units.

        Raises LedgerError, and Unavailable if a spec cannot be written: the grant is on record then.
        """
        with self._guard:
            self._ledger.grant(resource_name, units, specs)
            self._write_all(specs)

    def add_facts(self, told: Mapping[str, Mapping[str, Any]]) -> None:
        """Put containerEdits beside those of granted units' devices, in place of what was told before.

        `told` maps unit IDs to them, as CDI has them (env, mounts …); what the device's own edits say may stand among
        them. It stays until the unit is granted anew, or its device has other files. A unit without a spec is passed
        over: its container gets what kubelet was answered. Raises LedgerError, and Unavailable if a spec cannot be
        written.
        """
        with self._guard:
            specs = {g.unit_id: g.spec for g in self._ledger.grants() if g.unit_id in told and g.spec is not None}
            self._say({i: replace(spec, told=_beside(told[i], spec.edits)) for i, spec in specs.items()})

    def say(self, specs: Mapping[str, UnitSpec]) -> None:
        """Put specs of granted units into their rows, then into the files. Raises LedgerError, and Unavailable."""
        with self._guard:
            self._say(specs)

    def adopt(self, entries: Sequence[Entry], offer: Offer, resources: Sequence[Resource]) -> None:
        """Give grants that came back into lost books their specs again. Raises LedgerError, and Unavailable.

        `entries` are kubelet's, of containers that were answered CDI names of ours. Slots are passed over: what they
        are bound to stands in another file (`agent.edits.cdi`), and with two of one name the runtime finds neither.
        """
        by_name = {resource.name: resource for resource in resources}
        with self._guard:
            grants = [g for g in self._ledger.grants() if g.spec is None]
            bare = {g.unit_id: g.devices for g in grants if not UnitId.parse(g.unit_id).is_slot}
            for entry in entries:
                mine = {i: bare[i] for i in entry.unit_ids if i in bare}
                if mine and entry.resource_name in by_name:
                    found = _of_container(by_name[entry.resource_name], sorted(entry.unit_ids), mine, offer)
                    self._say({i: found[i] for i in mine if i in found})

    def renew(self, offer: Offer, resources: Sequence[Resource]) -> Sequence[str]:
        """Have rows and specs say what the hardware of an offer is; list the units of which they said something else.

        Looks only at what has changed since the last offer; an older one than that is passed over.
        Raises LedgerError, and Unavailable if a spec cannot be written or removed.
        """
        by_name = {resource.name: resource for resource in resources}
        with self._guard:
            if not self._goes_by(offer.snapshot, resources):
                return ()
            grants = {g.unit_id: g for g in self._ledger.grants() if g.spec is not None}
            worked_out: dict[tuple[str, ...], Mapping[str, UnitSpec]] = {}
            news = {}
            for unit_id, grant in grants.items():
                if self._compared.get(unit_id) == (grant.devices, grant.granted_at):
                    continue
                now = self._now(grant, grants, by_name.get(grant.resource_name), offer, worked_out)
                if now != grant.spec:
                    news[unit_id] = now
            self._say(news)
            self._compared = {i: (grant.devices, grant.granted_at) for i, grant in grants.items()}
        return tuple(news)

    def rewrite(self) -> Sequence[str]:
        """Have the files say what the rows do: also those whose rows say nothing, and which a killed process has left.

        Lists the units of which they said something else. Raises Unavailable, LedgerError.
        """
        if not (wrong := self._wrong()):
            return []
        with self._guard:  # one that is just being granted has its row first
            wrong = self._wrong(wrong)
            self._write_all(wrong)
        return list(wrong)

    def _wrong(self, of: Collection[str] | None = None) -> Mapping[str, UnitSpec]:
        """Find the granted units of which files say something else, or are missing; among these, or all.

        All takes long on a full node. So nobody who wants a grant waits for that while there is nothing to do.
        """
        said = {
            g.unit_id: g.spec for g in self._ledger.grants() if g.spec is not None and (of is None or g.unit_id in of)
        }
        return {unit_id: spec for unit_id, spec in said.items() if not self._is_written(unit_id, spec)}

    def look(self) -> None:
        """See which units have a spec. What a killed process has half written is removed."""
        with self._guard:
            self._there = {name.removeprefix(_START) for name in self._files.names()}

    def tidy(self) -> Sequence[str]:
        """Remove the specs of units that are granted no more; list these units. Raises Unavailable and LedgerError."""
        if not self._settled.value:
            return ()
        with self._guard:
            over = sorted(self._there - {grant.unit_id for grant in self._ledger.grants()}) if self._there else []
            for unit_id in over:
                self._files.remove(_file(unit_id))
                self._there.discard(unit_id)
        return over

    # -------------------------------------------------------------------------------------------------- one spec

    def _say(self, specs: Mapping[str, UnitSpec]) -> None:
        """Put specs into the rows, then into the files. The caller holds the guard."""
        if specs:
            self._ledger.set_specs(specs)
        self._write_all(specs)

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

    def _write_all(self, specs: Mapping[str, UnitSpec]) -> None:
        """Have the files say this. First those go that say nothing: they may name another's device by now."""
        for unit_id in (unit_id for unit_id, spec in specs.items() if not spec.edits):
            self._files.remove(_file(unit_id))
            self._there.discard(unit_id)
        for unit_id, spec in specs.items():
            if spec.edits:
                self._there.add(unit_id)
                self._files.write(_file(unit_id), _text(unit_id, spec))

    def _is_written(self, unit_id: str, spec: UnitSpec) -> bool:
        """Whether a spec is there and says this, or is not where there is nothing to say."""
        if not spec.edits:
            return not self._files.is_there(_file(unit_id))
        return self._files.says(_file(unit_id), partial(_text, unit_id, spec), spec)

    def _now(
        self,
        grant: Grant,
        grants: Mapping[str, Grant],
        resource: Resource | None,
        offer: Offer,
        worked_out: dict[tuple[str, ...], Mapping[str, UnitSpec]],
    ) -> UnitSpec:
        """Tell what a unit's spec is to say now. `worked_out` is what was found of the same container's other units."""
        spec = grant.spec
        assert spec is not None
        if resource is None or resource.kind != spec.kind or resource.compat is not None:
            # Nobody knows any more what its container is to get, but what it must not.
            paths = (node.get("hostPath", node["path"]) for node in spec.edits.get("deviceNodes", ()))
            is_wrong = stranger(paths, grant.devices, owners(offer.snapshot)) is not None
            return replace(spec, edits={}, told={}, nodes={}) if is_wrong else spec
        came = [device for device in grant.devices if self._has_come_by_add(device)]
        if grant.devices and len(came) == len(grant.devices):
            return spec
        if spec.beside not in worked_out:
            devices = {i: grants[i].devices for i in spec.beside if i in grants}
            worked_out[spec.beside] = _of_container(resource, spec.beside, devices, offer)
        found = worked_out[spec.beside].get(grant.unit_id)
        if found is None:
            return replace(spec, edits={}, told={}, nodes={})
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
) -> Mapping[str, UnitSpec]:
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


def _beside(told: Mapping[str, Any], edits: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave out of what is told what the device's own edits say."""
    left = {key: [each for each in listed if each not in edits.get(key, ())] for key, listed in told.items()}
    return {key: listed for key, listed in left.items() if listed}


def _file(unit_id: str) -> str:
    return f"{_START}{unit_id}"


def _text(unit_id: str, spec: UnitSpec) -> str:
    return text_of(cdi_kind(spec.kind), [(unit_id, spec.whole)])


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
