"""Asks for addresses, as arping and ping do, in the caller's namespace, and tells which MACs the answers come from."""

from __future__ import annotations

import itertools
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

ETH_P_ALL, ETH_P_IP, ETH_P_ARP, ETH_P_IPV6, ICMP, ICMPV6 = 3, 0x0800, 0x0806, 0x86DD, 1, 58
ECHO, ECHO_REPLY, ECHO_6, ECHO_REPLY_6, SOLICITATION, ADVERTISEMENT = 8, 0, 128, 129, 135, 136
MOST_SECONDS = 20.0
Answers = Mapping[str, set[str]]
Address = IPv4Address | IPv6Address
_numbers = itertools.count(1)


def who_has(ifname: str, source: str, targets: Sequence[str], quiet: float = 0.2) -> Answers:
    """Ask everybody for addresses, by ARP or by a neighbour solicitation: whose MACs answer, until it is quiet."""

    def ask(raw: socket.socket) -> None:
        mac = raw.getsockname()[4]
        for target in targets:
            raw.send(_question(mac, source, target))

    return _answers(ifname, targets, ask, _neighbour, quiet)


def ping(ifname: str, targets: Sequence[str], quiet: float = 0.2, patience: float = 2.0) -> Answers:
    """Send an echo request to each address: from which MACs the replies come, until it is quiet."""

    def ask(raw: socket.socket) -> None:
        for target in targets:
            is_4 = ip_address(target).version == 4
            family, protocol = (socket.AF_INET, ICMP) if is_4 else (socket.AF_INET6, ICMPV6)
            body = struct.pack("!HH", 77, next(_numbers) & 0xFFFF) + b"nodefabric!!"
            message = struct.pack("!BBH", ECHO if is_4 else ECHO_6, 0, 0) + body
            if is_4:  # for IPv6 the kernel does so
                message = struct.pack("!BBH", ECHO, 0, checksum(message)) + body
            with socket.socket(family, socket.SOCK_RAW, protocol) as echo:
                echo.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, ifname.encode() + b"\0")
                echo.sendto(message, (target, 0))

    return _answers(ifname, targets, ask, _replier, quiet, patience)


def _answers(
    ifname: str,
    targets: Sequence[str],
    ask: Callable[[socket.socket], None],
    read: Callable[[bytes], Address | None],
    quiet: float,
    patience: float = 2.0,
) -> Answers:
    """Listen until all targets have answered and it is `quiet` for so long, or nobody says anything for `patience`."""
    wanted = {ip_address(target) for target in targets}
    found: dict[str, set[str]] = defaultdict(set)
    end = time.monotonic() + MOST_SECONDS
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)) as raw:
        raw.bind((ifname, ETH_P_ALL))
        ask(raw)
        while time.monotonic() < end:
            # The first answers may take their time, on an emulated processor say; a second one comes right after.
            raw.settimeout(quiet if len(found) == len(wanted) else patience)
            try:
                frame, sender = raw.recvfrom(2048)
            except TimeoutError:
                break
            address = read(frame) if sender[2] != socket.PACKET_OUTGOING else None
            if address in wanted:
                found[str(address)].add(frame[6:12].hex(":"))
    return found


def _question(mac: bytes, source: str, target: str) -> bytes:
    asking, asked = ip_address(source), ip_address(target)
    if asking.version == 4:
        arp = struct.pack("!HHBBH", 1, ETH_P_IP, 6, 4, 1) + mac + asking.packed + bytes(6) + asked.packed
        return b"\xff" * 6 + mac + struct.pack("!H", ETH_P_ARP) + arp
    group = IPv6Address("ff02::1:ff00:0").packed[:13] + asked.packed[13:]
    body = bytes(4) + asked.packed + b"\x01\x01" + mac
    length = len(body) + 4
    pseudo = asking.packed + group + struct.pack("!II", length, ICMPV6)
    message = struct.pack("!BBH", SOLICITATION, 0, 0) + body
    message = struct.pack("!BBH", SOLICITATION, 0, checksum(pseudo + message)) + body
    ip = struct.pack("!IHBB", 6 << 28, length, ICMPV6, 255) + asking.packed + group
    return b"\x33\x33" + group[12:] + mac + struct.pack("!H", ETH_P_IPV6) + ip + message


def _neighbour(frame: bytes) -> Address | None:
    """Tell whose MAC a frame tells, if it does."""
    kind, rest = struct.unpack_from("!H", frame, 12)[0], frame[14:]
    if kind == ETH_P_ARP and rest[6:8] == b"\0\x02":
        return ip_address(rest[14:18])
    is_advertisement = kind == ETH_P_IPV6 and rest[6] == ICMPV6 and rest[40] == ADVERTISEMENT
    return ip_address(rest[48:64]) if is_advertisement else None


def _replier(frame: bytes) -> Address | None:
    """Tell whose reply to an echo request a frame is, if it is one."""
    kind, rest = struct.unpack_from("!H", frame, 12)[0], frame[14:]
    if kind == ETH_P_IP and rest[9] == ICMP and rest[(rest[0] & 15) * 4] == ECHO_REPLY:
        return ip_address(rest[12:16])
    is_reply = kind == ETH_P_IPV6 and rest[6] == ICMPV6 and rest[40] == ECHO_REPLY_6
    return ip_address(rest[8:24]) if is_reply else None


def checksum(content: bytes) -> int:
    """Sum up as IP does. `content` has an even number of bytes."""
    total: int = sum(struct.unpack(f"!{len(content) // 2}H", content))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
