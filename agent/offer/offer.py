"""`Offer`: all units of the node at one moment, which every door to kubelet hands out; `Unit`, one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from agent.config import Resource
from agent.config.template import Place
from agent.model.device import NO_NUMA_NODE, Snapshot, is_pci_address
from agent.model.health import HEALTHY, Health
from agent.model.vf_identity import Rail, RailKey
from agent.offer.selection import Overlap
from agent.placement import Distances, Layout


@dataclass(frozen=True, slots=True)
class Unit:
    """What kubelet counts and hands out under one ID."""

    unit_id: str
    resource_name: str
    kind: str
    device: str
    """PCI address of the device behind the unit, or the GPU's UUID; empty for a slot that is not bound."""
    health: Health
    numa_node: int
    rdma_devices: tuple[str, ...] = ()
    """RDMA devices that come with the unit: the HCA itself, or those of the VF."""
    alternative: int = 0
    """Which alternative of the resource's selector took the device."""
    gpu: str = ""
    """A rail's GPU, by its UUID; `device` is its first NIC."""
    further: tuple[Unit, ...] = ()
    """A rail's other NICs, each as the unit that it would be by itself."""
    is_slot: bool = False
    """The device is chosen when the whole pod is known."""
    beside: str = field(default="", compare=False)
    """For a slot, a device of its NUMA node, to tell what is near to it."""

    @property
    def parts(self) -> tuple[Unit, ...]:
        """One unit for each device: itself, and a rail's other NICs."""
        return (self, *self.further)

    @property
    def devices(self) -> tuple[str, ...]:
        """All that it brings, but a rail's GPU; none for a slot that is not bound."""
        return tuple(part.device for part in self.parts if part.device)

    @property
    def place(self) -> str:
        """The device that stands where the unit is."""
        return self.device or self.beside

    @property
    def is_counted(self) -> bool:
        """Tell whether it stands for nothing but one more container, as in a pool that is shared as a whole."""
        return not self.device and not self.is_slot


@dataclass(frozen=True)
class Offer:
    """All units of the node at one moment, and the snapshot that they come from."""

    snapshot: Snapshot = field(default_factory=Snapshot)
    units: Mapping[str, tuple[Unit, ...]] = field(default_factory=dict)
    """Resource name → its units, as device plugins offer them to kubelet."""
    overlaps: tuple[Overlap, ...] = ()
    """Devices that a second resource selects too."""
    pools: Mapping[str, tuple[Unit, ...]] = field(default_factory=dict)
    """Late-bound resource → a unit for each device that its slots may get."""
    claimable: Mapping[str, tuple[Unit, ...]] = field(default_factory=dict)
    """Resource that claims are for (DRA) → a unit for each device; the shares of an HCA are one."""
    granted: Mapping[str, int] = field(default_factory=dict)
    """Claimable device → how many units of it pods still have from kubelet's device plugins."""
    lost: frozenset[str] = frozenset()
    """Claimable devices that are gone while a pod has them."""
    resources: Mapping[str, Resource] = field(default_factory=dict)
    """Resource name → what the configuration says of it."""
    rails: tuple[Rail, ...] = ()
    """The node's adapters to the fabric, numbered; with those that are away."""

    @cached_property
    def by_id(self) -> Mapping[str, Unit]:
        """Units by their ID, without those whose ID says nothing by itself."""
        return MappingProxyType({u.unit_id: u for mine in self.units.values() for u in mine if not u.is_counted})

    @cached_property
    def distances(self) -> Distances:
        """How near everything is."""
        return Distances(self.snapshot)

    @cached_property
    def layouts(self) -> Mapping[str, Layout]:
        """Resource name → where its units are."""
        found = {}
        for name, mine in self.units.items():
            devices = {u.unit_id: u.gpu or u.place for u in mine if not u.is_counted}
            resource = self.resources.get(name)
            spread, bonded = (resource.spread, resource.bonded) if resource is not None else (True, False)
            found[name] = Layout(self.distances, devices, spread=spread, bonded=bonded)
        return MappingProxyType(found)

    @cached_property
    def rail_keys(self) -> Mapping[str, RailKey]:
        """Adapter → the number of its rail, and which plane of it it is."""
        return MappingProxyType({rail.device: rail.key for rail in self.rails})

    @cached_property
    def rail_of(self) -> Mapping[str, int]:
        """Adapter → the number of its rail."""
        return MappingProxyType({rail.device: rail.number for rail in self.rails})

    @cached_property
    def plane_of(self) -> Mapping[str, int]:
        """Adapter → which plane of its rail it is; 0 where the rail has one."""
        return MappingProxyType({rail.device: rail.plane for rail in self.rails})

    def place(self, device: str, beside: Sequence[str] = ()) -> Place:
        """Tell where a device stands, by its PCI address, for templates of networks.

        `beside` are the NICs that came with the same GPU, if they are several: their rail is the least that one has.
        """
        facts = self.snapshot.by_address.get(device)
        if facts is None:
            return Place(adapter=device)
        adapter = self.snapshot.parent(facts) or facts
        rail = next((rail for rail in self.rails if rail.device == adapter.address), None)
        own = adapter.netdev.name if adapter.netdev is not None else ""
        numa_node = facts.numa_node if facts.numa_node != NO_NUMA_NODE else adapter.numa_node
        return Place(
            rail=self.rail_number(beside or (device,)),
            plane=rail.plane if rail is not None else None,
            pf=own or (rail.netdev if rail is not None else ""),
            numa=numa_node if numa_node != NO_NUMA_NODE else None,
            vf=facts.vf_index,
            adapter=adapter.address,
        )

    def rail_number(self, devices: Sequence[str]) -> int | None:
        """Tell the number of the rail that devices stand on, which are NICs of one GPU; None if none is on a rail."""
        found = (facts for device in devices if (facts := self.snapshot.by_address.get(device)) is not None)
        adapters = ((self.snapshot.parent(facts) or facts).address for facts in found)
        return min((self.rail_of[adapter] for adapter in adapters if adapter in self.rail_of), default=None)

    def find(self, resource_name: str, unit_id: str) -> Unit | None:
        """Find a unit of a resource."""
        unit = self.by_id.get(unit_id)
        if unit is not None:
            return unit if unit.resource_name == resource_name else None
        return _counted(self.units.get(resource_name, ()), unit_id)

    @cached_property
    def offered(self) -> Mapping[str, tuple[Unit, ...]]:
        """Every resource's units, whichever door offers it."""
        return MappingProxyType({**self.units, **self.claimable})

    @cached_property
    def network_devices(self) -> Mapping[str, str]:
        """The PCI devices that resources offer, as units, behind slots, as shares or to claims, with the resource.

        Slots bring none to those of their pools. A VF among the adapters of a pool that is shared as a whole is
        nobody's by that.
        """
        found: dict[str, str] = {}
        for name, mine in self._lists():
            if any(unit.is_counted for unit in mine):
                devices = {a for a in self._behind(mine) if not self.snapshot.by_address[a].is_vf}
            else:
                devices = {device for unit in mine for device in unit.devices if is_pci_address(device)}
            for device in devices:
                found.setdefault(device, name)
        return MappingProxyType(found)

    @cached_property
    def vfs(self) -> frozenset[str]:
        """The VFs behind all units, and those that slots may get: what is ours to put back."""
        units = (unit for _, mine in self._lists() for unit in mine if unit.kind in ("vf", "rail"))
        offered = {device for unit in units for device in unit.devices}
        return frozenset(a for a in offered if (pci := self.snapshot.by_address.get(a)) is not None and pci.is_vf)

    @cached_property
    def adapters(self) -> frozenset[tuple[str, str]]:
        """(Resource, adapter) for each adapter that a resource offers: itself, or its VFs."""
        found: set[tuple[str, str]] = set()
        for name, mine in self._lists():
            shared = any(unit.is_counted for unit in mine)
            addresses = self._behind(mine) if shared else {d for unit in mine for d in unit.devices}
            devices = (self.snapshot.by_address.get(address) for address in addresses)
            found |= {(name, device.physfn or device.address) for device in devices if device is not None}
        return frozenset(found)

    def adapters_of_pool(self, resource_name: str) -> frozenset[str]:
        """List the adapters of a pool each of whose units is all of them."""
        return frozenset(self._behind(self.units.get(resource_name, ())))

    def _lists(self) -> Iterator[tuple[str, Sequence[Unit]]]:
        yield from self.units.items()
        yield from self.pools.items()
        yield from self.claimable.items()

    def _behind(self, units: Sequence[Unit]) -> set[str]:
        rdma = {name for unit in units[:1] for name in unit.rdma_devices}
        return {d.address for d in self.snapshot.devices if any(r.name in rdma for r in d.rdma_devices)}


def _counted(units: Sequence[Unit], unit_id: str) -> Unit | None:
    """Find a unit of a pool that is shared as a whole. Their IDs are their numbers, the same for every pool."""
    number = int(unit_id) if unit_id.isascii() and unit_id.isdecimal() and len(unit_id) < 9 else -1
    unit = units[number] if 0 <= number < len(units) else None
    return unit if unit is not None and unit.unit_id == unit_id else None


Units = Mapping[str, Sequence[Unit]]
"""Resource name → its units, as offered at one moment."""


@dataclass(frozen=True, slots=True)
class HealthChange:
    """Units of one resource that became unhealthy for one reason, or healthy after it."""

    resource: str
    reason: str
    is_healthy: bool
    devices: tuple[str, ...]
    """One for each unit, so that units of one device name it again; the unit's ID for one without a device."""


def health_changes(before: Units, after: Units) -> Iterator[HealthChange]:
    """Tell which units became unhealthy, and then which healthy again: once for each resource and reason."""
    for resource, units in after.items():
        former = {unit.unit_id: unit.health for unit in before.get(resource, ())}
        changed: dict[tuple[bool, str], list[str]] = {}
        for unit in units:
            was = former.get(unit.unit_id, HEALTHY)
            if unit.health != was:
                told = unit.health.healthy, unit.health.reason or was.reason
                changed.setdefault(told, []).append(unit.device or unit.unit_id)
        for (is_healthy, reason), devices in sorted(changed.items(), key=lambda each: each[0][0]):
            yield HealthChange(resource, str(reason), is_healthy, tuple(devices))
