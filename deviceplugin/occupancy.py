"""Which units are in use, as far as a device plugin can know without asking.

kubelet says what it hands out (Allocate) and what is free of the one resource that it asks about
(GetPreferredAllocation), but never that a unit came back. What is free of the other resources is put
together from the last of these words on each unit and from PodResources, read now and then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from agent.clients.kubelet import PodDevices

ADMISSION_SECONDS = 2.0
"""PodResources need not show a pod yet that is being admitted: younger grants stand."""


class Occupancy:
    """Units in use, by what was heard last. Times are of one clock."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], float] = {}
        """Resource and unit in use → since when that is known."""
        self._others: tuple[tuple[str, str], ...] = ()

    def take(self, resource_name: str, unit_ids: Iterable[str], now: float) -> None:
        """Note that kubelet was given these units."""
        for unit in unit_ids:
            self._since[resource_name, unit] = now

    def free(self, resource_name: str, unit_ids: Iterable[str]) -> None:
        """Note that kubelet calls these units free."""
        for unit in unit_ids:
            self._since.pop((resource_name, unit), None)

    def read(self, pods: Sequence[PodDevices], resource_names: Collection[str], asked_at: float) -> None:
        """Take in what kubelet's PodResources tell: ours (by resource name), and what other plugins gave."""
        held = {(d.resource_name, unit) for p in pods for c in p.containers for d in c.devices for unit in d.device_ids}
        before = asked_at - ADMISSION_SECONDS
        for key, since in list(self._since.items()):
            if key not in held and since < before:
                del self._since[key]
        for key in held:
            if key[0] in resource_names:
                self._since.setdefault(key, asked_at)
        self._others = tuple(sorted(key for key in held if key[0] not in resource_names))

    def in_use(self, resource_name: str, unit_id: str) -> bool:
        """Tell whether a unit of ours is in use."""
        return (resource_name, unit_id) in self._since

    @property
    def others(self) -> tuple[tuple[str, str], ...]:
        """List what other plugins' resources pods hold: resource name and unit."""
        return self._others
