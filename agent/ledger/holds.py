"""Holds: what kubelet gave to pods, by units, by slots and by claims. And attachments: devices in pods, from the
promise to put one there until it is verifiably back.

A unit's or slot's hold begins with kubelet's Allocate, and names its pod once that is known. The device that was chosen
for a slot belongs to one sandbox, and to one boot: after a reboot none is true. Those of another boot are passed over,
and removed with the next that is made: opening the books must not need a disk that can be written.

Two holds that exclude each other (`Hold.excludes`) are not of one device: who comes second is refused, in the
transaction that would have made it so.
"""

from __future__ import annotations

import itertools
import math
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from operator import attrgetter
from typing import Any

from agent.errors import ClaimConflict, DeviceBusy, LedgerError
from agent.ledger import rows
from agent.ledger.database import Database
from agent.model.allocation import (
    Attachment,
    AttachmentState,
    Claim,
    ClaimState,
    Hold,
    Owner,
    PodRef,
    Spec,
    Undo,
    how_held,
)

_TICK = 1e-6
"""Seconds between slots that are bound together: ADD names interfaces in the order in which a container is told."""
_BY_NAME = attrgetter("ref.namespace", "ref.name", "ref.uid")
Guard = Callable[[Sequence[Hold]], AbstractContextManager[None]]


def _unguarded(holds: Sequence[Hold]) -> AbstractContextManager[None]:
    return nullcontext()


class HoldBook(Database):
    """Who may use what, which device is in which pod, and what undoes that."""

    _ids: Iterator[int]
    """Numbers for attachments."""
    _guard_of_holds: Guard = staticmethod(_unguarded)
    _void: tuple[str, ...] = ()
    """Slots that were bound in another boot, and have devices in the file still."""

    def watch_holds(self, watcher: Callable[[Hold | None, Hold | None], None]) -> None:
        """Call `watcher` with each hold before and after a change. It must not block or raise."""
        self._holds.watch(watcher)

    def watch_claims(self, watcher: Callable[[Claim | None, Claim | None], None]) -> None:
        """Call `watcher` with each claim before and after a change. It must not block or raise."""
        self._claims.watch(watcher)

    def watch_attachments(self, watcher: Callable[[Attachment | None, Attachment | None], None]) -> None:
        """Call `watcher` with each attachment before and after a change. It must not block or raise."""
        self._attachments.watch(watcher)

    def guard_holds(self, guard: Guard) -> None:
        """Write holds by units, slots and claims inside of what `guard` makes of them.

        It may block briefly, and raise LedgerError: then nothing is written.
        """
        self._guard_of_holds = guard

    # ---------------------------------------------------------------------------------------------- what there is

    def holds(self) -> tuple[Hold, ...]:
        """List what pods have by units and slots, oldest first."""
        found = (hold for hold in self._holds.all() if not hold.claim_uid)
        return tuple(sorted(found, key=attrgetter("since", "key")))

    def hold(self, key: str) -> Hold | None:
        """Return the hold of a unit or slot."""
        return self._holds.get(key)

    def holds_on(self, device: str) -> tuple[Hold, ...]:
        """List the holds of a device, of claims too, but for admin access."""
        return tuple(hold for hold in self._holds.of_device(device) if not hold.admin)

    def bound_slots(self, container_id: str | None = None) -> tuple[Hold, ...]:
        """List the slots that have a device, as they were bound; with `container_id` those of one sandbox."""
        found = (hold for hold in self._holds.all() if container_id in (None, hold.container_id) and hold.is_bound)
        return tuple(sorted(found, key=attrgetter("bound_at", "key")))

    def pod_of(self, key: str) -> PodRef | None:
        """Name the pod that a unit was granted to; None if that is not known, or the unit not granted."""
        found = self._holds.get(key)
        return found.pod if found is not None else None

    def resource_held(self, device: str) -> str | None:
        """Name the resource that a device was given to a pod for; None if it was not."""
        return next((hold.resource_name for hold in self.holds_on(device)), None)

    def how_held(self, device: str) -> str | None:
        """Say in the user's words how a device is held; None if it is not."""
        return next(map(self._how, self.holds_on(device)), None)

    def claims(self) -> tuple[Claim, ...]:
        """List all claims, by namespace and name."""
        return tuple(sorted(self._claims.all(), key=_BY_NAME))

    def claim(self, uid: str) -> Claim | None:
        """Return the claim of a UID."""
        return self._claims.get(uid)

    def claims_for(self, pod: PodRef) -> tuple[Claim, ...]:
        """List the claims that are known to be a pod's, in any state, by their names."""
        return tuple(sorted((claim for claim in self._claims.all() if claim.is_for(pod)), key=_BY_NAME))

    def claim_on(self, device: str) -> Claim | None:
        """Return the claim that has a device alone."""
        uid = next((hold.claim_uid for hold in self.holds_on(device) if hold.claim_uid and hold.exclusive), None)
        return self._claims.get(uid) if uid is not None else None

    # ------------------------------------------------------------------------------------------- units and slots

    def grant(self, holds: Iterable[Hold]) -> None:
        """Record that kubelet was given units and slots.

        One that is there already begins a new life without a pod: an init container's unit is granted again to the
        main container, and kubelet frees units without a word.
        Raises ClaimConflict for a device that a DRA claim has alone: nothing is recorded then.
        """
        now = self._clock()
        made = [replace(hold, since=now) for hold in holds]

        def write() -> list[Hold]:
            self._refuse_held(made)
            self._put_rows(made)
            return made

        with self._guard_of_holds(made):
            self._write(write, durable=False, then=self._holds.put)

    def bind(self, keys: Iterable[str], pod: PodRef) -> None:
        """Name the pod that has these units and slots. To name the same pod twice is a no-op."""
        units = [hold.key for hold in self._known(keys) if hold.pod != pod]
        if units:
            self._change_holds(lambda: [replace(hold, pod=pod) for hold in self._known(units)])

    def set_specs(self, specs: Mapping[str, Spec]) -> None:
        """Record what the CDI specs of some holds say from now on, of claims too. One that is gone has none."""
        self._change_holds(lambda: [replace(hold, spec=specs[hold.key]) for hold in self._known(specs)])

    def move(self, devices: Mapping[str, tuple[str, ...]]) -> None:
        """Name the devices that holds stand for now, of claims too, whoever has them.

        Claims stay of the boot that they were prepared in. Raises ClaimConflict if two have one device alone.
        """
        self._change_holds(lambda: [replace(hold, devices=devices[hold.key]) for hold in self._known(devices)])

    def date_again(self, key: str) -> None:
        """Take a unit or slot for granted at this moment: the clock was set back since."""
        self._change_holds(lambda: [replace(hold, since=self._clock()) for hold in self._known([key])])

    def release(self, keys: Iterable[str], granted_before: float = math.inf) -> None:
        """Forget these units and slots: kubelet no longer counts them to any pod. A slot that is bound stays.

        `granted_before` (seconds since the epoch) spares one that was granted anew meanwhile.
        """
        units = tuple(keys)

        def write() -> list[str]:
            gone = [h.key for h in self._known(units) if h.since < granted_before and not h.is_bound]
            self._drop_rows(gone)
            return gone

        self._write(write, durable=False, then=self._holds.remove)

    def bind_slots(self, slots: Iterable[Hold]) -> tuple[Hold, ...]:
        """Record the devices of some slots, and for whom, in place of what these slots were bound to before.

        They are bound now, but for those that say when that was.
        Raises DeviceBusy if another slot or a DRA claim has one of them; nothing is recorded then.
        """
        wanted = tuple(slots)

        def write() -> tuple[Hold, ...]:
            now = self._clock()
            made = tuple(
                replace(
                    hold,
                    since=known.since if (known := self._holds.get(hold.key)) else now,
                    bound_at=hold.bound_at or now + number * _TICK,
                    boot_id=self.boot_id,
                )
                for number, hold in enumerate(wanted)
            )
            try:
                self._refuse_held(made)
                self._put_rows(made)
            except ClaimConflict as error:
                raise DeviceBusy(str(error)) from error
            return made

        return self._write(write, durable=False, then=self._holds.put)

    def unbind(self, slots: Iterable[Hold]) -> tuple[Hold, ...]:
        """Leave these slots without a device, but not those that another sandbox has taken over. Return which went."""
        wanted = {hold.key: hold for hold in slots}

        def write() -> tuple[Hold, ...]:
            found = tuple(hold for hold in self._known(wanted) if hold.is_bound and hold.is_bound_as(wanted[hold.key]))
            self._put_rows(map(_without_device, found))
            return found

        return self._write(write, durable=False, then=lambda found: self._holds.put(map(_without_device, found)))

    # ------------------------------------------------------------------------------------------------------ claims

    def prepare_claim(self, claim: Claim) -> Claim:
        """Write a claim and its devices, *preparing*, in place of what is there of the same UID. Return it as written.

        Raises ClaimConflict for a device that another claim, a unit or a slot has, or a pod that the claim is not for:
        nothing is written then.
        """
        devices = tuple(replace(hold, claim_uid=claim.ref.uid) for hold in claim.devices)
        boot_id, now = self.boot_id, self._clock()
        made = replace(claim, state=ClaimState.PREPARING, boot_id=boot_id, since=now, devices=devices)

        def write() -> list[Claim]:
            self._refuse_held(devices)
            self._refuse_attached(made)
            self._drop_holds_of(claim.ref.uid)
            rows.insert(self._db, "claims", [rows.claim_columns(made)], replace=True)
            rows.insert(self._db, "holds", map(rows.hold_columns, devices))
            self._insert_devices(devices)
            return [made]

        with self._guard_of_holds(devices):
            self._write(write, durable=False, then=self._put_claims)
        return made

    def set_claim_state(self, uid: str, state: ClaimState) -> None:
        """Write how far kubelet has come with a claim. Raises LedgerError for one that is not in the books."""
        self._change_claim(uid, state=state, since=self._clock())

    def set_claim_pods(self, uid: str, pods: Iterable[PodRef]) -> None:
        """Write for which pods a claim is reserved now. Raises LedgerError for one that is not in the books."""
        self._change_claim(uid, pods=tuple(pods))

    def remove_claim(self, uid: str) -> None:
        """Forget a claim and its devices. One that is not there is gone already."""

        def write() -> list[str]:
            self._db.execute("DELETE FROM claims WHERE claim_uid = :claim_uid", {"claim_uid": uid})
            return self._drop_holds_of(uid)

        def follow(keys: list[str]) -> None:
            self._claims.remove([uid])
            self._holds.remove(keys)

        self._write(write, durable=False, then=follow)

    # ------------------------------------------------------------------------------------------------- attachments

    def begin_attach(
        self,
        owner: Owner,
        *,
        ifname: str,
        device: str,
        resource_name: str,
        undo: Undo,
        netns_path: str,
        request: Mapping[str, Any],
        claim_uid: str = "",
        unit_id: str = "",
        durable: bool = True,
    ) -> Attachment:
        """Write the *attaching* row, and the pod of the unit or slot. From its return on the hardware may be touched.

        `claim_uid` names the DRA claim that brings the device. With `durable`, addresses may be leased for it, too.
        Raises DeviceBusy if any attachment of the device exists, if a claim that is not the pod's has it alone, and
        for a claim that is not prepared.
        """
        row = Attachment(
            attachment_id=next(self._ids),
            owner=owner,
            ifname=ifname,
            device=device,
            resource_name=resource_name,
            state=AttachmentState.ATTACHING,
            undo=undo,
            boot_id=self.boot_id,
            netns_path=netns_path,
            request=dict(request),
            result=None,
            since=self._clock(),
            claim_uid=claim_uid,
        )

        columns = rows.attachment_columns(row)  # before others wait for the file

        def write() -> list[Hold]:
            if claim_uid:
                self._refuse_unprepared(claim_uid)
            self._refuse_others_claim(device, owner.pod)
            self._insert(columns)
            hold = self._holds.get(unit_id)
            # A slot that another sandbox has by now stays that one's: this ADD took long.
            is_its = hold is not None and hold.container_id in ("", owner.container_id)
            named = [replace(hold, pod=owner.pod)] if hold is not None and is_its and hold.pod != owner.pod else []
            rows.update(self._db, "holds", "key", map(rows.pod_of_hold, named))
            return named

        def follow(named: list[Hold]) -> None:
            self._holds.put(named)
            self._attachments.put([row])

        self._write(write, durable, follow)
        return row

    def adopt(self, row: Attachment) -> Attachment:
        """Write the row of a device that came into its pod by other hands, or before the books were lost.

        *attached* where its pod lives, *detaching* where only the undoing is left. In one step: a row that
        a crash left *attaching* would be undone under the pod. With another `boot_id` than the present one
        the hardware is left alone. Number and time are the books'. Raises DeviceBusy if any attachment of the device
        exists.
        """
        made = replace(row, attachment_id=next(self._ids), since=self._clock())
        self._write(lambda: self._insert(rows.attachment_columns(made)), then=lambda _: self._attachments.put([made]))
        return made

    def finish_attach(self, attachment_ids: Iterable[int], result: Mapping[str, Any]) -> None:
        """Turn *attaching* rows into *attached*, all or none, with the CNI result that will be answered."""
        ids = tuple(attachment_ids)

        def attached() -> list[Attachment]:
            now = self._clock()
            return [
                replace(row, state=AttachmentState.ATTACHED, result=dict(result), since=now)
                for row in map(self._attaching, ids)
            ]

        self._update_attachments(attached, "state", "result", "since")

    def note(self, facts: Mapping[int, Mapping[str, Any]]) -> None:
        """Write down what was found out of devices in their pods: attachment ID → what joins its request."""
        self._update_attachments(
            lambda: [replace(r, request={**r.request, **facts[r.attachment_id]}) for r in self._rows(facts)], "request"
        )

    def begin_detach(self, attachment_ids: Iterable[int]) -> None:
        """Mark rows *detaching*: a promise to undo them that survives a crash."""
        ids = tuple(attachment_ids)

        def leaving() -> list[Attachment]:
            now = self._clock()
            return [replace(row, state=AttachmentState.DETACHING, since=now) for row in self._rows(ids)]

        self._update_attachments(leaving, "state", "since")

    def finish_detach(self, row: Attachment, *, lease_owed: bool = False) -> None:
        """Drop the row of a device that is back, and end its quarantine.

        With `lease_owed`, keep in the same step that its addresses are still to be given back.
        """

        def write() -> list[int]:
            gone = {"attachment_id": row.attachment_id, "device": row.device}
            self._db.execute("DELETE FROM attachments WHERE attachment_id = :attachment_id", gone)
            self._db.execute("DELETE FROM quarantine WHERE device = :device", gone)
            if lease_owed:
                of = row.owner.container_id, row.ifname
                rows.owe_lease(self._db, *of, row.netns_path, row.request, self._clock())
            return [row.attachment_id]

        self._write(write, durable=False, then=self._attachments.remove)

    def attachments(self) -> tuple[Attachment, ...]:
        """List all attachments, oldest first."""
        return self._attachments.all()

    def attachments_of(self, container_id: str, cni_ifname: str) -> tuple[Attachment, ...]:
        """List what one CNI call's sandbox and interface owns."""
        return tuple(
            row
            for row in self.attachments()
            if row.owner.container_id == container_id and row.owner.cni_ifname == cni_ifname
        )

    def attachments_of_claim(self, claim: Claim) -> tuple[Attachment, ...]:
        """List what is in pods of a claim, or of the devices that it has alone."""
        return tuple(row for row in self.attachments() if row.claim_uid == claim.ref.uid or row.device in claim.alone)

    def has_interface(self, container_id: str, ifname: str) -> bool:
        """Tell whether a container has, or is being given, an interface of this name."""
        return any(row.owner.container_id == container_id and row.ifname == ifname for row in self.attachments())

    def attachment_on(self, device: str) -> Attachment | None:
        """Return the attachment of a device, whoever owns it."""
        found = self._attachments.of_device(device)
        return found[0] if found else None

    # --------------------------------------------------------------------------------------------------- writing

    def _refuse_held(self, holds: Sequence[Hold]) -> None:
        """Raise ClaimConflict for a device that another hold than these excludes. For writers, in their transaction.

        Slots that are bound anew together may exchange their devices.
        """
        written = {hold.key for hold in holds}
        for hold in holds:
            if not (self._claims or hold.is_slot or hold.claim_uid):
                continue  # units exclude none but claims, and many have a part of one adapter
            for device in hold.devices:
                for other in self._holds.of_device(device):
                    if other.key not in written and hold.excludes(other):
                        raise ClaimConflict(device, self._how(other))

    def _how(self, hold: Hold) -> str:
        claim = self._claims.get(hold.claim_uid)
        return how_held(hold, claim) + ("" if claim is not None else f" ({hold.key} of {hold.resource_name})")

    def _known(self, keys: Iterable[str]) -> tuple[Hold, ...]:
        return tuple(hold for hold in map(self._holds.get, keys) if hold is not None)

    def _change_holds(self, changed: Callable[[], Sequence[Hold]]) -> None:
        """Write what `changed` makes of holds that are there, looked up in the transaction."""

        def write() -> Sequence[Hold]:
            found = changed()
            self._put_rows(found)
            return found

        self._write(write, durable=False, then=self._follow)

    def _follow(self, holds: Sequence[Hold]) -> None:
        """Have memory follow what was written of holds that were there."""
        self._holds.put(holds)
        of_claims = {hold.key: hold for hold in holds if hold.claim_uid}
        uids = {hold.claim_uid for hold in of_claims.values()}
        claims = [claim for uid in uids if (claim := self._claims.get(uid)) is not None]
        self._claims.put(replace(c, devices=tuple(of_claims.get(h.key, h) for h in c.devices)) for c in claims)

    def _put_rows(self, holds: Iterable[Hold]) -> None:
        """Write rows in place of those with the same keys. Raises ClaimConflict if two have one device alone."""
        found = tuple(holds)
        rows.insert(self._db, "holds", map(rows.hold_columns, found), replace=True)
        before = {hold.key: self._holds.get(hold.key) for hold in found}
        moved = [
            hold
            for hold in found
            if (known := before[hold.key]) is None or known.devices != hold.devices or hold.is_slot
        ]
        self._db.executemany("DELETE FROM hold_devices WHERE key = :key", [{"key": hold.key} for hold in moved])
        self._insert_devices(moved)

    def _insert_devices(self, holds: Sequence[Hold]) -> None:
        """Write the devices of holds. What slots had in another boot goes: it may be a claim's, too, by now."""
        void = [{"key": key} for key in self._void if (known := self._holds.get(key)) is None or not known.devices]
        self._db.executemany("DELETE FROM hold_devices WHERE key = :key", void)
        try:
            rows.insert(self._db, "hold_devices", (each for hold in holds for each in rows.device_columns(hold)))
        except sqlite3.IntegrityError as error:
            devices = ", ".join(device for hold in holds for device in hold.devices)
            raise ClaimConflict(devices, "held by another slot or claim, or another request of this one") from error

    def _drop_rows(self, keys: Iterable[str]) -> None:
        gone = [{"key": key} for key in keys]
        self._db.executemany("DELETE FROM holds WHERE key = :key", gone)
        self._db.executemany("DELETE FROM hold_devices WHERE key = :key", gone)

    def _put_claims(self, claims: Iterable[Claim]) -> None:
        """Have memory follow what was written: claims that are new or other ones, with their holds."""
        made = tuple(claims)
        before = {hold.key for claim in made if (known := self._claims.get(claim.ref.uid)) for hold in known.devices}
        self._claims.put(made)
        now = {hold.key: hold for claim in made for hold in claim.devices}
        self._holds.remove(before - now.keys())
        self._holds.put(now.values())

    def _change_claim(self, uid: str, **changes: Any) -> None:
        def write() -> list[Claim]:
            claim = self._claims.get(uid)
            if claim is None:
                raise LedgerError(f"claim {uid} is not in the books")
            changed = replace(claim, **changes)
            rows.insert(self._db, "claims", [rows.claim_columns(changed)], replace=True)
            return [changed]

        self._write(write, durable=False, then=self._put_claims)

    def _drop_holds_of(self, uid: str) -> list[str]:
        claim = self._claims.get(uid)
        keys = [hold.key for hold in (claim.devices if claim is not None else ())]
        self._drop_rows(keys)
        return keys

    def _refuse_attached(self, claim: Claim) -> None:
        """Raise ClaimConflict for a device that is in a pod that the claim is not for."""
        for device in (device for hold in claim.devices if not hold.admin for device in hold.devices):
            for row in self._attachments.of_device(device):
                if not claim.is_for(row.owner.pod):
                    leaving = ", from which it is on its way back" if row.state is AttachmentState.DETACHING else ""
                    how = f"attached to {row.owner.pod} (sandbox {row.owner.container_id}{leaving})"
                    raise ClaimConflict(device, how)

    def _refuse_unprepared(self, claim_uid: str) -> None:
        claim = self._claims.get(claim_uid)
        if claim is None or claim.state is not ClaimState.PREPARED:
            what = f"claim {claim.ref} is {claim.state}" if claim is not None else f"claim {claim_uid} is gone"
            raise DeviceBusy(f"{what}, so nothing of it comes into a pod now")

    def _refuse_others_claim(self, device: str, pod: PodRef) -> None:
        for hold in self._holds.of_device(device):
            claim = self._claims.get(hold.claim_uid) if hold.exclusive and not hold.admin else None
            if claim is not None and not claim.is_for(pod):
                raise DeviceBusy(f"{device} is prepared for claim {claim.ref}, which is not of pod {pod}")

    def _insert(self, columns: Mapping[str, Any]) -> None:
        try:
            rows.insert(self._db, "attachments", [columns])
        except sqlite3.IntegrityError as error:
            raise DeviceBusy(f"{columns['device']} has an attachment in the ledger already") from error

    def _update_attachments(self, changed: Callable[[], list[Attachment]], *names: str) -> None:
        """Write what `changed` makes of rows that are there, looked up in the transaction: the fields of these names.

        A pod waits for it, and what such a row holds takes time to be spelt.
        """

        def write() -> list[Attachment]:
            found = changed()
            columns = (rows.cells(row, "attachment_id", *names) for row in found)
            rows.update(self._db, "attachments", "attachment_id", columns)
            return found

        self._write(write, durable=False, then=self._attachments.put)

    def _attaching(self, row_id: int) -> Attachment:
        row = self._attachments.get(row_id)
        if row is None or row.state is not AttachmentState.ATTACHING:
            raise LedgerError(f"attachment {row_id} is not in state attaching")
        return row

    def _rows(self, attachment_ids: Iterable[int]) -> tuple[Attachment, ...]:
        found = map(self._attachments.get, attachment_ids)
        return tuple(row for row in found if row is not None)

    def _load(self) -> None:
        holds, claims = rows.holds_and_claims(self._read)
        void = {hold.key for hold in holds if hold.bound_at and hold.boot_id != self.boot_id}
        self._void = tuple(void)
        self._holds.put(_without_device(hold) if hold.key in void else hold for hold in holds)
        self._put_claims(claims)
        self._attachments.put(rows.attachments(self._read))
        (last,) = self._read("SELECT max(seq) FROM sqlite_sequence WHERE name = 'attachments'")[0]
        self._ids = itertools.count((last or 0) + 1)


def _without_device(slot: Hold) -> Hold:
    return Hold(slot.key, slot.resource_name, since=slot.since, pod=slot.pod)
