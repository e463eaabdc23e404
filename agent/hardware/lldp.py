"""LLDP (IEEE 802.1AB): listens on interfaces for frames, and reads in them which port of which switch a link ends at.

The reading is pure, and safe on any bytes. The sockets are packet sockets bound to that protocol alone.

Needs CAP_NET_RAW in the host's network namespace. Only what switches send comes in: the sockets see no other
protocol, and frames that this machine sends itself are left out.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import select
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from agent.errors import DriverUnavailable

ETHERTYPE = 0x88CC
GROUPS = (
    bytes.fromhex("0180c200000e"),  # nearest bridge: what switches send by default
    bytes.fromhex("0180c2000003"),  # nearest bridge that is not a two-port relay
    bytes.fromhex("0180c2000000"),  # nearest customer bridge
)
"""Destination addresses of LLDP; bridges forward none of them (802.1AB, table 7-1)."""
MAX_FRAME = 9216
MAX_TEXT = 255

_HEADER = 14
_END, _CHASSIS, _PORT, _TTL, _SYSTEM_NAME = 0, 1, 2, 3, 5
_CHASSIS_MAC, _CHASSIS_ADDRESS = 4, 5
_PORT_MAC, _PORT_ADDRESS = 3, 4

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
                    frame = sock.recv(MAX_FRAME + 1)
                except BlockingIOError:
                    break
                except OSError as error:  # told once when the interface goes down; it comes up again by itself
                    log.debug("no LLDP on %s: %s", label, error.strerror)
                    break
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


class NotLldp(ValueError):
    """The frame is not a well-formed LLDP announcement."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """The far end of a link."""

    chassis: str
    """Chassis ID: a MAC address as `aa:bb:…`, an IP address, or text."""
    port: str
    """Port ID, likewise."""
    system_name: str = ""


def parse_frame(frame: bytes) -> tuple[Neighbour, int]:
    """Read an Ethernet frame: the neighbour, and for how many seconds it means this (0: it is going away).

    Raises NotLldp for anything that the standard tells a receiver to discard.
    """
    if len(frame) < _HEADER or len(frame) > MAX_FRAME:
        raise NotLldp(f"has {len(frame)} bytes")
    if frame[:6] not in GROUPS or struct.unpack_from("!H", frame, 12)[0] != ETHERTYPE:
        raise NotLldp("is not addressed to LLDP stations")
    tlvs = _tlvs(frame[_HEADER:])
    if [kind for kind, _ in tlvs[:3]] != [_CHASSIS, _PORT, _TTL]:
        raise NotLldp("does not begin with chassis ID, port ID and time to live")
    if sum(kind in (_CHASSIS, _PORT, _TTL) for kind, _ in tlvs) > 3:
        raise NotLldp("says twice what may be said once")
    chassis = _identity(tlvs[0][1], _CHASSIS_MAC, _CHASSIS_ADDRESS)
    port = _identity(tlvs[1][1], _PORT_MAC, _PORT_ADDRESS)
    ttl = tlvs[2][1]
    if len(ttl) < 2:
        raise NotLldp("has a time to live of less than two bytes")
    name = next((_text(value) for kind, value in tlvs if kind == _SYSTEM_NAME), "")
    return Neighbour(chassis, port, name), int.from_bytes(ttl[:2], "big")


def _tlvs(data: bytes) -> list[tuple[int, bytes]]:
    """Take the announcement apart. What comes after the end mark is padding."""
    found: list[tuple[int, bytes]] = []
    at = 0
    while at + 2 <= len(data):
        head = int.from_bytes(data[at : at + 2], "big")
        kind, length = head >> 9, head & 0x1FF
        if kind == _END:
            return found
        value = data[at + 2 : at + 2 + length]
        if len(value) < length:
            raise NotLldp("ends in the middle of a field")
        found.append((kind, value))
        at += 2 + length
    return found


def _identity(value: bytes, mac: int, address: int) -> str:
    """Read a chassis or port ID: a byte that says its kind, then 1 to 255 bytes."""
    if not 2 <= len(value) <= 256:
        raise NotLldp(f"has an identity of {len(value)} bytes")
    kind, rest = value[0], value[1:]
    if kind == mac and len(rest) == 6:
        return rest.hex(":")
    if kind == address and (rest[0], len(rest)) in ((1, 5), (2, 17)):
        return str(ipaddress.ip_address(rest[1:]))
    text = _text(rest)
    return text or rest.hex()


def _text(value: bytes) -> str:
    """Read text, without what cannot be shown."""
    text = value[:MAX_TEXT].decode("utf-8", "replace")
    return "".join(c for c in text if c.isprintable() and c != "\N{REPLACEMENT CHARACTER}").strip()
