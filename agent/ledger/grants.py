"""Grants: the units that kubelet gave to containers, and the pods that hold them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from agent.ledger import rows
from agent.ledger.database import Database
from agent.model.allocation import Grant, PodRef


class GrantBook(Database):
    """Who may use what, in kubelet's words."""

    def grant(self, resource_name: str, units: Mapping[str, str]) -> None:
        """Record that kubelet was given these units (unit ID → device).

        A unit that is granted already starts a new life without an owner: an init container's
        unit is granted again to the main container, and kubelet frees units without a word.
        """

        def write() -> None:
            now = self._clock()
            self._db.executemany(
                "INSERT INTO grants (unit_id, resource_name, device, granted_at) VALUES (?, ?, ?, ?)"
                " ON CONFLICT (unit_id) DO UPDATE SET resource_name = excluded.resource_name,"
                " device = excluded.device, granted_at = excluded.granted_at,"
                " pod_namespace = NULL, pod_name = NULL, pod_uid = NULL",
                [(unit, resource_name, device, now) for unit, device in units.items()],
            )

        self._write(write, durable=False)

    def bind(self, unit_ids: Iterable[str], pod: PodRef) -> None:
        """Name the pod that holds these granted units. Binding the same pod twice is a no-op."""
        units = tuple(unit_ids)

        def write() -> None:
            self._db.executemany(
                "UPDATE grants SET pod_namespace = ?, pod_name = ?, pod_uid = ? WHERE unit_id = ?",
                [(pod.namespace, pod.name, pod.uid, unit) for unit in units],
            )

        self._write(write, durable=False)

    def release(self, unit_ids: Iterable[str], granted_before: float = math.inf) -> None:
        """Forget the grants of these units: kubelet no longer counts them to any pod.

        `granted_before` (seconds since the epoch) spares one that was granted anew meanwhile.
        """
        units = [(unit, granted_before) for unit in unit_ids]

        def write() -> None:
            self._db.executemany("DELETE FROM grants WHERE unit_id = ? AND granted_at < ?", units)

        self._write(write, durable=False)

    def move_grants(self, devices: Mapping[str, str]) -> None:
        """Name the device that units stand for now (unit ID → device), whoever holds them."""

        def write() -> None:
            self._db.executemany(
                "UPDATE grants SET device = ? WHERE unit_id = ?", [(device, unit) for unit, device in devices.items()]
            )

        self._write(write, durable=False)

    def grants(self) -> tuple[Grant, ...]:
        """List all grants, oldest first."""
        found = self._read("SELECT * FROM grants ORDER BY granted_at, unit_id")
        return tuple(map(rows.grant, found))

    def granted_resource(self, device: str) -> str | None:
        """Name the resource that a unit of this device was granted for; None if none is."""
        found = self._read("SELECT resource_name FROM grants WHERE device = ? LIMIT 1", (device,))
        return found[0]["resource_name"] if found else None

    def granted_devices(self, resource_names: Iterable[str]) -> dict[str, str]:
        """List the granted units of some resources with their devices."""
        names = tuple(resource_names)
        marks = ", ".join("?" * len(names))
        found = self._read(f"SELECT unit_id, device FROM grants WHERE resource_name IN ({marks})", names)  # noqa: S608
        return {row["unit_id"]: row["device"] for row in found}
