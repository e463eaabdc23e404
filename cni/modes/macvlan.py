"""Mode `macvlan`: an interface of the pod's own upon the netdev of a shared HCA.

RDMA-CM in the pod binds to an address of the pod, and the HCA's port has a GID for each address of an interface
upon its netdev; so pods that share an HCA need no more than this to be told apart. Made in the pod's namespace in
one request: no name in the host, no half-made interface after a crash but in the pod.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent.errors import RequestInvalid
from agent.hardware.host import Child, Host
from agent.model.allocation import Attachment
from agent.model.device import Snapshot
from cni.modes import child
from cni.modes.mode import InterfaceFacts, Planned, Target
from cni.netconf import NetConf

PASSTHRU = "passthru"


def key(host: Host, conf: NetConf, container_id: str, ifname: str) -> str:
    """Name the parent, the container and the interface."""
    return child.key(host, conf, container_id, ifname)


def plan(host: Host, snapshot: Snapshot, target: Target) -> Planned:
    """Find the parent and choose the MAC, by which the interface is found again. Changes nothing."""
    conf = target.conf
    child.refuse_settings(conf)
    parent = child.parent_of(host, conf)
    mac = conf.settings.mac or child.mac_for(target)
    if conf.macvlan_mode == PASSTHRU:  # shares its parent's; another would be set on the parent too
        if conf.settings.mac is not None:
            raise RequestInvalid(f"mac cannot be had in macvlanMode passthru: it would become that of {parent.name}")
        mac = parent.mac
    made = Child(
        kind="macvlan",
        name=target.ifname,
        mode=conf.macvlan_mode,
        mac=None if conf.macvlan_mode == PASSTHRU else mac,
        mtu=conf.mtu or parent.mtu,
    )
    return child.planned(target, parent, made, mac)


def enter(host: Host, planned: Planned, netns: int) -> InterfaceFacts:
    """Make it in the namespace."""
    return child.enter(host, planned, netns)


def leave(host: Host, snapshot: Snapshot, attachment: Attachment, netns: int | None) -> Sequence[str]:
    """Remove it, and verify that."""
    child.leave(host, attachment, netns)
    return ()


def away(host: Host, attachment: Attachment) -> bool:
    """Tell whether the pod's namespace, with which it ends, cannot be judged from here."""
    return child.away(attachment)


def differences(host: Host, attachment: Attachment, netns: int, conf: NetConf) -> list[str]:
    """Tell what about it is not as it was made."""
    return child.differences(host, attachment, netns)
