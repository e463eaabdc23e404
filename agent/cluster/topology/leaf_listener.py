"""Hears from the switches themselves (LLDP) which of them the node's adapters are cabled to.

Slow to make up its mind: labels are made of this, and every change of a label may make a scheduler build its picture
of the fabric again. So a neighbour is believed when it has been heard alone for a while, the first one after a start
too: whoever speaks first may be a pod or a host, and the Node keeps its label meanwhile. Then it stays until another
one has been alone for as long: not when the link goes down, not when the switch says that it is going away, and not
as long as two of them speak on one link.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from agent.cluster.topology.labels import fabric_nics
from agent.cluster.topology.node_view import View
from agent.errors import DriverUnavailable
from agent.hardware.lldp import LldpSockets, Neighbour, NotLldp, parse_frame
from agent.model.device import LinkLayer, Snapshot

SETTLE_SECONDS = 90.0
"""Three announcements at the usual interval of 30 s (802.1AB, msgTxInterval)."""
MAX_SPEAKERS = 8
"""Of one link; so many within the time to settle are too many in any case."""
FLOOD = 8
"""A switch sends a frame in 30 s, and a few in a row when the link comes up (802.1AB, txFast and txCreditMax). So many
within a rest must neither keep the agent busy nor be believed: what the switch said may have been dropped for them."""
SHOWN = 3
MOST_NAME = 40

log = logging.getLogger(__name__)


class LeafListener:
    """Listens on the adapters that are in the host. All methods belong to the event loop's thread, but `at`."""

    def __init__(self, view: View) -> None:
        """The view learns when an adapter's neighbour has changed, and what keeps the agent from listening."""
        self._view = view
        self._neighbours = Neighbours()
        self._sockets: LldpSockets | None = None
        self._resting: asyncio.TimerHandle | None = None
        self._flooded: set[str] = set()
        self._unable: str | None = None
        """Why it is not possible to listen."""

    def at(self, nic: str) -> Neighbour | None:
        """Return the switch port that an adapter (by its PCI address) ends at; None until that is certain."""
        return self._neighbours.at(nic)

    def follow(self, snapshot: Snapshot) -> None:
        """Listen on the adapters that are in the host now."""
        named = self._view.config.lldp_netdevs
        wanted = {
            netdev.name: (netdev.ifindex, nic.address)
            for nic in fabric_nics(snapshot, named)
            for netdev in nic.netdevs
            if (netdev.name in named if named else netdev == nic.netdev) and netdev.link_layer is LinkLayer.ETHERNET
        }
        try:
            if self._sockets is None:
                self._sockets = LldpSockets()
                self._listen(self._sockets)
            self._sockets.follow(wanted)
        except DriverUnavailable as error:
            self._unable = str(error)
        else:
            self._unable = None
        self._report()

    def close(self) -> None:
        """Stop listening. What has been heard is still known."""
        if self._resting is not None:
            self._resting.cancel()
        if self._sockets is not None:
            asyncio.get_running_loop().remove_reader(self._sockets.fileno())
            self._sockets.close()
            self._sockets = None

    def _listen(self, sockets: LldpSockets) -> None:
        asyncio.get_running_loop().add_reader(sockets.fileno(), self._hear, sockets)

    def _hear(self, sockets: LldpSockets) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(sockets.fileno())
        self._resting = loop.call_later(self._view.intervals.rest, self._listen, sockets)
        by_nic: dict[str, list[bytes]] = {}
        for nic, frame in sockets.read():
            by_nic.setdefault(nic, []).append(frame)
        for nic, frames in by_nic.items():
            if len(frames) >= FLOOD:
                self._neighbours.disturbed(nic)
                if nic not in self._flooded:
                    log.warning("LLDP frames on %s come too fast to be a switch's: nothing there is believed", nic)
                self._flooded.add(nic)
                continue
            self._flooded.discard(nic)
            for frame in frames:
                self._take(nic, frame)
        self._report()

    def _report(self) -> None:
        contested = sorted(self._neighbours.contested(self._view.clock()).items())
        links = [f"on the link of {nic} ({', '.join(map(_named, found[:SHOWN]))})" for nic, found in contested]
        several = f"several speak LLDP {' and '.join(links[:SHOWN])}: its labels stay as they are until one is alone"
        self._view.problems.note("LLDP", self._unable or (several if links else None))

    def _take(self, nic: str, frame: bytes) -> None:
        try:
            neighbour, valid = parse_frame(frame)
        except NotLldp as error:
            log.debug("an LLDP frame on %s %s", nic, error)
            return
        if self._neighbours.heard(nic, neighbour, valid, self._view.clock()):
            log.info("the link of %s ends at %s, port %s", nic, neighbour.system_name or "?", neighbour.port)
            self._view.facts_changed()
            leaves = self._view.node.leaves
            leaves.set({**leaves.value, nic: neighbour})


def _named(neighbour: Neighbour) -> str:
    return f"{(neighbour.system_name or neighbour.chassis)[:MOST_NAME]}, port {neighbour.port[:MOST_NAME]}"


class Neighbours:
    """What has been heard so far, and who is believed. Pure; the caller passes the time."""

    def __init__(self) -> None:
        self._links: dict[str, _Link] = {}

    def heard(self, nic: str, neighbour: Neighbour, seconds_valid: int, now: float) -> bool:
        """Note an announcement on a NIC's link. Returns whether its neighbour changes with this."""
        if seconds_valid == 0:
            return False
        link = self._links.setdefault(nic, _Link())
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
        """Forget who else was heard: for a moment frames of the known one may have been dropped."""
        if (link := self._links.get(nic)) is not None:
            link.speakers.clear()

    def at(self, nic: str) -> Neighbour | None:
        """Return the neighbour of a NIC (by its PCI address); None if none has been alone for long enough yet."""
        link = self._links.get(nic)
        return link.known if link is not None else None

    def contested(self, now: float) -> dict[str, tuple[Neighbour, ...]]:
        """List the NICs on whose links several speak in turn, with those: nothing shows which is the switch.

        One that is heard no more once another is, as when a cable is moved, is not among them.
        """
        return {nic: tuple(link.speakers) for nic, link in self._links.items() if _is_contested(link, now)}


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


def _is_contested(link: _Link, now: float) -> bool:
    spans = [span for span in link.speakers.values() if now - span.last < SETTLE_SECONDS]
    in_turn = any(a is not b and a.first < b.last and b.first < a.last for a in spans for b in spans)
    return in_turn or len(spans) >= MAX_SPEAKERS
