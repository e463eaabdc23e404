"""Which switch port each NIC's link ends at, slow to make up its mind.

Labels are made of this, and every change of a label may make a scheduler build its picture of the fabric anew. So a
neighbour is believed when it has been heard alone for a while, the first one after a start too: whoever speaks first
may be a pod or a host, and the Node keeps its label meanwhile. Then it stays until another one has been alone for as
long: not when the link goes down, not when the switch says that it is going away, and not as long as two of them speak
on one link. Pure; the caller passes the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from agent.model.lldp import Neighbour

SETTLE_SECONDS = 90.0
"""Three announcements at the usual interval of 30 s (802.1AB, msgTxInterval)."""
MAX_NICS = 4096
MAX_SPEAKERS = 8
"""Of one link; so many within the time to settle are too many in any case."""


@dataclass(slots=True)
class _Span:
    """From when to when one was heard."""

    first: float
    last: float


@dataclass(slots=True)
class _Link:
    known: Neighbour | None = None
    speakers: dict[Neighbour, _Span] = field(default_factory=dict)
    """Those heard within the time to settle."""


class Neighbours:
    """What has been heard so far."""

    def __init__(self) -> None:
        self._links: dict[str, _Link] = {}

    def heard(self, nic: str, neighbour: Neighbour, seconds_valid: int, now: float) -> bool:
        """Note an announcement on a NIC's link. Tells whether its neighbour is another one from now on."""
        if seconds_valid == 0:
            return False
        link = self._links.get(nic)
        if link is None:
            if len(self._links) >= MAX_NICS:
                return False
            link = self._links[nic] = _Link()
        others = {
            other: span
            for other, span in link.speakers.items()
            if other != neighbour and now - span.last < SETTLE_SECONDS
        }
        mine = link.speakers.get(neighbour) or _Span(now, now)
        mine.last = now
        link.speakers = dict([*others.items(), (neighbour, mine)][-MAX_SPEAKERS:])
        if others or now - mine.first < SETTLE_SECONDS or neighbour == link.known:
            return False
        link.known = neighbour
        return True

    def disturbed(self, nic: str) -> None:
        """Forget who else was heard: for a moment nobody could tell what the known one said."""
        if (link := self._links.get(nic)) is not None:
            link.speakers.clear()

    def at(self, nic: str) -> Neighbour | None:
        """Return the neighbour of a NIC (by its PCI address); None if none has been alone for long enough yet."""
        link = self._links.get(nic)
        return link.known if link is not None else None

    def contested(self, now: float) -> dict[str, tuple[Neighbour, ...]]:
        """List the NICs on whose links several speak in turn, with those: nobody can tell which is the switch.

        One that is heard no more once another is, as when a cable is moved, is not among them.
        """
        return {nic: tuple(link.speakers) for nic, link in self._links.items() if _is_contested(link, now)}


def _is_contested(link: _Link, now: float) -> bool:
    spans = [span for span in link.speakers.values() if now - span.last < SETTLE_SECONDS]
    in_turn = any(a is not b and a.first < b.last and b.first < a.last for a in spans for b in spans)
    return in_turn or len(spans) >= MAX_SPEAKERS
