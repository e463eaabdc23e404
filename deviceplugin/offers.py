"""When a new offer is due, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from agent.config import Resource
from agent.health import HealthBook
from agent.model.device import Snapshot
from deviceplugin.allocation import Offer
from deviceplugin.assignment import NOBODY, Assignment, assign
from deviceplugin.books import Reading, owners_of, strays_of
from deviceplugin.gpu_response import GpuFiles
from deviceplugin.missing import NOBODY_MISSED, miss
from deviceplugin.resources import list_all
from deviceplugin.unit import Unit


class Offers:
    """Makes offers one after the other. Not for two threads at once."""

    def __init__(self, health: HealthBook, clock: Callable[[], float]) -> None:
        self._health = health
        self._clock = clock
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

    def make(
        self, resources: tuple[Resource, ...], snapshot: Snapshot, gpu_files: GpuFiles, books: Reading
    ) -> Offer | None:
        """Make an offer, if anything that bears on it has changed since the last one; else None."""
        ground = (id(snapshot), resources, gpu_files, books)
        if ground != self._ground:
            self._natural = assign(resources, snapshot, books.host_names)
            self._owners = owners_of(self._natural)
        strays, now = strays_of(books, self._owners), self._clock()
        look = (strays, self._health.turn(), self._missing.devices & books.holders.keys())
        due = self._missing.due(books.holders, self._health.settings.gone_seconds)
        if (ground, look) == (self._ground, self._look) and (due is None or now < due):
            return None
        if self._ground[1:2] != (resources,):
            self._units, self._missing = {}, NOBODY_MISSED
        self._ground, self._look, self._held = ground, look, books.holders
        final = assign(resources, snapshot, books.host_names, strays) if strays else self._natural
        listed = list_all(resources, final, snapshot, books.quarantined, books.held, self._health.terms(), books.kept)
        kept = self._health.settings.gone_seconds
        self._missing = miss(
            resources, self._units, listed.units, self._missing, snapshot, books.holders.keys(), now, kept
        )
        self._units = {name: (*units, *self._missing.units.get(name, ())) for name, units in listed.units.items()}
        return Offer(snapshot, self._units, gpu_files, overlaps=final.overlaps, pools=listed.pools)

    def seconds_to_look(self) -> float | None:
        """Tell in how many seconds another offer is due though nothing happens; None if never."""
        due = self._missing.due(self._held, self._health.settings.gone_seconds)
        waits = (self._health.seconds_to_look(), None if due is None else max(0.0, due - self._clock()))
        return min((seconds for seconds in waits if seconds is not None), default=None)
