"""What the books know of devices that nobody need hold: quarantine, pending leases, names, numbers of rails.

All of it is bounded: one row per device, and leases that nobody takes back are given up some day.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from agent.ledger import rows
from agent.ledger.database import Database
from agent.model.allocation import OwedLease, Quarantine
from agent.model.vf_identity import KnownDevice, Rail


class DeviceBook(Database):
    """Devices withheld, addresses still leased, what VFs are called when no pod has them, and the numbers of rails."""

    def quarantine(self, device: str, reason: str) -> None:
        """Withhold a device. A device that is withheld already keeps its first reason."""
        self._change(
            "INSERT OR IGNORE INTO quarantine (device, reason, since, boot_id)"
            " VALUES (:device, :reason, :since, :boot_id)",
            {"device": device, "reason": reason, "since": self._clock(), "boot_id": self.boot_id},
        )

    def end_quarantine(self, device: str) -> None:
        """Offer a device again."""
        self._change("DELETE FROM quarantine WHERE device = :device", {"device": device})

    def quarantines(self) -> tuple[Quarantine, ...]:
        """List the withheld devices, by address."""
        return rows.quarantines(self._read)

    def owed_leases(self) -> tuple[OwedLease, ...]:
        """List the addresses that are still to be given back, oldest first."""
        return rows.owed_leases(self._read)

    def owed_leases_of(self, container_id: str, ifname: str) -> tuple[OwedLease, ...]:
        """List what is still to be given back of one interface's addresses."""
        of = {"container_id": container_id, "ifname": ifname}
        return rows.owed_leases(
            lambda sql: self._read(sql, of), "WHERE container_id = :container_id AND ifname = :ifname"
        )

    def owe_lease(self, container_id: str, ifname: str, netns_path: str, request: Mapping[str, Any]) -> None:
        """Note that addresses of an interface without a row are to be given back, unless some of it are already.

        Nothing else tells of them, so this outlives a power cut.
        """

        def write() -> None:
            query = "SELECT 1 FROM owed_leases WHERE container_id = :container_id AND ifname = :ifname"
            if self._db.execute(query, {"container_id": container_id, "ifname": ifname}).fetchone() is None:
                rows.owe_lease(self._db, container_id, ifname, netns_path, request, self._clock())

        self._write(write)

    def settle_lease(self, lease_id: int) -> None:
        """Forget addresses that were given back."""
        self._change("DELETE FROM owed_leases WHERE lease_id = :lease_id", {"lease_id": lease_id}, durable=False)

    def note_lease_problem(self, lease_id: int, problem: str) -> None:
        """Remember why addresses could not be given back, and when that was tried."""
        self._change(
            "UPDATE owed_leases SET problem = :problem, tried_at = :tried_at WHERE lease_id = :lease_id",
            {"problem": problem, "tried_at": self._clock(), "lease_id": lease_id},
            durable=False,
        )

    def known_devices(self) -> tuple[KnownDevice, ...]:
        """List what is known of VFs, by address; those of an earlier boot may have another address now."""
        return rows.known_devices(self._read)

    def know(self, known: Iterable[KnownDevice], forget: Iterable[str] = ()) -> None:
        """Remember what VFs are called and look like, and forget some addresses, in one step."""
        found, gone = tuple(known), [{"device": device} for device in forget]

        def write() -> None:
            now = self._clock()
            self._db.executemany("DELETE FROM known_devices WHERE device = :device", gone)
            columns = [dataclasses.asdict(device) | {"seen": now} for device in found]
            rows.insert(self._db, "known_devices", columns, replace=True)

        self._write(write, durable=False)

    def rails(self) -> tuple[Rail, ...]:
        """List the node's rails as they were numbered last, by number and plane."""
        return rows.rails(self._read)

    def keep_rails(self, found: Iterable[Rail]) -> None:
        """Remember the node's rails, in place of what was remembered."""
        columns = [dataclasses.asdict(rail) for rail in found]

        def write() -> None:
            self._db.execute("DELETE FROM rails")
            rows.insert(self._db, "rails", columns)

        self._write(write)

    def _change(self, sql: str, values: Mapping[str, Any], *, durable: bool = True) -> None:
        def write() -> None:
            self._db.execute(sql, values)

        self._write(write, durable)
