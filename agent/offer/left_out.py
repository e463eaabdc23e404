"""Why a device of the node is not offered: one reason for each, from a closed list, with what to do. Pure.

Nobody waits for it: it is worked out when somebody looks, never while a pod starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from agent.config import Resource, Select
from agent.config.contradictions import selectors_of
from agent.model.device import Gpu, PciDevice, Snapshot, is_accelerator
from agent.model.health import Health
from agent.model.printable import adapter_name, grouped, numbered, some
from agent.offer.offer import Offer
from agent.offer.selection import (
    ACCELERATOR_CLASS,
    Candidate,
    Why,
    candidate_of,
    considered,
    kinds_of,
    refusing,
    takes_vfs_of,
)

NO_KINDS: frozenset[str] = frozenset()
_RANK = {why: number for number, why in enumerate(Why)}


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Devices that are left out for one reason."""

    resource: str
    """Which resource leaves them out; empty where none is of a kind for them."""
    why: Why
    detail: str
    """What the reason's sentence names."""
    devices: tuple[str, ...]
    """PCI addresses; the UUID of a GPU whose PCI function was not seen."""
    what: str
    """The devices in short: `8 adapters (ens1f0np0, ens2f0np0 and 6 more)`."""

    @property
    def text(self) -> str:
        """The reason's sentence, without the devices."""
        return self.why.text.format(self.detail)

    def __str__(self) -> str:
        return f"{self.what}: {self.text}: {self.why.remedy}"

    def document(self) -> dict[str, object]:
        """Give it as values that JSON can carry."""
        told = {"resource": self.resource, "reason": str(self.why), "devices": list(self.devices), "what": self.what}
        return {**told, "text": self.text, "remedy": self.why.remedy}


Reason = tuple[Why, str]
_Groups = dict[tuple[str, Why, str, str], list["_Device"]]


@dataclass(frozen=True, slots=True)
class _Device:
    """An adapter, VF or accelerator of the node."""

    key: str
    """PCI address; the UUID of a GPU whose PCI function was not seen."""
    noun: str
    kinds: frozenset[str]
    """Kinds of a resource that it may be for."""
    pci: PciDevice | None
    gpu: Gpu | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All that units may call it by."""
        if self.gpu is None:
            return (self.key,)
        return (self.key, self.gpu.uuid, *(part.uuid for part in self.gpu.mig_devices))


def left_out(resources: Sequence[Resource], offer: Offer) -> tuple[LeftOut, ...]:
    """Give each device of the node that no resource offers its one reason: of the resource that is nearest to it."""
    devices, by_resource = _reasons(resources, offer)
    offered = {adapter for _, adapter in offer.adapters}  # a PF is offered with its VFs
    nearest: dict[str, tuple[str, Reason]] = {}
    for device in devices:
        reasons = [(name, reasons[device.key]) for name, reasons in by_resource.items()]
        told = [(name, reason) for name, reason in reasons if reason is not None]
        if len(told) == len(reasons):
            nearest[device.key] = min(
                told, key=lambda each: _RANK[each[1][0]], default=("", _of_another_kind(device, NO_KINDS))
            )
    found: _Groups = {}
    for device in devices:
        if device.key not in nearest:
            continue
        name, (why, detail) = nearest[device.key]
        if why is Why.OTHER_KIND and device.pci is not None:  # an adapter is left out as its VFs are
            name, (why, detail) = _of_vfs(device.pci, nearest) or (name, (why, detail))
        if device.key not in offered or why is Why.UNHEALTHY:
            found.setdefault(("" if _is_far(why) else name, why, detail, device.noun), []).append(device)
    return _listed(found, offer.snapshot)


def _of_vfs(device: PciDevice, nearest: Mapping[str, tuple[str, Reason]]) -> tuple[str, Reason] | None:
    told = (nearest[vf] for vf in device.vfs if vf in nearest)
    return next((each for each in told if each[1][0] is not Why.OTHER_KIND), None)


def left_out_by(resources: Sequence[Resource], offer: Offer) -> Mapping[str, tuple[LeftOut, ...]]:
    """Give, for each resource, each device that it does not offer its one reason there."""
    devices, by_resource = _reasons(resources, offer)
    made = {}
    for name, reasons in by_resource.items():
        found: _Groups = {}
        for device in devices:
            reason = reasons[device.key]
            vfs_are_here = reason == (Why.HAS_VFS, "") and (name, device.key) in offer.adapters
            if reason is not None and not vfs_are_here:
                found.setdefault((name, *reason, device.noun), []).append(device)
        made[name] = _listed(found, offer.snapshot)
    return made


def _is_far(why: Why) -> bool:
    """Tell whether a reason is about no resource in particular."""
    return why in (Why.OTHER_KIND, Why.NOT_IN_NVML, Why.NOT_HANDED_OUT)


def _listed(found: _Groups, snapshot: Snapshot) -> tuple[LeftOut, ...]:
    made = (
        LeftOut(
            "" if _is_far(why) else name,
            why,
            detail,
            tuple(device.key for device in devices),
            _in_short(noun, devices, snapshot),
        )
        for (name, why, detail, noun), devices in found.items()
    )
    return tuple(sorted(made, key=lambda each: _RANK[each.why]))


def _in_short(noun: str, devices: Sequence[_Device], snapshot: Snapshot) -> str:
    if noun == "VF":
        names = grouped([device.key for device in devices], snapshot)
    elif noun == "GPU":
        names = numbered("GPU", [device.gpu.index for device in devices if device.gpu is not None])
    else:
        names = some([adapter_name(device.pci) for device in devices])
    return f"{len(devices)} {noun}{'' if len(devices) == 1 else 's'} ({names})"


# --------------------------------------------------------------------------------------------------------- decisions


def _devices(snapshot: Snapshot) -> Iterator[_Device]:
    """List the node's adapters, VFs and accelerators."""
    gpus = {gpu.pci_address: gpu for gpu in snapshot.all_gpus}
    for pci in snapshot.devices:
        gpu = gpus.pop(pci.address, None)
        if gpu is not None or is_accelerator(pci) or pci.pci_class >> 16 == ACCELERATOR_CLASS:
            kinds = {"gpu"} if gpu in snapshot.gpus else set()
            kinds |= {"accelerator"} if pci.pci_class >> 16 == ACCELERATOR_CLASS else set()
            noun = "GPU" if gpu is not None else "accelerator"
            yield _Device(pci.address, noun, frozenset(kinds), pci, gpu)
        elif pci.is_vf:
            yield _Device(pci.address, "VF", frozenset({"vf"}), pci)
        elif pci.netdevs or pci.rdma_devices or pci.is_network:
            yield _Device(pci.address, "adapter", frozenset({"nic", "hca"}), pci)
    for gpu in gpus.values():
        yield _Device(gpu.uuid, "GPU", frozenset({"gpu"} if gpu in snapshot.gpus else ()), None, gpu)


def _reasons(
    resources: Sequence[Resource], offer: Offer
) -> tuple[tuple[_Device, ...], Mapping[str, Mapping[str, Reason | None]]]:
    """List the devices; and for each resource, by device, why it is left out there: None where it is offered."""
    devices = tuple(_devices(offer.snapshot))
    healths = {name: _healths(name, offer) for name in offer.offered}
    owners = {device: name for name, mine in healths.items() for device in mine}
    found: dict[str, Mapping[str, Reason | None]] = {}
    for resource in resources:
        if resource.derived_from:
            continue  # the resource that it comes from says why devices are left out
        mine = healths.get(resource.name, {})
        halves = [_Half(resource, *each, offer.snapshot) for each in selectors_of(resource)]
        reasons: dict[str, Reason | None] = {}
        for device in devices:
            health = next((mine[name] for name in device.names if name in mine), None)
            if health is None:
                reasons[device.key] = _why(resource, halves, device, owners, bool(offer.snapshot.gpus))
            else:
                reasons[device.key] = None if health.healthy else (Why.UNHEALTHY, health.reason)
        if (Why.NO_NIC, "") in reasons.values():
            few: Reason = Why.TOO_FEW, ""
            reasons = {key: few if each == (Why.NO_GPU, "") else each for key, each in reasons.items()}
        found[resource.name] = reasons
    return devices, found


def _healths(resource_name: str, offer: Offer) -> Mapping[str, Health]:
    """Map what a resource offers to how it is: PCI functions, GPUs, slices of GPUs. One healthy unit will do."""
    units = offer.pools.get(resource_name) or offer.offered[resource_name]
    found: dict[str, Health] = {}
    for unit in units[:1] if units and units[0].is_counted else units:
        devices = offer.adapters_of_pool(resource_name) if unit.is_counted else (*unit.devices, unit.gpu)
        for device in filter(None, devices):
            if device not in found or unit.health.healthy:
                found[device] = unit.health
    return found


def _why(
    resource: Resource, halves: Sequence[_Half], device: _Device, owners: dict[str, str], has_gpus: bool
) -> Reason:
    """Say why a resource does not offer a device. `owners` learns what it has all the same: later ones cannot."""
    why, detail = min((half.why(device) for half in halves), key=lambda reason: _RANK[reason[0]])
    if why is not Why.NOT_YET:
        return why, detail
    owner = next((owners[name] for name in device.names if name in owners), resource.name)
    owners.setdefault(device.key, resource.name)
    if device.gpu is not None and device.gpu.mig_mode and resource.mig != "none":
        return Why.SLICED, ""
    if owner != resource.name:
        return Why.TAKEN, owner
    if resource.kind == "rail" and not has_gpus:
        return Why.NO_GPU_HERE, ""
    if resource.kind == "rail":
        return (Why.NO_NIC if device.gpu is not None else Why.NO_GPU), ""
    return why, detail


class _Half:
    """A selector of a resource, asked for many devices; a resource of rails has two."""

    def __init__(self, resource: Resource, path: str, kind: str, select: Select, snapshot: Snapshot) -> None:
        self._path, self._select, self._snapshot = path, select, snapshot
        self._kinds = frozenset(kinds_of(resource, kind))
        self._asked: dict[str, list[tuple[Candidate, Why | None]]] = {}
        for _, candidate, why in considered(resource, kind, snapshot):
            self._asked.setdefault(candidate.device, []).append((candidate, why))

    def why(self, device: _Device) -> Reason:
        """Say why the selector does not take a device; NOT_YET if it does."""
        asked = next((self._asked[name] for name in device.names if name in self._asked), [])
        able = [candidate for candidate, why in asked if why is None]
        kept_back = next((why for _, why in asked if why is not None), Why.NOT_YET)
        if not able and self._kinds.isdisjoint(device.kinds):
            return self._without_vfs(device) or _of_another_kind(device, self._kinds)
        if not able and kept_back in (Why.HOST_PORT, Why.DEFAULT_ROUTE):
            return kept_back, ""  # whatever the selector asks for: the host keeps it
        refused = [refusing(self._select, candidate) for candidate in able or [candidate for candidate, _ in asked]]
        if all(refused):
            return self._not_selected(device.pci, refused[0])
        return Why.NOT_YET if able else kept_back, ""

    def _without_vfs(self, device: _Device) -> Reason | None:
        """Say why an adapter has no VFs that the selector would take; None if it would not take them."""
        pci = device.pci
        if "vf" not in self._kinds or device.noun != "adapter" or pci is None or pci.vfs:
            return None
        if not takes_vfs_of(self._select, candidate_of(pci, self._snapshot)):
            return None
        if pci.is_pf:
            return Why.NO_VFS, ""
        return (Why.DEFAULT_ROUTE if self._snapshot.is_needed(pci) else Why.NO_SRIOV), ""

    def _not_selected(self, device: PciDevice | None, fields: Sequence[str]) -> Reason:
        if device is not None and not device.driver and set(fields) <= {"drivers", "isRdma"}:
            return Why.NO_DRIVER, ""
        if device is not None and not device.rdma_devices and fields == ("isRdma",):
            return Why.NO_RDMA, ""
        return Why.NOT_SELECTED, " and ".join(f"{self._path}.{field}" if field else self._path for field in fields)


def _of_another_kind(device: _Device, asked: frozenset[str]) -> Reason:
    """Say why a resource of the kinds that are asked for, or no resource at all, has nothing to do with a device."""
    if device.noun == "GPU" or not device.kinds:
        unseen = "gpu" in asked and "gpu" not in device.kinds
        return Why.NOT_IN_NVML if unseen else Why.NOT_HANDED_OUT, ""
    kinds = device.kinds
    if device.noun == "adapter" and device.pci is not None:
        kinds = frozenset({"vf" if device.pci.vfs else "nic"} | ({"hca"} if device.pci.rdma_devices else set()))
    return Why.OTHER_KIND, " or ".join(sorted(kinds))
