"""CHECK and GC: compare what is with the books, and free what the runtime no longer knows."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from ipaddress import ip_address, ip_interface, ip_network
from typing import Any

from agent.errors import AttachmentError, ConnectivityLimited, RequestInvalid, Unavailable
from agent.hardware import netns as namespaces
from agent.hardware.host import Host, Link
from agent.ledger import Ledger
from agent.model.allocation import Attachment, AttachmentState
from agent.model.device import is_pci_address
from cni import result
from cni.call import ROUTING, Call
from cni.detach import Detacher
from cni.ipam.leases import LeaseBook
from cni.modes.choice import mode_of
from cni.netconf import NetConf

log = logging.getLogger(__name__)


def check(host: Host, ledger: Ledger, leases: LeaseBook, call: Call) -> None:
    """Compare what was set up with what is. Raises AttachmentError that lists the differences."""
    assert call.netns is not None  # `cni.server` sees to it
    rows = ledger.attachments_of(call.container_id, call.ifname)
    if not rows:
        named = call.conf.device or call.conf.master or ("a VF of pf" if call.conf.pf else None)
        if named is not None:
            raise AttachmentError(f"{named} is not attached for container {call.container_id}")
        return
    here = namespaces.identity(call.netns)
    found: list[str] = []
    for row in rows:
        if row.state is not AttachmentState.ATTACHED:
            found.append(f"{row.device} is {row.state.value}")
        elif row.owner.netns != here:
            found.append(f"{row.device} was attached to namespace {row.owner.netns}, and CHECK is about {here}")
        else:
            found += mode_of(row).differences(host, row, call.netns, call.conf)
            found += filter(None, [leases.check(row)])
            if row.undo.mode != "vfio":  # else a program in the pod has the addresses
                found += _address_differences(host, row, call, call.netns)
                found += _routing_differences(host, ledger, row, call)
    answer = call.conf.prev_result or rows[0].result or {}
    if any(row.undo.mode != "vfio" for row in rows):
        found += _route_differences(host, answer, call.netns)
    if found:
        raise AttachmentError("; ".join(found))


def _address_differences(host: Host, row: Attachment, call: Call, netns: int) -> list[str]:
    """Return which addresses are missing that the answer gave to this interface."""
    given = result.ips_of(call.conf.prev_result or row.result or {}, row.ifname)
    if given is None:
        return [f"prevResult has no interface {row.ifname}"]
    # In the kernel's spelling.
    missing = {str(ip_interface(ip["address"])) for ip in given} - set(host.links.addresses(row.ifname, netns))
    return [f"{row.ifname} lacks address {address}" for address in sorted(missing)]


def _routing_differences(host: Host, ledger: Ledger, row: Attachment, call: Call) -> list[str]:
    """Return what is missing of what the network says of routes, rules, neighbours and settings."""
    rows = [other for other in ledger.attachments() if other.owner.netns == row.owner.netns]
    if not row.request.get(ROUTING) and len(rows) == 1:
        return []
    from cni import routing

    assert call.netns is not None
    answer = call.conf.prev_result or row.result or {}
    return routing.differences(host.links, call.netns, row, rows, answer)


def _route_differences(host: Host, answer: Mapping[str, Any], netns: int) -> list[str]:
    """Return which routes of the answer are missing in the namespace, through whichever interface they should go.

    A route without a gateway was given the interface's own, see `Leases.kernel_routes`, so any will do.
    """
    expected = [(ip_network(route["dst"], strict=False), route.get("gw")) for route in answer.get("routes") or []]
    if not expected:
        return []
    present = {(ip_network(route.destination), route.gateway) for route in host.links.routes(netns)}
    destinations = {destination for destination, _ in present}
    return [
        f"the route to {destination}{f' via {gateway}' if gateway else ''} is missing"
        for destination, gateway in expected
        if (destination not in destinations if not gateway else (destination, str(ip_address(gateway))) not in present)
    ]


def collect(ledger: Ledger, detacher: Detacher, call: Call) -> None:
    """GC: promise to detach what this network holds for containers that the runtime no longer lists, as a DEL does."""
    valid = call.conf.valid_attachments
    if valid is None:
        raise RequestInvalid("GC came without cni.dev/valid-attachments")
    dead = [
        row
        for row in ledger.attachments()
        if row.request["name"] == call.conf.name and (row.owner.container_id, row.owner.cni_ifname) not in valid
    ]
    detacher.leases.look_in(call.cni_path)
    ledger.begin_detach([row.attachment_id for row in dead])
    for row in dead:
        log.info("garbage: %s of container %s", row.device, row.owner.container_id)
        detacher.start_detach(row, None)


def status(host: Host, conf: NetConf) -> None:
    """Raise Unavailable if the network's parent interface is missing, ConnectivityLimited if it is down.

    Of several PFs one that is up will do. A network that names none is as ready as the agent: its devices are known
    at ADD only.
    """
    key, names = ("master", [conf.master]) if conf.master is not None else ("pf", [one.pf for one in conf.pf])
    if not names:
        return
    found = [link for name in names if (link := _find(host, name)) is not None]
    told = " or ".join(names)
    if not found:
        raise Unavailable(f"the interface {told} is not in the host: load its driver, or change {key}")
    if not any(link.up for link in found):
        raise ConnectivityLimited(f"the interface {told} is down: set it up (ip link set {found[0].name} up)")


def _find(host: Host, name: str) -> Link | None:
    return host.find_netdev(name) if is_pci_address(name) else host.links.find(name)
