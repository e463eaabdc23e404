"""Netlink messages and their attributes, both ways, whatever family they are of. Pure.

Layout: include/uapi/linux/netlink.h.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

NLMSG_ERROR, NLMSG_DONE = 2, 3
NLM_F_REQUEST, NLM_F_ACK, NLM_F_DUMP_INTR, NLM_F_DUMP = 0x1, 0x4, 0x10, 0x300
NLM_F_REPLACE, NLM_F_EXCL, NLM_F_CREATE = 0x100, 0x200, 0x400
NLA_F_NESTED = 0x8000
NLA_TYPE_MASK = 0x3FFF
HEADER = struct.Struct("=IHHII")
ATTRIBUTE = struct.Struct("=HH")
"""An attribute's header: its length with this header, and its type."""
WORD = struct.Struct("=I")


def request(kind: int, flags: int, body: bytes, number: int = 1) -> bytes:
    """Make a message to the kernel. Its answers have its number."""
    return HEADER.pack(HEADER.size + len(body), kind, NLM_F_REQUEST | flags, number, 0) + body


def attribute(kind: int, payload: bytes) -> bytes:
    """Make an attribute."""
    return ATTRIBUTE.pack(ATTRIBUTE.size + len(payload), kind) + payload + b"\0" * (-len(payload) % 4)


def word(kind: int, value: int) -> bytes:
    """Make an attribute of 32 bits."""
    return attribute(kind, WORD.pack(value))


def messages(packet: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield each message of a packet: its type, its flags, its body. Ends at the first that makes no sense."""
    offset = 0
    while offset + HEADER.size <= len(packet):
        length, kind, flags, _, _ = HEADER.unpack_from(packet, offset)
        if length < HEADER.size:
            return
        yield kind, flags, packet[offset + HEADER.size : offset + length]
        offset += (length + 3) & ~3


def attributes(body: bytes) -> list[tuple[int, bytes]]:
    """List type and content of each attribute. Ends at the first that makes no sense."""
    found = []
    unpack, size, end, offset = ATTRIBUTE.unpack_from, ATTRIBUTE.size, len(body), 0
    while offset + size <= end:
        length, kind = unpack(body, offset)
        if length < size:
            break
        found.append((kind & NLA_TYPE_MASK, body[offset + size : offset + length]))
        offset += (length + 3) & ~3
    return found


def attribute_table(body: bytes, start: int = 0) -> dict[int, bytes]:
    """Return the content of each attribute by its type; of several of one type, the last. Ends as `attributes` does.

    In one pass: a pod's start waits for it.
    """
    found = {}
    unpack, size, end, offset = ATTRIBUTE.unpack_from, ATTRIBUTE.size, len(body), start
    while offset + size <= end:
        length, kind = unpack(body, offset)
        if length < size:
            break
        found[kind & NLA_TYPE_MASK] = body[offset + size : offset + length]
        offset += (length + 3) & ~3
    return found


def text(content: bytes) -> str:
    """Read a text that ends with a zero."""
    return content.rstrip(b"\0").decode("utf-8", "replace")
