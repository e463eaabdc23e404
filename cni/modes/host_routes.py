"""Addresses and routes that the host had on an interface, given back with it as far as the host still takes them.

They were the host's own, and the host may have changed meanwhile: a gateway is reached no longer, or its destination
by another way. An adapter is not withheld for that, since waiting does not bring the gateway back; but it is told,
with the command that gives it by hand.
"""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from agent.errors import NetlinkFailed
from agent.hardware.host import Host, Route

PATIENCE_SECONDS = 2.0
"""How long the host may take until a gateway is reached again: others may be setting up interfaces, too."""
POLL_SECONDS = 0.1
NOT_ITS_FAULT = frozenset((errno.ENODEV, errno.ENOMEM, errno.ENOBUFS, errno.EINTR))
"""These say nothing of the address or the route."""


Place = tuple[str, int | None, int | None]
"""What no two routes share: destination, table and metric."""
T = TypeVar("T")


def give_back(host: Host, name: str, addresses: Sequence[str], routes: Sequence[Route]) -> tuple[str, ...]:
    """Give an interface its addresses and routes. Return what the host does not take, as commands with the reason.

    Raises HardwareError if the interface itself is the obstacle.
    """
    refused = [
        f"ip address add {address} dev {name}: {why}" for address, why in _given(host, name, addresses, _address)
    ]
    if not routes:
        return tuple(refused)
    occupied = {_place(route) for route in Counter(host.links.routes(None)) - Counter(host.links.routes(None, name))}
    wanted = [route for route in routes if _place(route) not in occupied]
    deadline = time.monotonic() + PATIENCE_SECONDS
    while failed := _given(host, name, wanted, _route):
        if len(failed) == len(wanted):  # otherwise one may lead to the gateway of another
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        wanted = [route for route, _ in failed]
    refused += [f"{command(name, route)}: {why}" for route, why in failed]
    refused += [
        f"{command(name, route)}: its destination is reached by another way now"
        for route in routes
        if _place(route) in occupied
    ]
    return tuple(refused)


def command(name: str, route: Route) -> str:
    """Spell the command that makes a route."""
    told = (
        ("via", route.gateway),
        ("dev", name),
        ("metric", route.priority),
        ("table", route.table),
        ("src", route.source),
        ("proto", route.protocol),
    )
    words = " ".join(f"{word} {value}" for word, value in told if value is not None)
    return f"ip route add {route.destination} {words}" + (" onlink" if route.onlink else "")


def _address(host: Host, name: str, address: str) -> None:
    host.links.configure(name, None, (address,), ())


def _route(host: Host, name: str, route: Route) -> None:
    host.links.configure(name, None, (), (route,))


def _given(host: Host, name: str, wanted: Sequence[T], give: Callable[[Host, str, T], None]) -> list[tuple[T, str]]:
    """Give one after the other; return those that are refused, each with the reason."""
    refused = []
    for one in wanted:
        try:
            give(host, name, one)
        except NetlinkFailed as error:
            if error.errno in NOT_ITS_FAULT:
                raise
            refused.append((one, str(error).removeprefix(f"{error.action}: ")))
    return refused


def _place(route: Route) -> Place:
    return route.destination, route.table, route.priority
