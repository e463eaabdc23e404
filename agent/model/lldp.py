"""LLDP frames (IEEE 802.1AB): which port of which switch a link ends at. Pure, and safe on any bytes."""

from __future__ import annotations

import ipaddress
import struct
from dataclasses import dataclass

ETHERTYPE = 0x88CC
GROUPS = (
    bytes.fromhex("0180c200000e"),  # nearest bridge: what switches send by default
    bytes.fromhex("0180c2000003"),  # nearest bridge that is not a two-port relay
    bytes.fromhex("0180c2000000"),  # nearest customer bridge
)
"""Destination addresses of LLDP; bridges forward none of them (802.1AB, table 7-1)."""
MAX_FRAME = 9216
MAX_TLVS = 256
MAX_TEXT = 255

_HEADER = 14
_END, _CHASSIS, _PORT, _TTL, _SYSTEM_NAME = 0, 1, 2, 3, 5
_CHASSIS_MAC, _CHASSIS_ADDRESS = 4, 5
_PORT_MAC, _PORT_ADDRESS = 3, 4


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
    while at + 2 <= len(data) and len(found) < MAX_TLVS:
        head = int.from_bytes(data[at : at + 2], "big")
        kind, length = head >> 9, head & 0x1FF
        if kind == _END:
            return found
        value = data[at + 2 : at + 2 + length]
        if len(value) < length:
            raise NotLldp("ends in the middle of a field")
        found.append((kind, value))
        at += 2 + length
    if len(found) >= MAX_TLVS:
        raise NotLldp(f"has more than {MAX_TLVS} fields")
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
