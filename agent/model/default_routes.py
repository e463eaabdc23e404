"""Which of the host's interfaces carry its default route. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DefaultRoute:
    """One default route of the host's main table, through one interface."""

    netdev: str
    family: int
    """4 or 6."""
    metric: int = 0
    advertised: bool = False
    """A router advertised it (RTPROT_RA): each interface that is up gets one where a router is."""


def only_ways(routes: Iterable[DefaultRoute], below: Callable[[str], frozenset[str]]) -> frozenset[str]:
    """Return the interfaces that the host's default route of IPv4, or that of IPv6, goes through.

    The kernel uses the route of the lowest metric; another is no way out to rely upon, and may lead nowhere. Several
    routes of that metric stand in for each other: only what all of them go through is needed. Routes that routers
    advertise count only if the host has no other. `below` returns an interface and those that it stands upon; it is
    asked once for each interface that counts, and no more than needed.
    """
    all_routes = list(routes)
    counting = [route for route in all_routes if not route.advertised] or all_routes
    found: frozenset[str] = frozenset()
    for family in (4, 6):
        common: frozenset[str] | None = None
        own = [route for route in counting if route.family == family]
        lowest = min((route.metric for route in own), default=0)
        for netdev in sorted({route.netdev for route in own if route.metric == lowest}):
            common = below(netdev) if common is None else common & below(netdev)
            if not common:
                break  # there may be a route through each of a thousand VFs
        found |= common or frozenset()
    return found
