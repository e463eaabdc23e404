"""Grants: the units that kubelet gave to containers, and the pods that hold them."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from agent.ledger import mirror, rows
from agent.ledger.database import Database
from agent.model.allocation import Grant, PodRef
from agent.model.slots import is_slot_id

Guard = Callable[[str, Mapping[str, str]], AbstractContextManager[None]]


def _unguarded(resource_name: str, units: Mapping[str, str]) -> AbstractContextManager[None]:
    return nullcontext()


class GrantBook(Database):
    """Who may use what, in kubelet's words."""

    def __init__(self, path: Path, boot_id: str, clock: Callable[[], float]) -> None:
        super().__init__(path, boot_id, clock)
        self._grants = mirror.of_grants()
        self._guard_of_grants: Guard = _unguarded

    def _load(self) -> None:
        super()._load()
        self._grants.put(map(rows.grant, self._read("SELECT * FROM grants ORDER BY granted_at, unit_id")))

    def _restore(self, db: sqlite3.Connection) -> None:
        super()._restore(db)
        pods = [(g, g.pod) for g in self._grants.all()]
        db.executemany(
            "INSERT INTO grants VALUES (?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    *(g.unit_id, g.resource_name, g.device, g.granted_at),
                    *((pod.namespace, pod.name, pod.uid) if pod is not None else (None, None, None)),
                )
                for g, pod in pods
            ],
        )

    def watch_grants(self, watcher: Callable[[Grant | None, Grant | None], None]) -> None:
        """Call `watcher` with each grant before and after a change. It must not block or raise."""
        self._grants.watch(watcher)

    def guard_grants(self, guard: Guard) -> None:
        """Write each grant inside of what `guard` makes of it.

        It may block briefly, and raise LedgerError: then nothing is granted.
        """
        self._guard_of_grants = guard

    def grant(self, resource_name: str, units: Mapping[str, str]) -> None:
        """Record that kubelet was given these units (unit ID → device).

        A unit that is granted already starts a new life without an owner: an init container's
        unit is granted again to the main container, and kubelet frees units without a word.
        """

        granted = [Grant(unit, resource_name, device, self._clock()) for unit, device in units.items()]

        def write() -> None:
            self._db.executemany(
                "INSERT INTO grants (unit_id, resource_name, device, granted_at) VALUES (?, ?, ?, ?)"
                " ON CONFLICT (unit_id) DO UPDATE SET resource_name = excluded.resource_name,"
                " device = excluded.device, granted_at = excluded.granted_at,"
                " pod_namespace = NULL, pod_name = NULL, pod_uid = NULL",
                [(g.unit_id, g.resource_name, g.device, g.granted_at) for g in granted],
            )

        with self._guard_of_grants(resource_name, units):
            self._write(write, durable=False, then=lambda _: self._grants.put(granted))

    def bind(self, unit_ids: Iterable[str], pod: PodRef) -> None:
        """Name the pod that holds these granted units. Binding the same pod twice is a no-op."""
        units = tuple(unit_ids)

        def write() -> None:
            self._db.executemany(
                "UPDATE grants SET pod_namespace = ?, pod_name = ?, pod_uid = ? WHERE unit_id = ?",
                [(pod.namespace, pod.name, pod.uid, unit) for unit in units],
            )

        self._write(
            write,
            durable=False,
            then=lambda _: self._grants.put(replace(grant, pod=pod) for grant in self._of_units(units)),
        )

    def release(self, unit_ids: Iterable[str], granted_before: float = math.inf) -> None:
        """Forget the grants of these units: kubelet no longer counts them to any pod.

        `granted_before` (seconds since the epoch) spares one that was granted anew meanwhile.
        """
        units = tuple(unit_ids)

        def write() -> None:
            self._db.executemany(
                "DELETE FROM grants WHERE unit_id = ? AND granted_at < ?", [(unit, granted_before) for unit in units]
            )

        def forget(_: None) -> None:
            self._grants.remove(g.unit_id for g in self._of_units(units) if g.granted_at < granted_before)

        self._write(write, durable=False, then=forget)

    def move_grants(self, devices: Mapping[str, str]) -> None:
        """Name the device that units stand for now (unit ID → device), whoever holds them."""

        def write() -> None:
            self._db.executemany(
                "UPDATE grants SET device = ? WHERE unit_id = ?", [(device, unit) for unit, device in devices.items()]
            )

        self._write(
            write,
            durable=False,
            then=lambda _: self._grants.put(replace(g, device=devices[g.unit_id]) for g in self._of_units(devices)),
        )

    def grants(self) -> tuple[Grant, ...]:
        """List all grants, oldest first."""
        self._check_open()
        return tuple(sorted(self._grants.all(), key=lambda grant: (grant.granted_at, grant.unit_id)))

    def pod_of(self, unit_id: str) -> PodRef | None:
        """Name the pod that a unit was granted to; None if that is not known, or the unit not granted."""
        found = self._grants.get(unit_id)
        return found.pod if found is not None else None

    def granted_resource(self, device: str) -> str | None:
        """Name the resource that a unit of this device was granted for; None if none is."""
        self._check_open()
        found = self._grants.of_device(device)
        return found[0].resource_name if found else None

    def granted_units(self, device: str) -> tuple[str, ...]:
        """List the granted units of a device."""
        self._check_open()
        return tuple(grant.unit_id for grant in self._grants.of_device(device))

    def granted_devices(self, resource_names: Iterable[str]) -> dict[str, str]:
        """List the granted units of some resources with their devices."""
        self._check_open()
        names = frozenset(resource_names)
        return {grant.unit_id: grant.device for grant in self._grants.all() if grant.resource_name in names}

    def grants_beyond(self, resource_names: Iterable[str]) -> tuple[Grant, ...]:
        """List the grants of all resources but these."""
        self._check_open()
        names = frozenset(resource_names)
        return tuple(grant for grant in self._grants.all() if grant.resource_name not in names)

    def granted_slots(self) -> frozenset[str]:
        """List the granted slots."""
        self._check_open()
        return frozenset(grant.unit_id for grant in self._grants.all() if is_slot_id(grant.unit_id))

    def _of_units(self, units: Iterable[str]) -> tuple[Grant, ...]:
        return tuple(grant for grant in map(self._grants.get, units) if grant is not None)
