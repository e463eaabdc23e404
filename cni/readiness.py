"""STATUS: whether a network could take a pod now, as far as its configuration tells."""

from __future__ import annotations

from agent.errors import Unavailable
from agent.hardware.host import Host
from cni.netconf import NetConf


class ConnectivityLimited(Unavailable):
    """No pod can join now, and those that have joined may reach nobody."""

    reason = "ConnectivityLimited"


def check(host: Host, conf: NetConf) -> None:
    """Raise Unavailable if the network's parent interface is missing, ConnectivityLimited if it is down.

    A network that names none is as ready as the agent: its devices are known at ADD only.
    """
    if conf.master is None:
        return
    link = host.links.find(conf.master)
    if link is None:
        raise Unavailable(f"the interface {conf.master} is not in the host: load its driver, or change master")
    if not link.up:
        raise ConnectivityLimited(f"the interface {conf.master} is down: set it up (ip link set {conf.master} up)")
