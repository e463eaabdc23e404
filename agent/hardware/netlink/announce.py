"""Tells the neighbours of a pod's new addresses: they may still know these under another adapter's MAC.

An IPAM plugin gives an address again as soon as it is free, and neighbours keep a MAC for minutes. In the
background, since the link may have no carrier yet, and closing a packet socket waits for the kernel's other readers.
Best effort: a neighbour that hears nothing asks when its entry has become old.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from functools import partial

from agent.errors import HardwareError
from agent.hardware import netns as namespaces
from agent.hardware.netlink.rtnetlink import IFF_LOWER_UP, IFLA_ADDRESS, NetlinkSocket

CARRIER_SECONDS = 1.0
MAX_AT_ONCE = 32
ETH_P_ARP, ETH_P_IPV6, ICMPV6 = 0x0806, 0x86DD, 58
_POLL_SECONDS = 0.02
_BROADCAST, _ALL_NODES = b"\xff" * 6, bytes.fromhex("333300000001")

log = logging.getLogger(__name__)


class Announcer:
    """Announces addresses, of so many interfaces at once at most."""

    def __init__(self, seconds: float = CARRIER_SECONDS) -> None:
        """`seconds` is how long a link may take to get its carrier, and how long the namespace is held at most."""
        self._seconds = seconds
        self._slots = threading.BoundedSemaphore(MAX_AT_ONCE)

    def start(self, netns: int, ifname: str, addresses: Sequence[str]) -> None:
        """Announce an interface's addresses (CIDR) in the background: a courtesy, whose failure fails nothing."""
        if not addresses or not self._slots.acquire(blocking=False):
            return
        held = -1
        try:
            held = os.dup(netns)
            started = threading.Thread(
                target=self._announce, args=(held, ifname, addresses), name="announce", daemon=True
            )
            started.start()
        except (OSError, RuntimeError) as error:  # no descriptor, no thread
            self._slots.release()
            if held >= 0:
                os.close(held)
            log.info("the addresses of %s are not announced: %s", ifname, error)

    def _announce(self, netns: int, ifname: str, addresses: Sequence[str]) -> None:
        try:
            namespaces.run_in(netns, partial(self._announce_here, ifname, addresses))
        except (OSError, HardwareError) as error:
            log.info("the addresses of %s are not announced: %s", ifname, error)
        finally:
            os.close(netns)
            self._slots.release()

    def _announce_here(self, ifname: str, addresses: Sequence[str]) -> None:
        deadline = time.monotonic() + self._seconds
        with NetlinkSocket() as links:
            while (link := links.find(ifname)) is not None and not link.flags & IFF_LOWER_UP:
                if time.monotonic() > deadline:
                    return
                time.sleep(_POLL_SECONDS)
        mac = link.attributes.get(IFLA_ADDRESS, b"") if link is not None else b""
        if len(mac) != len(_BROADCAST):  # gone, or InfiniBand
            return
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC) as raw:
            raw.bind((ifname, 0))
            for address in addresses:
                raw.send(frame(mac, address))


def frame(mac: bytes, cidr: str) -> bytes:
    """Make the frame that announces an address: a gratuitous ARP, or an unsolicited neighbour advertisement."""
    address = ipaddress.ip_interface(cidr).ip
    if address.version == 4:
        # RFC 5227, section 3: a request by the address for itself.
        arp = struct.pack("!HHBBH", 1, 0x0800, 6, 4, 1) + mac + address.packed + bytes(6) + address.packed
        return _BROADCAST + mac + struct.pack("!H", ETH_P_ARP) + arp
    # RFC 4861, section 7.2.6: to all nodes, with the override flag and the MAC.
    everybody = ipaddress.IPv6Address("ff02::1").packed
    head, rest = struct.pack("!BB", 136, 0), struct.pack("!I", 0x20000000) + address.packed + b"\x02\x01" + mac
    length = len(head) + 2 + len(rest)
    pseudo = address.packed + everybody + struct.pack("!II", length, ICMPV6)
    message = head + struct.pack("!H", _checksum(pseudo + head + bytes(2) + rest)) + rest
    ip = struct.pack("!IHBB", 6 << 28, length, ICMPV6, 255) + address.packed + everybody
    return _ALL_NODES + mac + struct.pack("!H", ETH_P_IPV6) + ip + message


def _checksum(content: bytes) -> int:
    total: int = sum(struct.unpack(f"!{len(content) // 2}H", content))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
