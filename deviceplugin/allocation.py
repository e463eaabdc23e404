"""Allocate and GetPreferredAllocation, answered from memory and written into the ledger.

Holds the newest offer. kubelet's admission of the whole node waits for these answers, so nothing
here asks the kernel or a peer, and the wait for the ledger is bounded.

An Allocate error fails the pod for good. It is for what can never work: an ID that is not offered,
a device withheld because its clean-up is in doubt, a device without the files a container needs,
and a ledger that cannot be written (a grant that is not on record would be handed out twice after
a restart). A link that happens to be down is none of these: it may be up when the pod starts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Protocol

from agent import workers
from agent.clients.kubelet import PodDevices
from agent.config import Resource
from agent.errors import LedgerError, UnitUnhealthy, UnknownUnit
from agent.model.device import Snapshot
from agent.model.health import HEALTHY
from agent.model.slots import is_slot_of, numa_node_of
from agent.placement import Layout, Option, Terrain
from deviceplugin.assignment import Overlap
from deviceplugin.compat_units import counted_unit, is_counted
from deviceplugin.gpu_response import NO_GPU_FILES, GpuFiles
from deviceplugin.grants import Grants
from deviceplugin.preference import Preference
from deviceplugin.resources import Unit, network_devices
from deviceplugin.response import build

LEDGER_SECONDS = 5.0

log = logging.getLogger(__name__)


class GrantBook(Protocol):
    """The part of the ledger that grants need."""

    def grant(self, resource_name: str, units: Mapping[str, str]) -> None:
        """Record that kubelet was given these units (unit ID → device). Blocks; raises LedgerError."""


@dataclass(frozen=True)
class Offer:
    """All units of the node at one moment, and the snapshot that they come from."""

    snapshot: Snapshot = field(default_factory=Snapshot)
    units: Mapping[str, tuple[Unit, ...]] = field(default_factory=dict)
    """Resource name → its units."""
    gpu_files: GpuFiles = NO_GPU_FILES
    overlaps: tuple[Overlap, ...] = ()
    """Devices that a second resource selects too."""
    pools: Mapping[str, tuple[Unit, ...]] = field(default_factory=dict)
    """Late-bound resource → a unit for each device that its slots may get."""
    by_id: Mapping[str, Unit] = field(init=False, compare=False)
    """Units by their ID, without those whose ID says nothing by itself."""
    layouts: Mapping[str, Layout] = field(init=False, compare=False)
    """Resource name → where its units are."""
    terrain: Terrain = field(init=False, compare=False)
    """How near everything is."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "terrain", Terrain(self.snapshot))
        object.__setattr__(self, "by_id", _by_id(self.units))
        layouts = {name: _layout(self.terrain, units) for name, units in self.units.items()}
        object.__setattr__(self, "layouts", MappingProxyType(layouts))

    def with_snapshot(self, snapshot: Snapshot) -> Offer:
        """Return the same offer with a newer snapshot, in which all that is offered is where it was."""
        made = copy(self)
        object.__setattr__(made, "snapshot", snapshot)
        return made

    def with_slots(self, slots: Mapping[str, tuple[Unit, ...]]) -> Offer:
        """Return the same offer with other slots of some resources. Only new names ask for another layout."""
        made = copy(self)
        object.__setattr__(made, "units", MappingProxyType({**self.units, **slots}))
        object.__setattr__(made, "by_id", _by_id(made.units))
        changed = {
            name: _layout(self.terrain, units)
            for name, units in slots.items()
            if {unit.unit_id for unit in units} != self.layouts[name].rank.keys()
        }
        object.__setattr__(made, "layouts", MappingProxyType({**self.layouts, **changed}))
        return made

    @cached_property
    def network_devices(self) -> Mapping[str, str]:
        """The PCI devices that resources offer, with the resource's name. Slots bring none to those of their pools."""
        return network_devices(self.units, self.pools, self.snapshot)

    def find(self, resource_name: str, unit_id: str) -> Unit | None:
        """Find a unit of a resource."""
        unit = self.by_id.get(unit_id)
        if unit is not None:
            return unit if unit.resource_name == resource_name else None
        return counted_unit(self.units.get(resource_name, ()), unit_id)


def _by_id(units: Mapping[str, Sequence[Unit]]) -> Mapping[str, Unit]:
    return MappingProxyType({u.unit_id: u for mine in units.values() for u in mine if not is_counted(u)})


def _layout(terrain: Terrain, units: Sequence[Unit]) -> Layout:
    return Layout(terrain, (Option(u.unit_id, u.gpu or u.place) for u in units if not is_counted(u)))


def _nobody_known(_unit_id: str) -> bool:
    return False


class Allocator:
    """Answers for all resources of the node, so that what is granted last can draw its partner near."""

    def __init__(
        self,
        resources: Sequence[Resource],
        book: GrantBook,
        clock: Callable[[], float] = time.monotonic,
        has_pod: Callable[[str], bool] = _nobody_known,
    ) -> None:
        """`has_pod` tells whether it is known which pod a unit was granted to. Answered from memory."""
        self.offer = Offer()
        """The newest offer. Replace it to change what is granted."""
        self.resources = {resource.name: resource for resource in resources}
        """By name. Replace them together with the offer."""
        self.verbs_nodes: dict[str, str] = {}
        """Device → its verbs node in the last answer about it. An answer stays with its pod, whatever becomes of the
        number; those of an earlier process are not known."""
        self._book = book
        self._preference = Preference(clock, has_pod)
        # A thread of its own: the loop's common pool may be full of slow scans.
        self._thread = workers.started(1, "grant")

    def close(self) -> None:
        """Take no more grants."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def allocate(self, resource_name: str, containers: Sequence[Sequence[str]]) -> tuple[Grants, ...]:
        """Grant units to containers: check all, record all, answer.

        A unit that is granted already is granted again: to the main container after an init
        container, or to a new pod before the old one's DEL.
        Raises UnknownUnit, UnitUnhealthy or LedgerError; nothing is granted then.
        """
        offer = self.offer
        resource = self.resources.get(resource_name)
        if resource is None:
            raise UnknownUnit(f"{resource_name} is not configured any more: recreate the pod")
        # As ADD numbers net1, net2 …, so that PCIDEVICE_* and its like name them in the same order.
        wanted = [[self._unit(offer, resource_name, i) for i in sorted(set(ids))] for ids in containers]
        answers = tuple(build(resource, units, offer.snapshot, offer.gpu_files) for units in wanted)
        # A slot's new life begins without a device, whatever its former pod had.
        listed = [unit for units in wanted for unit in units if not is_counted(unit)]
        granted = {unit.unit_id: "" if unit.is_slot else unit.device for unit in listed}
        if granted:
            await self._record(resource_name, granted)
            for units, answer in zip(wanted, answers, strict=True):
                self._note_nodes(units, answer, offer.snapshot)
            self._preference.granted(resource, listed)
        return answers

    def prefer(
        self, resource_name: str, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> tuple[str, ...]:
        """Say which of the available units a container should get. Never fails."""
        return self._preference.prefer(self.offer, self.resources, resource_name, available, must_include, size)

    def heard(self, pods: Sequence[PodDevices], asked_at: float) -> None:
        """Take in what kubelet's PodResources told when they were asked at a time of the clock."""
        self._preference.heard(pods, self.resources, asked_at)

    def _unit(self, offer: Offer, resource_name: str, unit_id: str) -> Unit:
        unit = offer.find(resource_name, unit_id)
        resource = self.resources[resource_name]
        if resource.binding == "late" and is_slot_of(resource_name, unit_id):
            # One that has just left the list will do: kubelet may not have heard, and the device is chosen later.
            return unit or Unit(unit_id, resource_name, resource.kind, "", HEALTHY, numa_node_of(unit_id), is_slot=True)
        if unit is None:
            count = len(offer.units.get(resource_name, ()))
            raise UnknownUnit(
                f"{unit_id} is not among the {count} units that {resource_name} offers now:"
                " its device is gone, or the configuration has changed; recreate the pod"
            )
        if unit.health.reason == "Quarantined":
            raise UnitUnhealthy(
                f"unit {unit_id} of {resource_name}: {unit.device} is withheld, because what its last pod left"
                " behind is not cleaned up yet; recreate the pod"
            )
        return unit

    def _note_nodes(self, units: Sequence[Unit], answer: Grants, snapshot: Snapshot) -> None:
        told = {node.path for node in answer.devices}
        for unit in units:
            self.verbs_nodes.pop(unit.device, None)
            device = snapshot.by_address.get(unit.device)
            nodes = [c.path for r in device.rdma_devices for c in r.char_device("uverbs")] if device is not None else []
            if len(nodes) == 1 and nodes[0] in told:
                self.verbs_nodes[unit.device] = nodes[0]

    async def _record(self, resource_name: str, granted: Mapping[str, str]) -> None:
        loop = asyncio.get_running_loop()
        write = loop.run_in_executor(self._thread, self._book.grant, resource_name, granted)
        try:
            async with asyncio.timeout(LEDGER_SECONDS):
                await write
        except TimeoutError as error:
            raise LedgerError(
                f"the ledger did not take the grant of {len(granted)} units of {resource_name} within"
                f" {LEDGER_SECONDS:g} s: its disk is stuck or overloaded"
            ) from error
