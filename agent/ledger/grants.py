"""Who may use what: grants and bindings, and which claims there are to be looked at (`claims.py` writes them).

A grant is a unit that kubelet gave to a container, and the pod that holds it. A binding is the device that was chosen
for a granted slot; it belongs to one sandbox, and to one boot: after a reboot none is true. Those of another boot are
passed over, and removed with the next that is made: opening the books must not need a disk that can be written.

A device that a claim has alone is in no other hands, and the other way round: who comes second is refused, in the
transaction that would have made it so.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from agent.errors import ClaimConflict, DeviceBusy
from agent.ledger import rows
from agent.ledger.database import Database, Mirror
from agent.model.allocation import NO_SPECS, Binding, Claim, ClaimRef, Devices, Grant, PodRef, UnitSpec, all_of

ClaimWatcher = Callable[[Claim | None, Claim | None], None]


@dataclass(frozen=True, slots=True)
class Claims:
    """All claims at one moment."""

    by_uid: Mapping[str, Claim]
    """By namespace and name."""
    alone: Mapping[str, Claim]
    """Device → the claim that nobody shares it with."""
    shared: Mapping[str, tuple[Claim, ...]]
    """Device → the claims that have a part of it."""

    @classmethod
    def of(cls, claims: Iterable[Claim]) -> Claims:
        """Look through some claims."""
        by_uid = {claim.ref.uid: claim for claim in sorted(claims, key=_by_name)}
        alone: dict[str, Claim] = {}
        shared: dict[str, tuple[Claim, ...]] = {}
        for claim in by_uid.values():
            for found in claim.devices:
                if found.exclusive and not found.admin:
                    alone[found.device] = claim
                elif not found.admin:
                    shared[found.device] = (*shared.get(found.device, ()), claim)
        return cls(by_uid, alone, shared)


def _by_name(claim: Claim) -> tuple[str, str, str]:
    return claim.ref.namespace, claim.ref.name, claim.ref.uid


class ClaimsHeld(Database):
    """What is claimed."""

    def __init__(self, path: Path, boot_id: str, clock: Callable[[], float]) -> None:
        super().__init__(path, boot_id, clock)
        self._claimed = Claims.of(())
        self._claim_watchers: list[ClaimWatcher] = []

    def watch_claims(self, watcher: ClaimWatcher) -> None:
        """Call `watcher` with each claim before and after a change. It must not block or raise."""
        self._claim_watchers.append(watcher)

    def claims(self) -> tuple[Claim, ...]:
        """List all claims, by namespace and name."""
        self._check_open()
        return tuple(self._claimed.by_uid.values())

    def claim(self, uid: str) -> Claim | None:
        """Return the claim of a UID."""
        self._check_open()
        return self._claimed.by_uid.get(uid)

    def claims_for(self, pod: PodRef) -> tuple[Claim, ...]:
        """List the claims that are known to be a pod's, in any state, by their names."""
        self._check_open()
        claims = self._claimed.by_uid
        return tuple(claim for claim in claims.values() if claim.is_for(pod)) if claims else ()

    def claim_on(self, device: str) -> Claim | None:
        """Return the claim that has a device alone."""
        self._check_open()
        return self._claimed.alone.get(device)

    def claimed_devices(self) -> Mapping[str, ClaimRef]:
        """Map each device that a claim has alone to the claim."""
        self._check_open()
        return {device: claim.ref for device, claim in self._claimed.alone.items()}

    def _refuse_claimed(self, devices: Iterable[str]) -> None:
        """Raise ClaimConflict for a device that a claim has alone. For writers, in their transaction."""
        alone = self._claimed.alone
        for device in devices if alone else ():
            if device in alone:
                raise ClaimConflict(device, f"claim {alone[device].ref}")

    def _put_claims(self, claims: Iterable[Claim], gone: Iterable[str] = ()) -> None:
        """Have memory follow what was written: claims that are new or other ones, and the UIDs of those gone."""
        before = self._claimed.by_uid
        dropped = frozenset(gone)
        changed = {claim.ref.uid: claim for claim in claims}
        self._claimed = Claims.of(claim for uid, claim in {**before, **changed}.items() if uid not in dropped)
        for watcher in self._claim_watchers:
            for uid in {**changed, **dict.fromkeys(dropped)}:
                watcher(before.get(uid), self._claimed.by_uid.get(uid))

    def _load(self) -> None:
        super()._load()
        found = rows.claims(
            self._read("SELECT * FROM claims"), self._read("SELECT * FROM claim_devices ORDER BY rowid")
        )
        self._put_claims(found)


Guard = Callable[[str, Mapping[str, Devices]], AbstractContextManager[None]]


def _unguarded(resource_name: str, units: Mapping[str, Devices]) -> AbstractContextManager[None]:
    return nullcontext()


class GrantBook(ClaimsHeld):
    """Who may use what, in kubelet's words."""

    def __init__(self, path: Path, boot_id: str, clock: Callable[[], float]) -> None:
        super().__init__(path, boot_id, clock)
        self._grants: Mirror[str, Grant] = Mirror(attrgetter("unit_id"), attrgetter("devices"))
        self._guard_of_grants: Guard = _unguarded

    def watch_grants(self, watcher: Callable[[Grant | None, Grant | None], None]) -> None:
        """Call `watcher` with each grant before and after a change. It must not block or raise."""
        self._grants.watch(watcher)

    def guard_grants(self, guard: Guard) -> None:
        """Write each grant inside of what `guard` makes of it.

        It may block briefly, and raise LedgerError: then nothing is granted.
        """
        self._guard_of_grants = guard

    def grant(self, resource_name: str, units: Mapping[str, Devices], specs: Mapping[str, UnitSpec] = NO_SPECS) -> None:
        """Record that kubelet was given these units (unit ID → device, or all NICs of a rail), and their CDI specs.

        A unit that is granted already starts a new life without an owner: an init container's
        unit is granted again to the main container, and kubelet frees units without a word.
        Raises ClaimConflict for a device that a DRA claim has alone: nothing is granted then.
        """
        now = self._clock()
        granted = [
            _on(Grant(unit, resource_name, "", now, None, specs.get(unit)), devices) for unit, devices in units.items()
        ]

        def write() -> list[Grant]:
            self._refuse_claimed(device for grant in granted for device in grant.devices)
            rows.insert(self._db, "grants", map(rows.grant_columns, granted), replace=True)
            return granted

        with self._guard_of_grants(resource_name, units):
            self._write(write, durable=False, then=self._grants.put)

    def bind(self, unit_ids: Iterable[str], pod: PodRef) -> None:
        """Name the pod that holds these granted units. Binding the same pod twice is a no-op."""
        units = tuple(unit_ids)
        self._change_grants(lambda: [replace(grant, pod=pod) for grant in self._of_units(units)])

    def set_specs(self, specs: Mapping[str, UnitSpec]) -> None:
        """Record what the CDI specs of granted units say from now on. One that is granted no more has none."""
        self._change_grants(lambda: [replace(grant, spec=specs[grant.unit_id]) for grant in self._of_units(specs)])

    def release(self, unit_ids: Iterable[str], granted_before: float = math.inf) -> None:
        """Forget the grants of these units: kubelet no longer counts them to any pod.

        `granted_before` (seconds since the epoch) spares one that was granted anew meanwhile.
        """
        units = tuple(unit_ids)

        def write() -> list[str]:
            gone = [grant.unit_id for grant in self._of_units(units) if grant.granted_at < granted_before]
            self._db.executemany("DELETE FROM grants WHERE unit_id = :unit_id", [{"unit_id": unit} for unit in gone])
            return gone

        self._write(write, durable=False, then=self._grants.remove)

    def move_grants(self, devices: Mapping[str, Devices]) -> None:
        """Name the devices that units stand for now (unit ID → device, or all NICs of a rail), whoever holds them."""
        self._change_grants(lambda: [_on(grant, devices[grant.unit_id]) for grant in self._of_units(devices)])

    def grants(self) -> tuple[Grant, ...]:
        """List all grants, oldest first."""
        self._check_open()
        return tuple(sorted(self._grants.all(), key=attrgetter("granted_at", "unit_id")))

    def pod_of(self, unit_id: str) -> PodRef | None:
        """Name the pod that a unit was granted to; None if that is not known, or the unit not granted."""
        found = self._grants.get(unit_id)
        return found.pod if found is not None else None

    def grants_on(self, device: str) -> tuple[Grant, ...]:
        """List the grants of a device."""
        self._check_open()
        return self._grants.of_device(device)

    def granted_resource(self, device: str) -> str | None:
        """Name the resource that a unit of this device was granted for; None if none is."""
        return next((grant.resource_name for grant in self.grants_on(device)), None)

    def granted_devices(self, resource_names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """List the granted units of some resources with the devices of each."""
        self._check_open()
        names = frozenset(resource_names)
        return {grant.unit_id: grant.devices for grant in self._grants.all() if grant.resource_name in names}

    def _of_units(self, units: Iterable[str]) -> tuple[Grant, ...]:
        return tuple(grant for grant in map(self._grants.get, units) if grant is not None)

    def _change_grants(self, changed: Callable[[], list[Grant]]) -> None:
        """Write what `changed` makes of grants that are there, looked up in the transaction."""

        def write() -> list[Grant]:
            found = changed()
            self._update_grants(found)
            return found

        self._write(write, durable=False, then=self._grants.put)

    def _update_grants(self, grants: Iterable[Grant]) -> None:
        rows.update(self._db, "grants", "unit_id", map(rows.grant_columns, grants))

    def _load(self) -> None:
        super()._load()
        self._grants.put(map(rows.grant, self._read("SELECT * FROM grants ORDER BY granted_at, unit_id")))


class BindingBook(GrantBook):
    """Which device stands behind a slot, and for which sandbox."""

    def __init__(self, path: Path, boot_id: str, clock: Callable[[], float]) -> None:
        super().__init__(path, boot_id, clock)
        self._bindings: Mirror[str, Binding] = Mirror(attrgetter("unit_id"))

    def watch_bindings(self, watcher: Callable[[Binding | None, Binding | None], None]) -> None:
        """Call `watcher` with each binding before and after a change. It must not block or raise."""
        self._bindings.watch(watcher)

    def bind_slots(self, bindings: Sequence[Binding]) -> tuple[Binding, ...]:
        """Record the devices of some slots, in place of what these slots were bound to before.

        The grants of the slots name devices and pod from then on. Raises DeviceBusy if another slot or a DRA claim
        has one of them; nothing is recorded then.
        """
        now = self._clock()
        made = {b.unit_id: replace(b, boot_id=self.boot_id, since=now) for b in bindings}

        def write() -> list[Grant]:
            try:
                self._refuse_claimed(binding.device for binding in made.values())
            except ClaimConflict as error:
                raise DeviceBusy(str(error)) from error
            self._db.execute("DELETE FROM bindings WHERE boot_id <> :boot_id", {"boot_id": self.boot_id})
            columns = [rows.binding_columns(binding) for binding in made.values()]
            self._db.executemany("DELETE FROM bindings WHERE unit_id = :unit_id", columns)
            try:
                rows.insert(self._db, "bindings", columns)
            except sqlite3.IntegrityError as error:
                devices = ", ".join(b.device for b in made.values())
                raise DeviceBusy(f"one of {devices} is bound to another slot in the ledger already") from error
            granted = [
                replace(grant, device=made[grant.unit_id].device, pod=made[grant.unit_id].pod)
                for grant in self._of_units(made)
            ]
            self._update_grants(granted)
            return granted

        def mirrored(granted: list[Grant]) -> None:
            self._bindings.remove(made)
            self._bindings.put(made.values())
            self._grants.put(granted)

        self._write(write, durable=False, then=mirrored)
        return tuple(made.values())

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
        units = [b.unit_id for b in bindings]

        def write() -> None:
            columns = [rows.binding_columns(b) for b in bindings]
            self._db.executemany(
                "DELETE FROM bindings WHERE unit_id = :unit_id AND container_id = :container_id", columns
            )
            self._db.executemany("UPDATE grants SET device = '' WHERE unit_id = :unit_id AND device = :device", columns)

        def mirrored(_: None) -> None:
            self._bindings.remove(units)
            self._leave_without_device(units)

        self._write(write, durable=False, then=mirrored)

    def _leave_without_device(self, units: Iterable[str]) -> None:
        self._grants.put(replace(grant, device="") for grant in self._of_units(units))

    def _load(self) -> None:
        super()._load()
        found = [rows.binding(row) for row in self._read("SELECT * FROM bindings ORDER BY since, unit_id")]
        self._bindings.put(binding for binding in found if binding.boot_id == self.boot_id)
        self._leave_without_device(binding.unit_id for binding in found if binding.boot_id != self.boot_id)


def _on(grant: Grant, devices: Devices) -> Grant:
    first, *others = all_of(devices) or ("",)
    return replace(grant, device=first, others=tuple(others))


def _same(known: Binding, other: Binding) -> bool:
    return (known.container_id, known.cni_ifname, known.device) == (other.container_id, other.cni_ifname, other.device)
