"""Network interfaces as /sys/class/net shows them in the host's namespace, and what udev would call one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from agent.hardware.sysfs.read import Attributes, shown
from agent.model.device import DefaultRoute, LinkLayer, Netdev, only_ways

_LINK_LAYER_OF_TYPE = {"1": LinkLayer.ETHERNET, "32": LinkLayer.INFINIBAND}
"""ARPHRD_ETHER and ARPHRD_INFINIBAND (include/uapi/linux/if_arp.h)."""
LOOPBACK = "lo"
"""What an IPv6 table without a default route names in its place."""
_NO_INTERFACE = "*"
"""What an IPv4 route names that refuses: unreachable, prohibit, blackhole."""
_MOST_LOWER = 64
_MOST_UDEV_BYTES = 64 << 10
_MOST_ROUTES = 16 << 20
"""Bytes: more than 100,000 routes."""
_IPV6_DEFAULT = f"\n{'0' * 32} 00 "
_ADVERTISED = 0x00010000 | 0x00040000
"""RTF_DEFAULT and RTF_ADDRCONF (include/uapi/linux/ipv6_route.h): the kernel made it of an advertisement."""


def read_default_routes(read: Attributes) -> tuple[DefaultRoute, ...]:
    """List the host's default routes; of one of IPv4 that has several ways, the first way only."""
    # Columns as net/ipv4/fib_trie.c (fib_route_seq_show) and net/ipv6/route.c (rt6_info_route) write them: interface,
    # destination, … , metric seventh, mask eighth; and destination, prefix length, … , metric, two counters, flags,
    # interface. Of IPv4 default routes come first, of IPv6 behind all others of their table, which may be thousands.
    rows = [line.split() for line in (read.text("/proc/net/route") or "").splitlines()[1:]]
    rows = [row for row in rows if len(row) > 7 and row[1] == row[7] == "00000000" and row[0] != _NO_INTERFACE]
    found = [DefaultRoute(row[0], 4, int(row[6])) for row in rows]
    six = "\n" + (read.long_text("/proc/net/ipv6_route", _MOST_ROUTES) or "")
    for row in (rest.partition("\n")[0].split() for rest in six.split(_IPV6_DEFAULT)[1:]):
        if len(row) == 8 and row[7] != LOOPBACK:
            advertised = int(row[6], 16) & _ADVERTISED == _ADVERTISED
            found.append(DefaultRoute(row[7], 6, int(row[3], 16), advertised))
    return tuple(found)


def needed_ways(read: Attributes, routes: Iterable[DefaultRoute]) -> frozenset[str]:
    """Return the interfaces that carry the host's default route of IPv4 or IPv6: those below one (of a VLAN,
    a bond, a bridge) with it."""
    return only_ways(routes, lambda name: with_lower(read, [name]))


def with_lower(read: Attributes, names: Iterable[str]) -> frozenset[str]:
    """List interfaces, and those below them."""
    found: set[str] = set()
    waiting = sorted(names)
    while waiting and len(found) < _MOST_LOWER:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            entries = read.names(f"/sys/class/net/{name}")
            waiting += [entry.removeprefix("lower_") for entry in entries if entry.startswith("lower_")]
    return frozenset(map(shown, found))


def read_netdev(read: Attributes, name: str) -> Netdev | None:
    """Read one interface; None if it went away meanwhile."""
    folder = f"/sys/class/net/{name}"
    ifindex = read.whole(f"{folder}/ifindex", 0)
    mac = read.text(f"{folder}/address")
    if not ifindex or mac is None:
        read.lacks(folder, "address" if ifindex else "ifindex")
        return None
    carrier = read.text(f"{folder}/carrier")
    return Netdev(
        name=shown(name),
        ifindex=ifindex,
        mac=mac,
        mtu=read.whole(f"{folder}/mtu", 0),
        operstate=read.text(f"{folder}/operstate") or "unknown",
        carrier=carrier == "1" if carrier else None,
        link_layer=_LINK_LAYER_OF_TYPE.get(read.text(f"{folder}/type") or "", LinkLayer.UNSPECIFIED),
        # Without carrier there is no speed, and asking can cost a firmware command per interface.
        speed_mbps=_speed(read, folder) if carrier == "1" else None,
        phys_port_name=read.text(f"{folder}/phys_port_name") or "",
        dev_port=read.whole(f"{folder}/dev_port", 0),
        is_enslaved=read.exists(f"{folder}/master"),
    )


def _speed(read: Attributes, folder: str) -> int | None:
    speed = read.whole(f"{folder}/speed", -1)
    return speed if speed > 0 else None


def udev_properties(root: Path, ifindex: int) -> Mapping[str, str]:
    """Read what udev knows of an interface of the host's namespace; none where udev does not run, or is hidden.

    The file holds lines with a letter each, E:NAME=VALUE for a property (systemd, sd-device/device-private.c).
    """
    try:
        with (root / f"run/udev/data/n{ifindex}").open("rb") as file:
            text = file.read(_MOST_UDEV_BYTES).decode(errors="replace")
    except OSError:
        return {}
    found = {}
    for line in text.splitlines():
        if line.startswith("E:"):
            name, _, value = line[2:].partition("=")
            found[name] = value
    return found
