"""Grants that kubelet does not know of, knows otherwise, or names by an address that moved."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from agent.errors import AgentError, ClaimConflict
from agent.kubelet.podresources import HeldUnit
from agent.ledger import Ledger
from agent.model.allocation import Devices, Grant, PodRef, all_of
from agent.model.unit_id import UnitId
from agent.reconcile.view import Outside, View
from agent.state import Latest
from cni.pods_file import PodsFile

ENDED_PAUSES = (0.3, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds until kubelet is asked about a pod, and again, and again."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A pod of which a sandbox's network was taken down."""

    pod: PodRef
    at: float
    """When its DEL came, in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    ended: Ended
    looks: int
    due: float
    """By a clock that nobody sets."""


class EndedPods:
    """Pods whose network was taken down, and when to ask kubelet whether it lists them still.

    kubelet counts a pod for a moment after its DEL, until its end has reached the API server, and tells nobody when
    that is over. So it is asked some times, later and later; after that the usual look finds out. Any thread may note
    pods; the rest is for the reconciler.
    """

    def __init__(
        self, ledger: Ledger, clock: Callable[[], float], uptime: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` tells the time as the books have it."""
        self._ledger = ledger
        self._clock = clock
        self._uptime = uptime
        self._guard = threading.Lock()
        self._waiting: dict[PodRef, _Waiting] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._noted = asyncio.Event()

    def note(self, pod: PodRef, spooled_at: float | None = None) -> None:
        """Note that a DEL has come for a pod, now or when it was put on disk. Does not block."""
        ended = Ended(pod, self._clock() if spooled_at is None else spooled_at)
        with self._guard:
            self._waiting[pod] = _Waiting(ended, 0, self._uptime() + ENDED_PAUSES[0])
            loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._noted.set)

    def pods(self) -> tuple[Ended, ...]:
        """List the pods that kubelet may have stopped to list."""
        with self._guard:
            return tuple(waiting.ended for waiting in self._waiting.values())

    async def due(self) -> None:
        """Return when kubelet is to be asked."""
        with self._guard:
            self._loop = asyncio.get_running_loop()
        while True:
            self._noted.clear()
            with self._guard:
                first = min((waiting.due for waiting in self._waiting.values()), default=None)
            seconds = None if first is None else first - self._uptime()
            if seconds is not None and seconds <= 0:
                return
            try:
                async with asyncio.timeout(seconds):
                    await self._noted.wait()
            except TimeoutError:
                continue

    def looked(self) -> None:
        """Take note that kubelet was asked. Who holds nothing, or was asked about often enough, is forgotten."""
        grants, now = self._ledger.grants(), self._uptime()
        holders = {(grant.pod.namespace, grant.pod.name) for grant in grants if grant.pod is not None}
        any_unknown = any(grant.pod is None for grant in grants)
        with self._guard:
            for pod, waiting in tuple(self._waiting.items()):
                if waiting.due > now:
                    continue
                looks = waiting.looks + 1
                if looks == len(ENDED_PAUSES) or not (any_unknown or (pod.namespace, pod.name) in holders):
                    del self._waiting[pod]
                else:
                    self._waiting[pod] = replace(waiting, looks=looks, due=now + ENDED_PAUSES[looks])


UNCLAIMED_SECONDS = 60.0
"""How old a grant must be before its absence from PodResources means that no pod has it."""


@dataclass(frozen=True, slots=True)
class TakeOver:
    """A pod has a unit that is not in the books."""

    held: HeldUnit
    devices: Devices


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
    devices: Devices
    reason: str


Action = TakeOver | Bind | Release | Move
Moved = Mapping[str, str] | None
"""Where the VFs of the last boot are now: old address → new; None until worked out."""

log = logging.getLogger(__name__)


class Grants:
    """Brings the grants of the books in line with kubelet's PodResources, the authority on who holds a unit.

    What it says counts from when it was asked, not by the clock of now: healing may have taken minutes, in which pods
    were granted units.
    """

    name = "grants"

    def __init__(
        self, ledger: Ledger, outside: Outside, ended: EndedPods, moved: Latest[Moved], settled: Latest[bool]
    ) -> None:
        """`moved` tells where the VFs of the last boot are; `settled` becomes true once the grants have agreed with
        kubelet's word since the start."""
        self.is_too_early = False
        """Whether there were no device lists yet to compare kubelet's word with."""
        self._ledger = ledger
        self._outside = outside
        self._ended = ended
        self._moved = moved
        self._settled = settled

    def heal(self, view: View) -> None:
        """Compare, if kubelet has answered."""
        if view.held_units is None:
            return
        offered = self._outside.devices_of_units()
        self.is_too_early = offered is None
        try:
            self._settle(view, view.held_units, offered)
        except AgentError as error:
            log.error("grants are not settled: %s", error)
        else:
            if offered is not None:
                self._settled.set(True)

    def _settle(self, view: View, held_units: Sequence[HeldUnit], offered: Mapping[str, Devices] | None) -> None:
        self._date_again()
        grants = self._ledger.grants()
        for action in decide(
            grants,
            held_units,
            offered=offered,
            attached={row.device for row in self._ledger.attachments()},
            moved=self._moved.value or {},
            asked_at=view.asked_at,
            unclaimed_before=view.asked_at - UNCLAIMED_SECONDS,
            ended=self._ended.pods(),
            noted=self._outside.noted_units() if any(_is_nameless(g) for g in grants) else (),
        ):
            self._carry_out(action, view.asked_at)

    def _date_again(self) -> None:
        """Grant once more what was granted at a time to come: the clock was set back.

        Until that time kubelet's word on it would be taken for older than the grant.
        """
        latest = self._outside.now() + UNCLAIMED_SECONDS
        for grant in self._ledger.grants():
            if grant.granted_at > latest:
                log.warning("the clock was set back since %s was granted", grant.unit_id)
                self._ledger.grant(grant.resource_name, {grant.unit_id: grant.devices})
                if grant.pod is not None:
                    self._ledger.bind([grant.unit_id], grant.pod)

    def _carry_out(self, action: Action, asked_at: float) -> None:
        match action:
            case TakeOver(held, devices):
                try:
                    self._ledger.grant(held.resource_name, {held.unit_id: devices})
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
                log.warning("unit %s stands for %s now: %s", unit_id, ", ".join(all_of(devices)), reason)
                self._ledger.move_grants({unit_id: devices})
                self._outside.count("grant-move", reason)


def decide(
    grants: Sequence[Grant],
    held_units: Sequence[HeldUnit],
    *,
    offered: Mapping[str, Devices] | None,
    attached: Collection[str],
    moved: Mapping[str, str],
    asked_at: float,
    unclaimed_before: float,
    ended: Sequence[Ended] = (),
    noted: Collection[str] = (),
) -> tuple[Action, ...]:
    """Compare the grants with kubelet's word, which is the authority on who holds a unit.

    `offered` maps unit IDs to devices, None before the first offer; `attached` are devices in pods, whose
    grants stay whatever kubelet has forgotten: one that has restarted while the API server is away knows
    no pods, though they run. `moved` maps addresses of the last boot to where those VFs are now. Kubelet was asked
    at `asked_at`: of what was granted since it has said nothing. What it does not count to a pod any more is free if
    the grant is old, or known to be that of a pod that has `ended`: of a new one kubelet may tell late. Of init
    containers it never tells: what they alone have stays, with its CDI spec, while its checkpoint has it (`noted`).
    """
    granted = {grant.unit_id: grant for grant in grants}
    actions: list[Action] = []
    for held in held_units:
        grant = granted.get(held.unit_id)
        if grant is not None and grant.granted_at >= asked_at:
            continue
        if grant is None and offered is not None and held.unit_id in offered:
            actions.append(TakeOver(held, offered[held.unit_id]))
        elif grant is not None and (grant.pod is None or _differs(grant.pod, held.pod)):
            actions.append(Bind(held))
    claimed = {held.unit_id for held in held_units}
    gone = {
        grant.unit_id
        for grant in grants
        if grant.unit_id not in claimed
        and not any(device in attached for device in grant.devices)
        and not (_is_nameless(grant) and grant.unit_id in noted)
        and (grant.granted_at < unclaimed_before or any(_is_of(grant, one, asked_at) for one in ended))
    }
    actions += [Release(unit) for unit in sorted(gone)]
    if offered is not None:
        kept = [g for g in grants if g.unit_id not in gone and not any(device in attached for device in g.devices)]
        actions += _moves(kept, held_units, offered, moved)
    return tuple(actions)


def _is_nameless(grant: Grant) -> bool:
    """Tell whether nobody has said which pod has a unit whose container needs its CDI spec for each start."""
    return grant.pod is None and grant.spec is not None


def _moves(
    grants: Sequence[Grant], held_units: Sequence[HeldUnit], offered: Mapping[str, Devices], moved: Mapping[str, str]
) -> list[Move]:
    """List the grants whose device is elsewhere.

    A unit that is offered is what kubelet takes it for, whatever was there in the last boot: the container
    was told this address. One that is not offered any more, since its address is gone, follows its VF to
    where that is now, unless somebody else was given that.
    """
    moves = []
    known = {*(c.unit_id for c in held_units), *(g.unit_id for g in grants)} & offered.keys()
    taken = {device for unit_id in known for device in all_of(offered[unit_id])}
    for grant in grants:
        if grant.unit_id in offered:
            # A slot's device is chosen for its pod; an offer only repeats it, a moment later.
            if all_of(offered[grant.unit_id]) != grant.devices and not UnitId.parse(grant.unit_id).is_slot:
                moves.append(Move(grant.unit_id, offered[grant.unit_id], "offered-elsewhere"))
            continue
        targets = tuple(moved.get(device, device) for device in grant.devices)
        if targets != grant.devices and taken.isdisjoint(moved[device] for device in grant.devices if device in moved):
            taken.update(targets)
            moves.append(Move(grant.unit_id, targets, "renumbered"))
    return moves


def _is_of(grant: Grant, ended: Ended, asked_at: float) -> bool:
    """Tell whether a grant was a pod's that ended before kubelet was asked. Its name may be another pod's by now."""
    if grant.pod is None or _differs(grant.pod, ended.pod) or not grant.granted_at < ended.at <= asked_at:
        return False
    return "" in (grant.pod.uid, ended.pod.uid) or grant.pod.uid == ended.pod.uid


def _differs(known: PodRef, claimed: PodRef) -> bool:
    """PodResources knows no UID, so only names can be compared."""
    return (known.namespace, known.name) != (claimed.namespace, claimed.name)


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
        changed, loop = asyncio.Event(), asyncio.get_running_loop()

        def note() -> None:
            if self._holders.has_unknown:
                with contextlib.suppress(RuntimeError):  # the ledger may outlive the loop
                    loop.call_soon_threadsafe(changed.set)

        self._ledger.subscribe(note)
        note()
        while True:
            await changed.wait()
            changed.clear()
            for pause in self._pauses:
                await asyncio.sleep(pause)
                if not self._holders.has_unknown:
                    break
                asked_at = self._outside.now()
                try:
                    await asyncio.to_thread(self._bind, await self._outside.held_units(), asked_at)
                except AgentError as error:
                    log.debug("the pods of new grants are not known yet: %s", error)

    def _bind(self, held_units: Sequence[HeldUnit], asked_at: float) -> None:
        """Name the pods that hold granted units. What else there is to settle is left to the reconciler."""
        units: dict[PodRef, list[str]] = {}
        for action in decide(
            self._ledger.grants(),
            held_units,
            offered=None,
            attached=(),
            moved={},
            asked_at=asked_at,
            unclaimed_before=-math.inf,
        ):
            if isinstance(action, Bind):
                units.setdefault(action.held.pod, []).append(action.held.unit_id)
        for pod, unit_ids in units.items():
            self._ledger.bind(unit_ids, pod)
            self._outside.count("grant-bind", "claimed")
