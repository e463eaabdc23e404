"""Bindings: the devices that were chosen for granted slots.

A binding belongs to one sandbox, and to one boot: after a reboot none is true. Those of another boot are passed over,
and removed with the next that is made: opening the books must not need a disk that can be written.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from agent.errors import DeviceBusy
from agent.ledger import mirror, rows
from agent.ledger.grants import GrantBook
from agent.model.allocation import Binding

INSERT = "INSERT INTO bindings VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"


class BindingBook(GrantBook):
    """Which device stands behind a slot, and for which sandbox."""

    def __init__(self, path: Path, boot_id: str, clock: Callable[[], float]) -> None:
        super().__init__(path, boot_id, clock)
        self._bindings = mirror.of_bindings()

    def _load(self) -> None:
        super()._load()
        found = [rows.binding(row) for row in self._read("SELECT * FROM bindings ORDER BY since, unit_id")]
        self._bindings.put(binding for binding in found if binding.boot_id == self.boot_id)
        self._name_devices({binding.unit_id: "" for binding in found if binding.boot_id != self.boot_id})

    def _restore(self, db: sqlite3.Connection) -> None:
        super()._restore(db)
        db.executemany(INSERT, map(_row, self._bindings.all()))

    def watch_bindings(self, watcher: Callable[[Binding | None, Binding | None], None]) -> None:
        """Call `watcher` with each binding before and after a change. It must not block or raise."""
        self._bindings.watch(watcher)

    def bind_slots(self, bindings: Sequence[Binding]) -> tuple[Binding, ...]:
        """Record the devices of some slots, in place of what these slots were bound to before.

        The grants of the slots name devices and pod from then on. Raises DeviceBusy if another slot has one of
        them; nothing is recorded then.
        """
        now = self._clock()
        made = tuple(replace(binding, boot_id=self.boot_id, since=now) for binding in bindings)

        def write() -> None:
            self._db.execute("DELETE FROM bindings WHERE boot_id <> ?", (self.boot_id,))
            self._db.executemany("DELETE FROM bindings WHERE unit_id = ?", [(b.unit_id,) for b in made])
            try:
                self._db.executemany(INSERT, map(_row, made))
            except sqlite3.IntegrityError as error:
                devices = ", ".join(b.device for b in made)
                raise DeviceBusy(f"one of {devices} is bound to another slot in the ledger already") from error
            self._db.executemany(
                "UPDATE grants SET device = ?, pod_namespace = ?, pod_name = ?, pod_uid = ? WHERE unit_id = ?",
                [(b.device, b.pod.namespace, b.pod.name, b.pod.uid, b.unit_id) for b in made],
            )

        def mirrored(_: None) -> None:
            self._bindings.remove([b.unit_id for b in made])
            self._bindings.put(made)
            mine = {b.unit_id: b for b in made}
            self._grants.put(
                replace(grant, device=mine[grant.unit_id].device, pod=mine[grant.unit_id].pod)
                for grant in self._of_units(mine)
            )

        self._write(write, durable=False, then=mirrored)
        return made

    def unbind(self, bindings: Iterable[Binding]) -> tuple[Binding, ...]:
        """Forget these bindings, but not those that another sandbox has taken over meanwhile. Return what went."""
        found = [known for b in bindings if (known := self.binding_of(b.unit_id)) is not None and _same(known, b)]
        if found:
            self._drop(found)
        return tuple(found)

    def bindings(self) -> tuple[Binding, ...]:
        """List all bindings."""
        self._check_open()
        return self._bindings.all()

    def binding_of(self, unit_id: str) -> Binding | None:
        """Return the binding of a slot."""
        self._check_open()
        return self._bindings.get(unit_id)

    def binding_on(self, device: str) -> Binding | None:
        """Return the binding of a device."""
        self._check_open()
        return next(iter(self._bindings.of_device(device)), None)

    def _drop(self, bindings: Sequence[Binding]) -> None:
        if not bindings:
            return

        def write() -> None:
            self._db.executemany(
                "DELETE FROM bindings WHERE unit_id = ? AND container_id = ?",
                [(b.unit_id, b.container_id) for b in bindings],
            )
            self._db.executemany(
                "UPDATE grants SET device = '' WHERE unit_id = ? AND device = ?",
                [(b.unit_id, b.device) for b in bindings],
            )

        def mirrored(_: None) -> None:
            self._bindings.remove(b.unit_id for b in bindings)
            self._name_devices({b.unit_id: "" for b in bindings})

        self._write(write, durable=False, then=mirrored)

    def _name_devices(self, devices: dict[str, str]) -> None:
        self._grants.put(replace(grant, device=devices[grant.unit_id]) for grant in self._of_units(devices))


def _same(known: Binding, other: Binding) -> bool:
    return (known.container_id, known.cni_ifname, known.device) == (other.container_id, other.cni_ifname, other.device)


def _row(binding: Binding) -> tuple[object, ...]:
    return (
        *(binding.unit_id, binding.resource_name, binding.kind, binding.device),
        *(binding.container, binding.container_id, binding.cni_ifname),
        *(binding.pod.namespace, binding.pod.name, binding.pod.uid),
        *(json.dumps(dict(binding.edits)), binding.boot_id, binding.since),
    )
