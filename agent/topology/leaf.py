"""Hears from the switches themselves which of them the node's adapters are cabled to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from agent.errors import DriverUnavailable
from agent.hardware.lldp import LldpSockets
from agent.model.device import LinkLayer, Snapshot
from agent.model.lldp import Neighbour, NotLldp, parse_frame
from agent.topology.labels import fabric_nics
from agent.topology.neighbours import Neighbours

REST_SECONDS = 1.0
"""After frames were heard nobody listens for so long; meanwhile they wait in the kernel, or are dropped."""
FLOOD = 8
"""A switch sends a frame in 30 s, and a few in a row when the link comes up (802.1AB, txFast and txCreditMax). So many
within a rest must neither keep the agent busy nor be believed: what the switch said may have been dropped for them."""
SHOWN = 3
MOST_NAME = 40

log = logging.getLogger(__name__)


class LeafListener:
    """Listens on the adapters that are in the host. All methods belong to the event loop's thread, but `at`."""

    def __init__(
        self,
        netdevs: Sequence[str],
        changed: Callable[[], None],
        complain: Callable[[str | None], None],
        clock: Callable[[], float],
    ) -> None:
        """`netdevs` are those to listen on; none: each adapter with an RDMA device.

        `changed` is called when an adapter's neighbour is another one, `complain` when it is not possible to listen
        or to tell which of several is the switch, and with None when it is.
        """
        self._netdevs = netdevs
        self._changed = changed
        self._complain = complain
        self._clock = clock
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
        named = self._netdevs
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
        self._tell()

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
        self._resting = loop.call_later(REST_SECONDS, self._listen, sockets)
        heard: dict[str, list[bytes]] = {}
        for nic, frame in sockets.read():
            heard.setdefault(nic, []).append(frame)
        for nic, frames in heard.items():
            if len(frames) >= FLOOD:
                self._neighbours.disturbed(nic)
                if nic not in self._flooded:
                    log.warning("LLDP frames on %s come too fast to be a switch's: nothing there is believed", nic)
                self._flooded.add(nic)
                continue
            self._flooded.discard(nic)
            for frame in frames:
                self._take(nic, frame)
        self._tell()

    def _tell(self) -> None:
        contested = sorted(self._neighbours.contested(self._clock()).items())
        told = [f"on the link of {nic} ({', '.join(map(_named, found[:SHOWN]))})" for nic, found in contested]
        several = f"several speak LLDP {' and '.join(told[:SHOWN])}: its labels stay as they are until one is alone"
        self._complain(self._unable or (several if told else None))

    def _take(self, nic: str, frame: bytes) -> None:
        try:
            neighbour, valid = parse_frame(frame)
        except NotLldp as error:
            log.debug("an LLDP frame on %s %s", nic, error)
            return
        if self._neighbours.heard(nic, neighbour, valid, self._clock()):
            log.info("the link of %s ends at %s, port %s", nic, neighbour.system_name or "?", neighbour.port)
            self._changed()


def _named(neighbour: Neighbour) -> str:
    return f"{(neighbour.system_name or neighbour.chassis)[:MOST_NAME]}, port {neighbour.port[:MOST_NAME]}"
