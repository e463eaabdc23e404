"""Listens for LLDP frames on interfaces, with packet sockets bound to that protocol alone.

Needs CAP_NET_RAW in the host's network namespace. Only what switches send comes in: the sockets see no other
protocol, and frames that this machine sends itself are left out.
"""

from __future__ import annotations

import errno
import logging
import select
import socket
import struct
from collections.abc import Iterator, Mapping

from agent.errors import DriverUnavailable
from agent.model.lldp import ETHERTYPE, GROUPS, MAX_FRAME

SOL_PACKET = 263
PACKET_ADD_MEMBERSHIP = 1
PACKET_MR_MULTICAST = 0
PACKET_IGNORE_OUTGOING = 23
"""include/uapi/linux/if_packet.h"""
RECEIVE_BUFFER = 64 << 10
FRAMES_AT_ONCE = 64

_GONE = (errno.ENODEV, errno.ENXIO, errno.ENETDOWN)

log = logging.getLogger(__name__)


class LldpSockets:
    """One socket per interface. `fileno` becomes readable when a frame is there. Not for several threads."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._sockets: dict[str, tuple[int, str, socket.socket]] = {}
        """Name → interface number, what it is called by the caller, socket."""

    def fileno(self) -> int:
        """Return a descriptor that an event loop can wait for."""
        return self._epoll.fileno()

    def follow(self, wanted: Mapping[str, tuple[int, str]]) -> None:
        """Listen on these interfaces, and on no others: name → (interface number, what the caller calls it).

        An interface that is gone meanwhile is left out. One that went to another namespace and came back is listened
        on anew: the kernel has unbound the socket (net/packet/af_packet.c, packet_notifier).
        Raises DriverUnavailable without the right to listen.
        """
        for name, (index, label, sock) in list(self._sockets.items()):
            if wanted.get(name) != (index, label) or sock.getsockname()[0] != name:
                self._drop(name)
        for name, (index, label) in wanted.items():
            if name not in self._sockets:
                self._open(name, index, label)

    def read(self) -> Iterator[tuple[str, bytes]]:
        """Yield the frames that have come: what the caller calls the interface, and the frame. Never blocks."""
        by_number = {sock.fileno(): (label, sock) for _, label, sock in self._sockets.values()}
        for number, _ in self._epoll.poll(0):
            label, sock = by_number[number]
            for _ in range(FRAMES_AT_ONCE):
                try:
                    frame, sender = sock.recvfrom(MAX_FRAME + 1)
                except BlockingIOError:
                    break
                except OSError as error:  # told once when the interface goes down; it comes up again by itself
                    log.debug("no LLDP on %s: %s", label, error.strerror)
                    break
                if sender[2] != socket.PACKET_OUTGOING:
                    yield label, frame

    def close(self) -> None:
        """Stop listening."""
        for name in list(self._sockets):
            self._drop(name)
        self._epoll.close()

    def _open(self, name: str, index: int, label: str) -> None:
        try:
            # Protocol 0 hears nothing; only `bind` names the protocol and the interface, at once.
            sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, 0)
        except PermissionError as error:
            raise DriverUnavailable("listening for LLDP needs the capability NET_RAW") from error
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
            sock.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
            for group in GROUPS:
                # struct packet_mreq: adapters drop these groups unless somebody wants them.
                request = struct.pack("iHH8s", index, PACKET_MR_MULTICAST, len(group), group)
                sock.setsockopt(SOL_PACKET, PACKET_ADD_MEMBERSHIP, request)
            sock.bind((name, ETHERTYPE))
        except OSError as error:
            sock.close()
            if error.errno in _GONE:
                return
            raise DriverUnavailable(f"cannot listen for LLDP on {name}: {error.strerror}") from error
        self._sockets[name] = index, label, sock
        self._epoll.register(sock, select.EPOLLIN)

    def _drop(self, name: str) -> None:
        _, _, sock = self._sockets.pop(name)
        self._epoll.unregister(sock)
        sock.close()
