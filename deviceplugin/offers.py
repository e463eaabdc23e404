"""When a new offer is due, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from agent.config import Resource
from agent.health import HealthBook
from agent.model.device import Snapshot
from agent.model.gpu_ids import RAIL_PREFIX
from agent.model.health import unhealthy
from agent.model.reasons import Reason
from deviceplugin.allocation import Offer
from deviceplugin.assignment import NOBODY, Assignment, assign
from deviceplugin.books import Reading, owners_of, strays_of
from deviceplugin.gpu_response import GpuFiles
from deviceplugin.missing import NOBODY_MISSED, miss
from deviceplugin.resources import list_all
from deviceplugin.selectors import asks_for_names
from deviceplugin.slots import NOTHING_HELD, Holdings, list_slots
from deviceplugin.unit import Unit


class Offers:
    """Makes offers one after the other. Not for two threads at once."""

    def __init__(self, health: HealthBook, clock: Callable[[], float]) -> None:
        self._health = health
        self._clock = clock
        self._resources: tuple[Resource, ...] = ()
        self._ground: tuple[object, ...] = ()
        """What the last assignment was made of."""
        self._look: tuple[object, ...] = ()
        """What else the last offer was made of."""
        self._natural = Assignment()
        """Which resource has each device by the selectors alone."""
        self._owners: Mapping[str, str] = NOBODY
        self._units: Mapping[str, tuple[Unit, ...]] = {}
        self._missing = NOBODY_MISSED
        self._held: Mapping[str, str] = NOBODY
        self._slots = NOTHING_HELD
        self._made_of: Snapshot | None = None
        """What the last lists were made of."""
        self._offer: Offer | None = None

    def make(
        self, resources: tuple[Resource, ...], snapshot: Snapshot, gpu_files: GpuFiles, books: Reading
    ) -> Offer | None:
        """Make an offer, if anything that bears on it has changed since the last one; else None."""
        bearing = self._bearing(resources, snapshot)
        ground = (id(bearing), resources, gpu_files, replace(books, held=NOTHING_HELD))
        if ground != self._ground:
            self._natural = assign(resources, snapshot, books.host_names)
            self._owners = owners_of(self._natural, resources, snapshot)
        strays, now = strays_of(books, self._owners, resources), self._clock()
        lost = frozenset(rail for rail in books.kept if rail.removeprefix(RAIL_PREFIX) not in snapshot.gpu_by_uuid)
        look = (strays, self._health.turn(), self._missing.devices & books.holders.keys(), lost)
        due = self._missing.due(books.holders, self._health.settings.gone_seconds)
        if (ground, look) == (self._ground, self._look) and (due is None or now < due):
            if books.held == self._slots:
                return self._renewed(snapshot)
            self._slots = books.held
            return self._with_slots(resources, snapshot, books.held)
        if self._resources != resources:
            # What a resource lost because it selects something else now is not missed.
            same = {resource.name for resource in resources if resource in self._resources}
            self._units = {name: units for name, units in self._units.items() if name in same}
            self._resources = resources
        # By the snapshot that is kept: another could come to stand where one stood that nobody keeps.
        self._ground = (id(snapshot), *ground[1:])
        self._look, self._held, self._slots = look, books.holders, books.held
        final = assign(resources, snapshot, books.host_names, strays) if strays else self._natural
        terms = self._health.terms()
        listed = list_all(
            *(resources, final, snapshot, books.quarantined, books.held, terms, books.kept, strays, books.rulers)
        )
        kept = self._health.settings.gone_seconds
        self._missing = miss(
            resources, self._units, listed.units, self._missing, snapshot, books.holders.keys(), now, kept
        )
        self._units = {name: (*units, *self._missing.units.get(name, ())) for name, units in listed.units.items()}
        self._made_of = snapshot
        units = _withheld(self._units, self._health.withheld)
        self._offer = Offer(snapshot, units, gpu_files, overlaps=final.overlaps, pools=listed.pools)
        return self._offer

    def withdraw(self) -> None:
        """Take note that the last offer was not made known: the next one is due in any case."""
        self._ground = ()

    def _bearing(self, resources: tuple[Resource, ...], snapshot: Snapshot) -> Snapshot:
        """Return the snapshot that the lists were made of, if another makes the same."""
        made_of = self._made_of
        if made_of is None or (not any(map(asks_for_names, resources)) and differs_in_pods_only(made_of, snapshot)):
            return made_of or snapshot
        return snapshot

    def _renewed(self, snapshot: Snapshot) -> Offer | None:
        """Return the last offer with a newer snapshot, which answers to kubelet are made of; None if it has it."""
        if self._offer is None or self._offer.snapshot is snapshot:
            return None
        self._offer = self._offer.with_snapshot(snapshot)
        return self._offer

    def _with_slots(self, resources: tuple[Resource, ...], snapshot: Snapshot, held: Holdings) -> Offer | None:
        """Return the last offer with the slots as they are used now: each pod that comes or goes asks for that."""
        assert self._offer is not None
        late = [resource for resource in resources if resource.binding == "late"]
        slots = {r.name: list_slots(r, self._offer.pools[r.name], held) for r in late}
        self._units = {**self._units, **slots}
        self._offer = self._offer.with_snapshot(snapshot).with_slots(_withheld(slots, self._health.withheld))
        return self._offer

    def seconds_to_look(self) -> float | None:
        """Tell in how many seconds another offer is due though nothing happens; None if never."""
        due = self._missing.due(self._held, self._health.settings.gone_seconds)
        waits = (self._health.seconds_to_look(), None if due is None else max(0.0, due - self._clock()))
        return min((seconds for seconds in waits if seconds is not None), default=None)


def _withheld(units: Mapping[str, tuple[Unit, ...]], reason: Reason | None) -> Mapping[str, tuple[Unit, ...]]:
    """Make all units unhealthy, if there is a reason: a pod that kubelet sends here then would fail for good."""
    if reason is None:
        return units
    health = unhealthy(reason)
    return {
        name: tuple(replace(unit, health=health) if unit.health.healthy else unit for unit in found)
        for name, found in units.items()
    }


def differs_in_pods_only(old: Snapshot, new: Snapshot) -> bool:
    """Tell whether nothing happened but that interfaces of VFs went into pods or came back.

    No list depends on that, unless a selector asks for names, or one is a port of the host's: a VF's link is that of
    its PF. On a large node each pod would have all lists made anew twice.
    """
    if len(old.devices) != len(new.devices) or replace(old, devices=new.devices, problems=new.problems) != new:
        return False
    return all(
        before is now
        or (
            now.is_vf
            and now.physfn in new.by_address
            and before == replace(now, netdevs=before.netdevs)
            and not any(n.is_enslaved for n in (*before.netdevs, *now.netdevs))
        )
        for before, now in zip(old.devices, new.devices, strict=True)
    )
