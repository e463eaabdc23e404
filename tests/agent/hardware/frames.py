"""LLDP frames, sent on real links."""

from __future__ import annotations

import socket
import struct
import subprocess

from agent.hardware.lldp import GROUPS
from tests.waiting import until


def run(*command: str) -> str:
    """Run a program and return what it says."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def await_up(*netdevs: str) -> None:
    """Wait until links carry frames: the kernel sees to that a moment after both ends were set up."""
    until(lambda: all("state UP" in run("ip", "link", "show", "dev", netdev) for netdev in netdevs))


def field(kind: int, value: bytes) -> bytes:
    """Write one field of a frame: type, length, value."""
    return struct.pack("!H", kind << 9 | len(value)) + value


def announcement(name: str, group: bytes = GROUPS[0], ethertype: int = 0x88CC) -> bytes:
    """Write a frame in which a switch's port eth1 tells the switch's name."""
    source = bytes.fromhex("020000000001")
    fields = field(1, b"\x04" + source), field(2, b"\x05eth1"), field(3, b"\0\x78"), field(5, name.encode()), b"\0\0"
    return group + source + struct.pack("!H", ethertype) + b"".join(fields)


def send(netdev: str, *frames: bytes) -> None:
    """Send frames out of an interface."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
        sock.bind((netdev, 0))
        for frame in frames:
            sock.send(frame)
