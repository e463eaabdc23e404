"""Vital product data of PCI functions: keyword V3, which all functions of one NVIDIA adapter have in common.

The format is that of the PCI local bus specification, appendix I: resources, each with a tag. Large tags have bit 7 set
and two bytes of length, little endian; small tags have their length in the low three bits. The read-only resource has
tag 0x90; its fields are two letters, one byte of length, and text.
"""

from __future__ import annotations

import os
from pathlib import Path

from agent.errors import HardwareError
from agent.hardware.sysfs.scan import PCI_DEVICES

_READ_ONLY = 0x90
_LARGE = 0x80
_ENDS = (0x78, 0x79)
"""The small tag that ends it, and that of end with a checksum in some cards."""
MAX_BYTES = 1 << 15
"""The address of vital product data has 15 bits."""


def read_adapter_id(root: Path, address: str) -> str:
    """Read keyword V3 of one function; empty if it has none.

    The kernel reads four bytes at a time from the card, each in up to 125 ms on a broken one (drivers/pci/vpd.c), so
    no more is read than the read-only resource. Raises HardwareError if there is nothing to read, or if it is broken.
    """
    path = root / PCI_DEVICES.lstrip("/") / address / "vpd"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _adapter_id(_read_only(descriptor))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise HardwareError(f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise HardwareError(str(error)) from error


def write_adapter_id(adapter_id: str) -> bytes:
    """Spell vital product data that has a name and this keyword V3, for a node file."""
    name, field = b"nodefabric", b"V3" + bytes([len(adapter_id)]) + adapter_id.encode("ascii")
    return b"".join(
        (b"\x82", len(name).to_bytes(2, "little"), name, b"\x90", len(field).to_bytes(2, "little"), field, b"\x78")
    )


def _read_only(descriptor: int) -> bytes:
    offset = 0
    while offset < MAX_BYTES:
        head = os.pread(descriptor, 3, offset)
        if not head or head[0] in _ENDS:
            return b""
        if not head[0] & _LARGE:
            offset += 1 + (head[0] & 0x07)
            continue
        if len(head) < 3:
            break
        length = int.from_bytes(head[1:], "little")
        if head[0] == _READ_ONLY:
            content = os.pread(descriptor, min(length, MAX_BYTES), offset + 3)
            if len(content) < length:
                break
            return content
        offset += 3 + length
    raise ValueError("ends within a resource")


def _adapter_id(fields: bytes) -> str:
    offset = 0
    while offset + 3 <= len(fields):
        keyword, length = fields[offset : offset + 2], fields[offset + 2]
        value = fields[offset + 3 : offset + 3 + length]
        if len(value) < length:
            raise ValueError(f"ends within keyword {keyword!r}")
        if keyword == b"V3":
            text = value.rstrip(b"\0 ").decode("ascii", "replace").strip()
            if not text.isprintable() or "\ufffd" in text:
                raise ValueError(f"has a keyword V3 that is no text: {value[:40]!r}")
            return text
        offset += 3 + length
    return ""
