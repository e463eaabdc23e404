"""CNI results: built, joined to a previous plugin's, in the shape of the asked version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent.hardware.host import Route
from cni.result_fields import in_version

RT_SCOPE_LINK = 253
_ROUTE_KEYS = ("mtu", "advmss", "priority", "table", "scope")


@dataclass(frozen=True, slots=True)
class Interface:
    name: str
    mac: str
    """Empty where the device has none that is known."""
    mtu: int
    """0 where there is none."""
    sandbox: str
    device: str
    """PCI address; empty for an interface that is no PCI device's own."""


@dataclass(frozen=True, slots=True)
class Leases:
    """What an IPAM plugin answered."""

    ips: tuple[Mapping[str, Any], ...] = ()
    """Each with `address` (CIDR) and, at times, `gateway`."""
    routes: tuple[Mapping[str, Any], ...] = ()
    dns: Mapping[str, Any] | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(ip["address"] for ip in self.ips)

    def kernel_routes(self) -> tuple[Route, ...]:
        """The routes for the kernel; one without a gateway takes that of the first lease of its family.

        But for one of the scope of a link or of the host: the kernel refuses it with a gateway.
        """
        return tuple(self._kernel_route(route) for route in self.routes)

    def _kernel_route(self, route: Mapping[str, Any]) -> Route:
        gateway = route.get("gw") or None
        if gateway is None and (route.get("scope") or 0) < RT_SCOPE_LINK:
            family = ":" in route["dst"]
            fitting = (ip["gateway"] for ip in self.ips if ip.get("gateway") and (":" in ip["address"]) == family)
            gateway = next(fitting, None)
        more = {key: value for key in _ROUTE_KEYS if (value := route.get(key)) is not None}
        return Route(route["dst"], gateway, **more)


def build(version: str, previous: Mapping[str, Any] | None, made: Sequence[tuple[Interface, Leases]]) -> dict[str, Any]:
    """Make the result of an ADD: what came before, and our interfaces with their addresses after it."""
    result: dict[str, Any] = dict(previous or {})
    interfaces = list(result.get("interfaces") or [])
    ips = list(result.get("ips") or [])
    routes = list(result.get("routes") or [])
    dns = result.get("dns") or {}
    for interface, leases in made:
        entry: dict[str, Any] = {
            "name": interface.name,
            "mac": interface.mac,
            "mtu": interface.mtu,
            "sandbox": interface.sandbox,
            "pciID": interface.device,
        }
        interfaces.append({key: value for key, value in entry.items() if value})
        for ip in leases.ips:
            lease = {"interface": len(interfaces) - 1, "address": ip["address"]}
            if ip.get("gateway"):
                lease["gateway"] = ip["gateway"]
            ips.append(lease)
        routes.extend(dict(route) for route in leases.routes)
        dns = dns or leases.dns or {}
    result |= {"interfaces": interfaces, "dns": dict(dns)}
    if ips:
        result["ips"] = ips
    if routes:
        result["routes"] = routes
    return in_version(result, version)
