"""Holds in line with who has the last word on them: kubelet on units, sandboxes on bound slots. And after a reboot that
renumbered devices, all holds in line with where these are now.

Claims end by their objects (`agent.reconcile.claims`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from agent.edits.specs import Specs
from agent.errors import AgentError, ClaimConflict
from agent.kubelet.checkpoint import Entry
from agent.kubelet.podresources import HeldUnit
from agent.ledger import Ledger
from agent.model.allocation import Attachment, Claim, Hold, PodRef
from agent.model.device import Snapshot
from agent.model.unit_id import UnitId
from agent.model.vf_identity import addresses, moved
from agent.reconcile.view import Outside, View
from agent.state import Latest
from cni.pods_file import PodsFile

ENDED_PAUSES = (0.3, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before each time that kubelet is asked after a pod's DEL."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A pod of which a sandbox's network was taken down."""

    pod: PodRef
    at: float
    """When its DEL came, in seconds since the epoch."""


class EndedPods:
    """Pods whose network was taken down, and when to ask kubelet whether it lists them still.

    kubelet counts a pod for a moment after its DEL, until its end has reached the API server, and tells nobody when
    that is over. So it is asked some times after the last DEL, later and later; after that the usual look finds out.
    Any thread may note pods; the rest is for the reconciler.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float], pauses: Sequence[float] = ENDED_PAUSES) -> None:
        """`clock` tells the time as the books have it."""
        self._ledger = ledger
        self._clock = clock
        self._pauses = pauses
        self._guard = threading.Lock()
        self._ended: Latest[tuple[Ended, ...]] = Latest(())
        self._asked: tuple[Ended, ...] = ()
        """Those that kubelet is being asked about."""
        self._left: Sequence[float] = ()
        """The pauses before it is asked again."""

    def note(self, pod: PodRef, spooled_at: float | None = None) -> None:
        """Note that a DEL has come for a pod, now or when it was put on disk. Does not block."""
        ended = Ended(pod, self._clock() if spooled_at is None else spooled_at)
        with self._guard:
            self._ended.set((*(one for one in self.pods() if one.pod != pod), ended))

    def pods(self) -> tuple[Ended, ...]:
        """List the pods that kubelet may have stopped to list."""
        return self._ended.value

    async def due(self) -> None:
        """Return when kubelet is to be asked."""
        try:
            async with asyncio.timeout(self._left[0] if self._left else None):
                self._asked = await self._ended.other_than(self._asked)
        except TimeoutError:
            self._left = self._left[1:]
        else:
            first, *self._left = self._pauses
            await asyncio.sleep(first)

    def looked(self) -> None:
        """Take note that kubelet was asked. Who holds nothing, or was asked about often enough, is forgotten."""
        holds = self._ledger.holds()
        holders = {hold.pod.names for hold in holds if hold.pod is not None}
        any_unknown = any(hold.pod is None for hold in holds)
        asked = [one for one in self._asked if self._left and (any_unknown or one.pod.names in holders)]
        with self._guard:
            new = [one for one in self.pods() if one not in self._asked]
            self._asked = tuple(asked)
            self._ended.set((*asked, *new) if new else self._asked)
        if not asked:
            self._left = ()


UNCLAIMED_SECONDS = 60.0
"""How old a grant must be before its absence from PodResources means that no pod has it."""
SANDBOX_SECONDS = 240.0
"""How long a runtime may take from the ADD until it lists the sandbox: kubelet gives it as long to make one (twice its
runtimeRequestTimeout). containerd lists a sandbox when all of it stands."""


@dataclass(frozen=True, slots=True)
class TakeOver:
    """A pod has a unit that is not in the books."""

    held: HeldUnit
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Bind:
    """A unit's pod is known now, or is another one."""

    held: HeldUnit


@dataclass(frozen=True, slots=True)
class Release:
    """No pod has the unit."""

    unit_id: str


@dataclass(frozen=True, slots=True)
class Move:
    """The unit stands for a device that has another address now."""

    unit_id: str
    devices: tuple[str, ...]
    reason: str


Offered = Mapping[str, tuple[str, ...]]
"""Unit ID → devices."""
Action = TakeOver | Bind | Release | Move

log = logging.getLogger(__name__)


class Grants:
    """Brings the holds of the books in line with who has the last word on them, but for the end of claims.

    What kubelet's PodResources says counts from when it was asked, not by the clock of now: healing may have taken
    minutes, in which pods were granted units.
    """

    name = "grants"

    def __init__(
        self, ledger: Ledger, specs: Specs, snapshot: Latest[Snapshot], outside: Outside, settled: Latest[bool]
    ) -> None:
        """`settled` becomes true once the grants have agreed with kubelet's word since the start."""
        self.ended = EndedPods(ledger, outside.now)
        """Pods whose DEL has come."""
        self.settled = settled
        self.is_too_early = False
        """Whether there were no device lists yet to compare kubelet's word with."""
        self._ledger = ledger
        self._specs = specs
        self._snapshot = snapshot
        self._outside = outside
        self._moved: Mapping[str, str] | None = None
        """Where the VFs of the last boot are now: old address → new; None until worked out."""

    def heal(self, view: View) -> None:
        """Compare, units only if kubelet has answered. Raises AgentError."""
        self._follow_reboot()
        holds = self._ledger.holds()
        noted = self._outside.noted() if any(_is_nameless(h) or _has_no_sandbox(h, view) for h in holds) else ()
        rows = self._ledger.attachments()
        self._let_go([hold for hold in holds if hold.is_bound and is_over(hold, view, rows, noted)])
        if view.held_units is None:
            return
        offered = self._outside.devices_of_units()
        self.is_too_early = offered is None
        self._date_again()
        for action in decide(
            self._ledger.holds(),
            view.held_units,
            offered=offered,
            attached={row.device for row in rows},
            moved=self._moved or {},
            asked_at=view.asked_at,
            unclaimed_before=view.asked_at - UNCLAIMED_SECONDS,
            ended=self.ended.pods(),
            noted={unit for entry in noted or () for unit in entry.unit_ids},
        ):
            self._carry_out(action, view.asked_at)
        if offered is not None:
            self.settled.set(True)

    def _follow_reboot(self) -> None:
        """Find out where devices of the last boot are, once, and have claims follow theirs at once."""
        snapshot = self._snapshot.value
        if not snapshot.boot_id:
            return  # nothing was scanned yet
        if self._moved is None:
            self._moved = moved(self._ledger.known_devices(), snapshot)
            for before, now in self._moved.items():
                log.warning("the VF that was %s before the reboot is %s now", before, now)
        claims = self._ledger.claims()
        if not (there := moved_of_claims(claims, snapshot)):
            return
        try:
            self._ledger.move(there)
        except ClaimConflict as error:
            log.error("claims do not follow their devices: %s", error)
            return
        for claim in claims:
            if any(hold.key in there for hold in claim.devices):
                log.warning("devices of claim %s have other addresses since the node was booted", claim.ref)
                self._outside.count("claim-move", "renumbered")

    def _let_go(self, over: Sequence[Hold]) -> None:
        for slot in self._specs.let_go(over) if over else ():
            log.warning("%s was still bound for pod %s, which is gone", slot.key, slot.pod)
            self._outside.count("slot-release", "sandbox-gone")

    def _date_again(self) -> None:
        """Grant once more what was granted at a time to come: the clock was set back.

        Until that time kubelet's word on it would be taken for older than the grant.
        """
        latest = self._outside.now() + UNCLAIMED_SECONDS
        for hold in self._ledger.holds():
            if hold.since > latest:
                log.warning("the clock was set back since %s was granted", hold.key)
                self._ledger.date_again(hold.key)

    def _carry_out(self, action: Action, asked_at: float) -> None:
        match action:
            case TakeOver(held, devices):
                if self._ledger.hold(held.unit_id) is not None:
                    return  # it was granted meanwhile, or bound
                try:
                    self._ledger.grant([Hold(held.unit_id, held.resource_name, devices)])
                except ClaimConflict as error:
                    log.error("kubelet counts %s to pod %s, and %s", held.unit_id, held.pod, error)
                    return
                log.warning("%s of %s was not in the ledger; taken over", held.unit_id, held.pod)
                self._ledger.bind([held.unit_id], held.pod)
                self._outside.count("grant-adopt", "claimed")
            case Bind(held):
                self._ledger.bind([held.unit_id], held.pod)
                self._outside.count("grant-bind", "claimed")
            case Release(unit_id):
                log.info("%s is free again: kubelet counts it to no pod", unit_id)
                self._ledger.release([unit_id], granted_before=asked_at)
                self._outside.count("grant-release", "unclaimed")
            case Move(unit_id, devices, reason):
                log.warning("unit %s stands for %s now: %s", unit_id, ", ".join(devices), reason)
                self._ledger.move({unit_id: devices})
                self._outside.count("grant-move", reason)


def decide(
    holds: Sequence[Hold],
    held_units: Sequence[HeldUnit],
    *,
    offered: Offered | None,
    attached: Collection[str],
    moved: Mapping[str, str],
    asked_at: float,
    unclaimed_before: float,
    ended: Sequence[Ended] = (),
    noted: Collection[str] = (),
) -> tuple[Action, ...]:
    """Compare units and slots with kubelet's word, which is the authority on who holds a unit.

    `offered` maps unit IDs to devices, None before the first offer; `attached` are devices in pods, whose
    holds stay whatever kubelet has forgotten: one that has restarted while the API server is away knows
    no pods, though they run. `moved` maps addresses of the last boot to where those VFs are now. Kubelet was asked
    at `asked_at`: of what was granted since it has said nothing. What it does not count to a pod any more is free if
    the grant is old, or known to be that of a pod that has `ended`: of a new one kubelet may tell late. Of init
    containers it never tells: what they alone have stays, with its CDI spec, while its checkpoint has it (`noted`). A
    slot that is bound is its sandbox's, whatever kubelet says, until that is over.
    """
    granted = {hold.key: hold for hold in holds}
    actions: list[Action] = []
    for held in held_units:
        hold = granted.get(held.unit_id)
        if hold is not None and _is_to_bind(hold, held, asked_at):
            actions.append(Bind(held))
        elif hold is None and offered is not None and held.unit_id in offered:
            actions.append(TakeOver(held, () if UnitId.parse(held.unit_id).is_slot else offered[held.unit_id]))
    claimed = {held.unit_id for held in held_units}
    gone = {
        hold.key
        for hold in holds
        if hold.key not in claimed
        and not hold.is_bound
        and not any(device in attached for device in hold.devices)
        and not (_is_nameless(hold) and hold.key in noted)
        and (hold.since < unclaimed_before or any(_is_of(hold, one, asked_at) for one in ended))
    }
    actions += [Release(unit) for unit in sorted(gone)]
    if offered is not None:
        kept = [h for h in holds if h.key not in gone and not any(device in attached for device in h.devices)]
        actions += _moves(kept, held_units, offered, moved)
    return tuple(actions)


def _is_to_bind(hold: Hold, held: HeldUnit, asked_at: float) -> bool:
    """Tell whether kubelet names another pod for what it had granted when it was asked than the books do."""
    return hold.since < asked_at and not hold.is_bound and (hold.pod is None or hold.pod.names != held.pod.names)


def _is_nameless(hold: Hold) -> bool:
    """Tell whether nobody has said which pod has a unit whose container needs its CDI spec for each start."""
    return hold.pod is None and hold.spec is not None


def _has_no_sandbox(hold: Hold, view: View) -> bool:
    """Tell whether a slot is bound for a sandbox that the runtime has not told of."""
    return hold.is_bound and not (hold.container_id and view.sandboxes is not None)


def _moves(
    holds: Sequence[Hold],
    held_units: Sequence[HeldUnit],
    offered: Offered,
    moved: Mapping[str, str],
) -> list[Move]:
    """List the units whose device is elsewhere. A slot's is chosen for its pod, and void in another boot.

    A unit that is offered is what kubelet takes it for, whatever was there in the last boot: the container
    was told this address. One that is not offered any more, since its address is gone, follows its VF to
    where that is now, unless somebody else was given that.
    """
    moves = []
    known = {*(c.unit_id for c in held_units), *(hold.key for hold in holds)} & offered.keys()
    taken = {device for key in known for device in offered[key]}
    for hold in holds:
        if hold.is_slot:
            continue
        if hold.key in offered:
            if offered[hold.key] != hold.devices:
                moves.append(Move(hold.key, offered[hold.key], "offered-elsewhere"))
            continue
        targets = tuple(moved.get(device, device) for device in hold.devices)
        if targets != hold.devices and taken.isdisjoint(moved[device] for device in hold.devices if device in moved):
            taken.update(targets)
            moves.append(Move(hold.key, targets, "renumbered"))
    return moves


def _is_of(hold: Hold, ended: Ended, asked_at: float) -> bool:
    """Tell whether a unit was a pod's that ended before kubelet was asked. Its name may be another pod's by now."""
    if hold.pod is None or hold.pod.names != ended.pod.names or not hold.since < ended.at <= asked_at:
        return False
    return "" in (hold.pod.uid, ended.pod.uid) or hold.pod.uid == ended.pod.uid


def is_over(slot: Hold, view: View, rows: Collection[Attachment] = (), noted: Sequence[Entry] | None = ()) -> bool:
    """Tell whether the sandbox that a slot is bound for is no more, for certain.

    A kubelet that has restarted while the API server is away lists none but static pods, though the others run. It
    strikes nothing off its checkpoint (`noted`; None if it cannot be read) before it knows them again.
    """
    if slot.bound_at >= view.asked_at:
        return False  # its ADD may have begun since
    if any((row.owner.container_id, row.device) == (slot.container_id, slot.device) for row in rows):
        return False
    if view.sandboxes is not None and slot.container_id:
        is_new = slot.bound_at >= view.asked_at - SANDBOX_SECONDS
        return not is_new and all(sandbox.sandbox_id != slot.container_id for sandbox in view.sandboxes)
    if not view.pods or noted is None:
        return False
    if slot.pod is None or slot.pod.names in view.pods:
        return False
    return not any(slot.key in entry.unit_ids and slot.pod.uid in ("", entry.pod_uid) for entry in noted)


def moved_of_claims(claims: Iterable[Claim], snapshot: Snapshot) -> Mapping[str, tuple[str, ...]]:
    """Map the holds of claims of earlier boots whose devices are elsewhere now to where these are.

    A device that is found nowhere keeps its address.
    """
    before = [hold for claim in claims if claim.boot_id != snapshot.boot_id for hold in claim.devices]
    now = addresses(snapshot) if before else {}
    there = ((hold, tuple(now.get(hold.identity, device) for device in hold.devices)) for hold in before)
    return {hold.key: devices for hold, devices in there if devices != hold.devices}


OWNER_PAUSES = (0.1, 0.3, 1.0)
"""Seconds before each time that kubelet is asked, which answers from memory."""


class Owners:
    """Names the pods of grants while there are some that nobody is known to have. `run` until cancelled."""

    def __init__(
        self, ledger: Ledger, holders: PodsFile, outside: Outside, pauses: Sequence[float] = OWNER_PAUSES
    ) -> None:
        self._ledger = ledger
        self._holders = holders
        self._outside = outside
        self._pauses = pauses

    async def run(self) -> None:
        """Ask kubelet after each change of the books, a few times, for as long as a grant's pod is unknown."""
        changed = Latest(object())
        self._ledger.subscribe(lambda: changed.set(object()) if self._holders.has_unknown else None)
        while True:
            last = changed.value
            for pause in self._pauses:
                await asyncio.sleep(pause)
                if not self._holders.has_unknown:
                    break
                asked_at = self._outside.now()
                try:
                    await asyncio.to_thread(self._bind, await self._outside.held_units(), asked_at)
                except AgentError as error:
                    log.debug("the pods of new grants are not known yet: %s", error)
            await changed.other_than(last)

    def _bind(self, held_units: Sequence[HeldUnit], asked_at: float) -> None:
        """Name the pods that hold granted units. What else there is to settle is left to the reconciler."""
        units: dict[PodRef, list[str]] = {}
        for held in held_units:
            hold = self._ledger.hold(held.unit_id)
            if hold is not None and _is_to_bind(hold, held, asked_at):
                units.setdefault(held.pod, []).append(held.unit_id)
        for pod, unit_ids in units.items():
            self._ledger.bind(unit_ids, pod)
            self._outside.count("grant-bind", "claimed")
