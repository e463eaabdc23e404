"""One CNI call, checked, and what the books keep of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from agent.config.networks import NO_IPAM
from agent.config.routing import NO_ROUTING
from agent.model.allocation import Attachment, PodRef
from cni.ipam import plugins as ipam
from cni.netconf import NetConf
from cni.node import GrantedDevice

BEGUN = "begun"
"""Of the request in a row: when its ADD began, as time.time tells. A row that came otherwise has none."""
ROUTING = "routing"
"""Of the request in a row: what `Routing.document` made. A row of an earlier version has none."""


@dataclass(frozen=True, slots=True)
class Call:
    """One CNI call, checked. `netns` is an open descriptor, or None."""

    container_id: str
    ifname: str
    netns: int | None
    netns_path: str
    pod: PodRef
    cni_args: str
    cni_path: str
    conf: NetConf
    cpu: int | None = None
    """Processor on which the caller ran when it called, if that is known."""
    spooled_at: float | None = None
    """When a DEL was put on disk, as time.time tells; None for one that comes at this moment."""


class Slots(Protocol):
    """Chooses the devices of pods' slots. Methods block, and may be called on many threads at once."""

    def bind(self, call: Call, wanted: Callable[[], bool]) -> Sequence[GrantedDevice]:
        """Choose a device for each slot of the call's pod, once for each sandbox, and list them.

        Waits a bounded time for devices on their way back, as long as `wanted` says that it is worth it. Raises
        DeviceBusy if there are too few, Unavailable if kubelet does not answer.
        """

    def unbind(self, container_id: str, ifname: str) -> None:
        """Let go of the devices that were chosen for a sandbox in calls for this interface. Repeatable."""


class NoSlots:
    """What a node without late binding has."""

    def bind(self, call: Call, wanted: Callable[[], bool]) -> Sequence[GrantedDevice]:
        """List nothing."""
        return ()

    def unbind(self, container_id: str, ifname: str) -> None:
        """Do nothing."""


def request_of(call: Call, conf: NetConf) -> dict[str, Any]:
    """Return what the row must hold for CHECK, GC and the return of leases."""
    network = None
    if conf.ipam is not None:
        # Leases look the same in 1.0.0 and 1.1.0 but for these, and many installed plugins know only the former.
        version = conf.cni_version if _has_newer_routes(conf.ipam) else min(conf.cni_version, "1.0.0")
        told = {"cniVersion": version, "name": conf.name, "type": conf.kind, "ipam": dict(conf.ipam)}
        # The device that it is, not the slot or the key that stood for it: some lease by it, as nv-ipam does.
        told |= {"deviceID": conf.device} if conf.device is not None else {}
        network = {key: value for key, value in conf.for_ipam.items() if key.casefold() != "deviceid"} | told
    return {
        "name": call.conf.name,
        "settings": conf.settings.document(),
        "mtu": conf.mtu,
        "altnames": list(conf.altnames),
        "device_info_file": conf.device_info_file,
        "network": network,
        ROUTING: conf.routing.document() if conf.routing is not NO_ROUTING else {},
        "cni_args": call.cni_args,
        "cni_path": call.cni_path,
    }


def leasing_networks(call: Call, rows: Sequence[Attachment]) -> list[Mapping[str, Any]]:
    """List the networks with addresses that a call is about: its own, and those that rows joined under its name."""
    mine = [request_of(call, call.conf)["network"]]
    of_rows = [row.request["network"] for row in rows if row.request["name"] == call.conf.name]
    found = mine + [network for network in of_rows if network and network["ipam"]["type"] != ipam.WITHOUT_LEASES]
    leasing = [network for network in found if network is not None and network["ipam"]["type"] not in NO_IPAM]
    different = {json.dumps([n["name"], n["ipam"]], sort_keys=True): n for n in leasing}
    return list(different.values())


@dataclass(frozen=True, slots=True)
class LeasingNetwork:
    """A network with addresses, where it counts whose calls wait. Two that only have the same name are two."""

    name: str
    kind: str
    """Type of its IPAM plugin."""
    settings: str
    """All that is said to that plugin, as a digest."""

    @classmethod
    def of(cls, name: str, ipam: Mapping[str, Any]) -> LeasingNetwork:
        """Tell which one a network of this name with these addresses is."""
        said = json.dumps(ipam, sort_keys=True).encode()
        return cls(name, ipam["type"], hashlib.blake2b(said, digest_size=16).hexdigest())

    def __str__(self) -> str:
        return f"{self.name} (addresses from {self.kind})"


def counted(network: Mapping[str, Any]) -> LeasingNetwork:
    """Return the network that the document for an IPAM plugin is about."""
    return LeasingNetwork.of(network["name"], network["ipam"])


def counted_of(request: Mapping[str, Any]) -> tuple[LeasingNetwork, str]:
    """Return by which network and namespace the request in a row counts."""
    return counted(request["network"]), ipam.namespace_of(request.get("cni_args", ""))


def with_path(row: Attachment, call: Call) -> Attachment:
    """Have a row's IPAM plugin looked for where a later call says: an upgrade may have put it into another folder."""
    before = row.request.get("cni_path", "")
    if row.request.get("network") is None or call.cni_path in ("", before):
        return row
    return replace(row, request={**row.request, "cni_path": joined(call.cni_path, before)})


def joined(first: str, second: str) -> str:
    """Put the folders of one CNI_PATH behind those of another, each once."""
    return ":".join(dict.fromkeys(filter(None, f"{first}:{second}".split(":"))))


def _has_newer_routes(ipam_section: Mapping[str, Any]) -> bool:
    """Tell whether routes are configured with what came with CNI 1.1.0: a plugin of an earlier one drops it."""
    routes = ipam_section.get("routes")
    newer = {"mtu", "advmss", "priority", "table", "scope"}
    return isinstance(routes, list) and any(isinstance(route, dict) and newer & route.keys() for route in routes)


def ipam_call(request: Mapping[str, Any], container_id: str, ifname: str, netns_path: str) -> ipam.IpamCall:
    """Make the call to an IPAM plugin from what the row holds."""
    return ipam.IpamCall(container_id, ifname, netns_path, request["cni_args"], request["cni_path"])
