"""Gives an interface its addresses, routes, rules, neighbours and settings: a request for each, all of them in one go.

Settings of IPv4 go into a request about the interface. Those of IPv6 are files only, which a container sees read-only
in its own /proc/sys; they follow the network namespace of the thread that opens them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from agent.errors import HardwareError
from agent.hardware import netns as namespaces
from agent.hardware.host import LinkPolicy, Route
from agent.hardware.netlink import address_messages as messages
from agent.hardware.netlink.codec import NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE
from agent.hardware.netlink.rtnetlink import RTM_SETLINK, LinkSocket, failed, translated

FILES = (Path("/host/proc/sys/net"), Path("/proc/sys/net"))
"""Where settings of IPv6 are written: the first that is there. The former is the host's, which the chart may mount. It
must be this folder: those below it are of the namespace in which they were mounted."""
_IPV6_OFF = {errno.EACCES: "IPv6 is off there (sysctl net.ipv6.conf.*.disable_ipv6): turn it on, or lease IPv4 only"}
"""No other address is refused so (net/ipv6/addrconf.c, addrconf_add_dev)."""
_ALREADY = (errno.EEXIST,)
MAX_AT_ONCE = 64
"""Requests in one message to the kernel."""


def configure(
    links: LinkSocket,
    ifname: str,
    netns: int | None,
    addresses: Sequence[str],
    routes: Sequence[Route],
    policy: LinkPolicy,
) -> None:
    """Give an interface all of that. What is there already is success. Raises HardwareError.

    `links` is a socket in its namespace, `netns` that namespace's descriptor; None for the host's.
    """
    found = links.find(ifname)
    if found is None:
        raise HardwareError(f"interface {ifname} is not in {'the host' if netns is None else 'the pod'}'s namespace")
    of_ipv6 = {name: value for name, value in policy.settings.items() if name in messages.IPV6_SETTINGS}
    if of_ipv6:
        write = partial(write_settings, FILES, ifname, of_ipv6)
        write() if netns is None else namespaces.run_in(netns, write)
    if policy.table is not None:
        removing = [(messages.RTM_DELRULE, 0, messages.rules_for(policy.table, version)) for version in (4, 6)]
        with translated(f"remove the rules for table {policy.table}"):
            while removing:  # each request removes one, until it is refused
                refused = links.ask_all(removing)
                removing = [one for place, one in enumerate(removing) if place not in refused]
    _ask(links, [*_requests(found.ifindex, ifname, addresses, routes, policy)])


class _Asked(NamedTuple):
    """A request, what it is for, and the errors that say that it is so already."""

    action: str
    kind: int
    flags: int
    body: bytes
    fine: tuple[int, ...] = ()


def _ask(links: LinkSocket, asked: Sequence[_Asked]) -> None:
    """Ask for all of that. Raises NetlinkFailed for what is refused."""
    for start in range(0, len(asked), MAX_AT_ONCE):
        some = asked[start : start + MAX_AT_ONCE]
        with translated(some[0].action):
            refused = links.ask_all([(one.kind, one.flags, one.body) for one in some])
        for place, number in sorted(refused.items()):
            if number not in some[place].fine:
                raise failed(some[place].action, OSError(number, os.strerror(number)), _IPV6_OFF)


def _requests(
    ifindex: int, ifname: str, addresses: Sequence[str], routes: Sequence[Route], policy: LinkPolicy
) -> Iterator[_Asked]:
    """List what to ask for, each thing before what builds upon it."""
    if of_ipv4 := {name: value for name, value in policy.settings.items() if name in messages.IPV4_SETTINGS}:
        yield _Asked(f"set {', '.join(of_ipv4)} of {ifname}", RTM_SETLINK, 0, messages.settings(ifindex, of_ipv4))
    for cidr in addresses:
        body = messages.address(ifindex, cidr)
        yield _Asked(f"add address {cidr} to {ifname}", messages.RTM_NEWADDR, NLM_F_CREATE | NLM_F_REPLACE, body)
    for near in policy.neighbours:
        action, body = f"add neighbour {near.address} at {near.mac} to {ifname}", messages.neighbour(ifindex, near)
        yield _Asked(action, messages.RTM_NEWNEIGH, NLM_F_CREATE | NLM_F_REPLACE, body)
    for route in routes:
        # Before those to the same destination through other interfaces, not in their place: what is bound to one of
        # these, as RDMA-CM is by its address, needs its own. As the library of the CNI plugins does.
        table = f" in table {route.table}" if route.table is not None else ""
        action = f"add route {route.destination} via {route.gateway or ifname}{table}"
        yield _Asked(action, messages.RTM_NEWROUTE, NLM_F_CREATE, messages.route(ifindex, route), _ALREADY)
    for rule in policy.rules:
        action, body = f"add a rule for table {rule.table}", messages.rule(rule)
        yield _Asked(action, messages.RTM_NEWRULE, NLM_F_CREATE | NLM_F_EXCL, body, _ALREADY)


def write_settings(folders: Sequence[Path], ifname: str, settings: Mapping[str, int]) -> None:
    """Write settings of IPv6, in the calling thread's namespace. Raises HardwareError."""
    folder = next((one for one in folders if one.is_dir()), folders[-1]) / "ipv6/conf" / ifname
    if not folder.parent.is_dir():  # the kernel has no IPv6: nothing to accept, and nothing to turn off
        return
    for name, value in settings.items():
        try:
            (folder / name).write_text(f"{value}\n")
        except OSError as error:
            raise HardwareError(
                f"cannot set {name} of {ifname} to {value}: {error.strerror}: settings of IPv6 are files, which a"
                " container sees read-only; mount the host's (writableSysctls of the chart, the component sysctls), or"
                f" leave {name} out of the network's sysctls"
            ) from error
