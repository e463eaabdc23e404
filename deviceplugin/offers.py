"""When a new offer is due, and what it says."""

from __future__ import annotations

from collections.abc import Mapping

from agent.config import Resource
from agent.model.device import Snapshot
from deviceplugin.allocation import Offer
from deviceplugin.assignment import NOBODY, Assignment, assign
from deviceplugin.books import Reading, owners_of, strays_of
from deviceplugin.gpu_response import GpuFiles
from deviceplugin.resources import list_all


class Offers:
    """Makes offers one after the other. Not for two threads at once."""

    def __init__(self) -> None:
        self._ground: tuple[object, ...] = ()
        """What the last assignment was made of."""
        self._natural = Assignment()
        """Which resource has each device by the selectors alone."""
        self._owners: Mapping[str, str] = NOBODY
        self._strays: Mapping[str, str] = NOBODY

    def make(
        self, resources: tuple[Resource, ...], snapshot: Snapshot, gpu_files: GpuFiles, books: Reading
    ) -> Offer | None:
        """Make an offer, if anything that bears on it has changed since the last one; else None."""
        ground = (id(snapshot), resources, gpu_files, books)
        is_same = ground == self._ground
        if not is_same:
            self._natural = assign(resources, snapshot, books.host_names)
            self._owners = owners_of(self._natural)
            self._ground = ground
        strays = strays_of(books, self._owners)
        if is_same and strays == self._strays:
            return None
        self._strays = strays
        final = assign(resources, snapshot, books.host_names, strays) if strays else self._natural
        listed = list_all(resources, final, snapshot, books.quarantined, books.held)
        return Offer(snapshot, listed.units, gpu_files, overlaps=final.overlaps, pools=listed.pools)
