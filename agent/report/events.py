"""Recent events: a bounded list in memory of what became of devices and pods, for people who look.

Grants and attachments are told by the ledger as they change, health by comparing one offer with the next,
the rest by whoever did it. Nothing waits for this: to note an event is to append to a list.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agent.model.allocation import Attachment, AttachmentState, Claim, ClaimRef, ClaimState, Hold, how_held
from agent.offer.offer import Units, health_changes

MOST_EVENTS = 200
SAME_SECONDS = 60.0
"""The same words again within this time are counted on the event that is there."""
MOST_FAILING = 1000
MOST_TEXT = 300
"""Characters kept of one text: some of it comes from outside."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened."""

    number: int
    """Counts up; a page that has seen one knows which are new."""
    at: float
    """Seconds since the epoch; of the last time, where `count` is more than one."""
    kind: str
    """grant, release, attach, detach, claim, health, reconcile or agent."""
    subject: str
    """A device, unit, claim, resource or part of the agent."""
    text: str
    warning: bool = False
    """Whether somebody should look at it."""
    count: int = 1


class Events:
    """The last `MOST_EVENTS` events. Any thread may note and read."""

    def __init__(self, clock: Callable[[], float] = time.time, most: int = MOST_EVENTS) -> None:
        self._clock = clock
        self._guard = threading.Lock()
        self._kept: deque[Event] = deque(maxlen=most)
        self._noted = 0
        self._failing: dict[str, str] = {}
        """UID of a claim → why it failed last."""

    @property
    def noted(self) -> int:
        """How often something was noted: it changes whenever the list does."""
        return self._noted

    def note(self, kind: str, subject: str, text: str, *, warning: bool = False) -> None:
        """Note an event. Never blocks for long, never raises."""
        now = self._clock()
        with self._guard:
            self._noted += 1
            event = Event(self._noted, now, kind, subject[:MOST_TEXT], text[:MOST_TEXT], warning)
            last = self._kept[-1] if self._kept else None
            if last is not None and _is_same(last, event):
                self._kept[-1] = replace(event, count=last.count + 1)
            else:
                self._kept.append(event)

    def listed(self) -> tuple[Event, ...]:
        """List the events, the newest first."""
        with self._guard:
            return tuple(reversed(self._kept))

    # ------------------------------------------------------ what others tell

    def hold_changed(self, before: Hold | None, after: Hold | None) -> None:
        """Note what became of a unit or slot; None where there is none."""
        if (hold := after or before) is None or hold.claim_uid:
            return  # a claim is told of as a whole
        if after is None:
            self.note("release", _unit(hold), f"no longer {how_held(hold)} ({hold.resource_name})")
        elif before is None or (before.pod, before.devices, before.since) != (after.pod, after.devices, after.since):
            self.note("grant", _unit(after), f"{how_held(after)} ({after.resource_name})")

    def attachment_changed(self, before: Attachment | None, after: Attachment | None) -> None:
        """Note what became of an attachment; None where there is none."""
        row = after or before
        if row is None:
            return
        where = f"{row.ifname} of {row.owner.pod}"
        if after is None:
            came = row.state is not AttachmentState.ATTACHING
            text = f"{where} is back in the host" if came else f"did not become {where}"
            self.note("detach", row.device, text, warning=not came)
        elif after.state is AttachmentState.ATTACHED and (before is None or before.state is not after.state):
            self.note("attach", row.device, f"is {where}")

    def claim_changed(self, before: Claim | None, after: Claim | None) -> None:
        """Note what became of a claim; None where there is none."""
        claim = after or before
        if claim is None:
            return
        devices = ", ".join(f"{found.device} ({found.resource_name})" for found in claim.devices) or "no device"
        if after is None:
            text = f"unprepared: {devices}"
        elif after.state is ClaimState.PREPARED and (before is None or before.state is not ClaimState.PREPARED):
            text = f"prepared for {', '.join(map(str, after.pods)) or 'no pod that is known'}: {devices}"
        else:
            return
        self.note("claim", str(claim.ref), text)
        self._failing.pop(claim.ref.uid, None)

    def claim_failed(self, ref: ClaimRef, text: str) -> None:
        """Note why a claim is not prepared, or not unprepared; kubelet tries again for ever, so the same once."""
        if self._failing.get(ref.uid) != text:
            if len(self._failing) >= MOST_FAILING:
                self._failing.clear()
            self._failing[ref.uid] = text
            self.note("claim", str(ref), text, warning=True)

    def reconciled(self, action: str, reason: str) -> None:
        """Note an action of the reconciler."""
        self.note("reconcile", action, reason, warning=action.endswith("-failed"))

    def condition(self, name: str, what: str | None) -> None:
        """Note what keeps the agent from its work, or that it no longer does."""
        self.note("agent", name, what if what is not None else "no longer in the way", warning=what is not None)

    def units_changed(self, before: Units, after: Units) -> None:
        """Note which units of an offer became unhealthy, and which healthy again, by resource and reason."""
        for change in health_changes(before, after):
            text = f"healthy again, was {change.reason}" if change.is_healthy else change.reason
            self.note("health", _first(change.devices), f"{text} ({change.resource})", warning=not change.is_healthy)


def _first(devices: Sequence[str]) -> str:
    """Name one device, and how many more there are."""
    others = len(set(devices)) - 1
    return f"{devices[0]} and {others} more" if others else devices[0]


def _unit(hold: Hold) -> str:
    return ", ".join(hold.devices) or hold.key


def _is_same(last: Event, event: Event) -> bool:
    same = (last.kind, last.subject, last.text, last.warning) == (event.kind, event.subject, event.text, event.warning)
    return same and event.at - last.at < SAME_SECONDS
