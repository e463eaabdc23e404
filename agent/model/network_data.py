"""What an interface is in its pod, as claims tell of it: in their status, and in files for containers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_ADDRESSES = 16
"""The API server refuses more."""


@dataclass(frozen=True, slots=True)
class NetworkData:
    """An interface in a pod; empty for a device that is there without one."""

    interface: str = ""
    mac: str = ""
    addresses: tuple[str, ...] = ()
    """In CIDR form."""

    def document(self) -> dict[str, Any]:
        """Write it as `networkData` of the API, which names no address twice."""
        found = {
            "interfaceName": self.interface,
            "hardwareAddress": self.mac,
            "ips": list(dict.fromkeys(self.addresses))[:MAX_ADDRESSES],
        }
        return {key: value for key, value in found.items() if value}


def network_data(result: Mapping[str, Any], ifname: str) -> NetworkData:
    """Find an interface of a pod in a CNI result; an empty one if it is not there."""
    interfaces = result.get("interfaces") or []
    mine = [i for i, found in enumerate(interfaces) if found.get("name") == ifname and found.get("sandbox")]
    if not mine:
        return NetworkData()
    addresses = tuple(ip["address"] for ip in result.get("ips") or [] if ip.get("interface") in mine)
    return NetworkData(ifname, str(interfaces[mine[0]].get("mac", "")), addresses)
