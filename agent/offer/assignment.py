"""Which resource each device of the node belongs to: a physical device serves one.

Pure. The first resource of the configuration that selects a device has it, and every later one that selects it too is
an overlap. A device that a pod holds stays with the resource that it was handed out under, whatever the selectors say
now: kubelet counts it there, and under another name would give it away a second time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from agent.config import Resource, Select, SharedPool
from agent.config.contradictions import selectors_of
from agent.config.resources import NETWORK_KINDS
from agent.errors import ConfigError
from agent.model.device import Snapshot
from agent.model.printable import grouped
from agent.offer.selectors import NO_NAMES, Candidate, choosing, offered_candidates

EXCLUSIVE_KINDS = frozenset({"vf", "nic", "gpu", "accelerator"})
NOBODY: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Taken:
    """A device that a resource has."""

    kind: str
    """What it is: of a rail, gpu for one half and the kind of its NIC for the other."""
    candidate: Candidate
    alternative: int = 0
    """Which of the selector's alternatives took it."""
    held_for: str = ""
    """A resource that is no more, under whose name a pod still holds it: it must not be handed out yet."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """A device that two resources select."""

    device: str
    """As people call it: PCI address and RDMA device, or UUID; or several in short."""
    owner: str
    """Name of the resource that has it."""
    loser: str
    """Name of the resource that selects it too."""

    def __str__(self) -> str:
        return (
            f"{self.loser} selects {self.device}, which {self.owner} has already: a device serves one resource, so"
            " narrow one of the two selectors"
        )


@dataclass(frozen=True, slots=True)
class Assignment:
    taken: Mapping[str, tuple[Taken, ...]] = field(default_factory=dict)
    """Resource name → its devices, in the order of the snapshot."""
    overlaps: tuple[Overlap, ...] = ()

    @property
    def adapters(self) -> frozenset[str]:
        """The network adapters that resources take, each as itself or by its VFs."""
        found = (t.candidate.pci for mine in self.taken.values() for t in mine if t.kind in NETWORK_KINDS)
        return frozenset(pci.physfn or pci.address for pci in found if pci is not None)


def assign(
    resources: Sequence[Resource],
    snapshot: Snapshot,
    host_names: Mapping[str, str] = NO_NAMES,
    holders: Mapping[str, str] = NOBODY,
) -> Assignment:
    """Give each device to one resource.

    `host_names` tells the interface names, in the host, of devices that now sit in pods; `holders` the names of the
    resources that devices in pods were handed out under.
    """
    names = {resource.name for resource in resources}
    owners: dict[str, Resource] = {}
    taken: dict[str, list[Taken]] = {resource.name: [] for resource in resources}
    overlaps: list[Overlap] = []
    for resource in resources:
        for kind, candidate, number in _wanted(resource, snapshot, host_names, holders):
            holder = holders.get(candidate.device, "") if kind in EXCLUSIVE_KINDS else ""
            if holder in names and holder != resource.name:
                continue
            owner = next((owners[part] for part in sorted(candidate.parts) if part in owners), None)
            if owner is None or (_shares_all(owner) and _shares_all(resource)):
                owners.update(dict.fromkeys(candidate.parts, resource))
                held_for = holder if holder != resource.name else ""
                taken[resource.name].append(Taken(kind, candidate, number, held_for))
            elif owner is not resource:
                overlaps.append(Overlap(candidate.label, owner.name, resource.name))
    return Assignment(MappingProxyType({name: tuple(found) for name, found in taken.items()}), tuple(overlaps))


def check_overlaps(resources: Sequence[Resource], snapshot: Snapshot, source: str) -> None:
    """Refuse a configuration in which two resources select one device.

    An HCA and the VFs of the same port are different devices. Raises ConfigError that names the
    device and both resources. Pools of other projects' configurations follow their rule, first come first served.
    """
    numbers = {resource.name: i for i, resource in enumerate(resources)}
    problems = [
        f"resources[{numbers[o.loser]}].select: {o.loser} takes {o.device}, which resources[{numbers[o.owner]}]"
        f" ({o.owner}) takes too: narrow one of the two selectors"
        for o in in_short(errors(resources, assign(resources, snapshot).overlaps), snapshot)
    ]
    if problems:
        raise ConfigError(source, problems)


def errors(resources: Sequence[Resource], overlaps: Sequence[Overlap]) -> tuple[Overlap, ...]:
    """Pick the overlaps that are mistakes: among the pools of another project's configuration they are its custom."""
    strict = {resource.name for resource in resources if resource.compat is None}
    return tuple(overlap for overlap in overlaps if overlap.loser in strict or overlap.owner in strict)


def in_short(overlaps: Sequence[Overlap], snapshot: Snapshot) -> tuple[Overlap, ...]:
    """Join the overlaps of each two resources into one that names all the devices in short."""
    devices: dict[tuple[str, str], list[str]] = {}
    for each in overlaps:
        devices.setdefault((each.owner, each.loser), []).append(each.device)
    return tuple(Overlap(grouped(found, snapshot), *pair) for pair, found in devices.items())


def _wanted(
    resource: Resource, snapshot: Snapshot, host_names: Mapping[str, str], holders: Mapping[str, str]
) -> Iterator[tuple[str, Candidate, int]]:
    """List what the selectors take, and what pods hold under the resource's name."""
    asked, choose = None, None
    for kind, candidate, select in offered(resource, snapshot, host_names):
        if choose is None or select is not asked:
            asked, choose = select, choosing(select)
        number = choose(candidate)
        if number is None and kind in EXCLUSIVE_KINDS and holders.get(candidate.device) == resource.name:
            number = 0
        if number is not None:
            yield kind, candidate, number


def offered(
    resource: Resource, snapshot: Snapshot, host_names: Mapping[str, str] = NO_NAMES
) -> Iterator[tuple[str, Candidate, Select]]:
    """List what a resource could take, with its kind and the selector that decides."""
    if resource.derived_from:
        return  # it has its devices from another
    for _, wanted, select in selectors_of(resource):
        for kind, candidate in offered_candidates(resource, wanted, snapshot, host_names):
            yield kind, candidate, select


def _shares_all(resource: Resource) -> bool:
    return isinstance(resource.compat, SharedPool)
