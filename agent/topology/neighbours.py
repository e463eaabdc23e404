"""Which switch port each NIC's link ends at, slow to change its mind.

Labels are made of this, and every change of a label may make a scheduler build its picture of the fabric anew. So a
neighbour stays until another one has been heard alone for a while: not when the link goes down, not when the switch
says that it is going away, and not as long as two of them speak on one link. Pure; the caller passes the time.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.model.lldp import Neighbour

SETTLE_SECONDS = 90.0
"""Three announcements at the usual interval of 30 s (802.1AB, msgTxInterval)."""
MAX_NICS = 4096


@dataclass(slots=True)
class _Link:
    known: Neighbour
    rival: Neighbour | None = None
    since: float = 0.0


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
            if len(self._links) < MAX_NICS:
                self._links[nic] = _Link(neighbour)
            return nic in self._links
        if neighbour == link.known:
            link.rival = None
            return False
        if neighbour != link.rival:
            link.rival, link.since = neighbour, now
            return False
        if now - link.since < SETTLE_SECONDS:
            return False
        self._links[nic] = _Link(neighbour)
        return True

    def disturbed(self, nic: str) -> None:
        """Forget another neighbour that was heard: for a moment nobody could tell what the known one said."""
        if (link := self._links.get(nic)) is not None:
            link.rival = None

    def at(self, nic: str) -> Neighbour | None:
        """Return the neighbour of a NIC (by its PCI address); None if none has been heard yet."""
        link = self._links.get(nic)
        return link.known if link is not None else None
