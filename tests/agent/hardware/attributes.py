"""Netlink attributes as the kernel writes them."""

from __future__ import annotations

import struct


def attribute(kind: int, payload: bytes) -> bytes:
    """Make an attribute as the kernel does: its length has 16 bits, and wraps round."""
    return struct.pack("=HH", (4 + len(payload)) & 0xFFFF, kind) + payload + b"\0" * (-len(payload) % 4)
