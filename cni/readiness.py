"""STATUS: whether a network could take a pod now, as far as its configuration tells."""

from __future__ import annotations

from agent.errors import Unavailable
from agent.hardware.host import Host, Link
from agent.model.device import is_pci_address
from cni.netconf import NetConf


class ConnectivityLimited(Unavailable):
    """No pod can join now, and those that have joined may reach nobody."""

    reason = "ConnectivityLimited"


def check(host: Host, conf: NetConf) -> None:
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
