"""Mode `ipoib`: an IP-over-InfiniBand child of the pod's own upon an IPoIB interface of the host, in any partition.

Made in the pod's namespace at once. Should a kernel refuse that, it is made in the host under a name of its own and
moved, as has long been done; the name follows from the row, so that a crash in between leaves nothing behind.
"""

from __future__ import annotations

import errno
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace

from agent.errors import HardwareError, NetlinkFailed, RequestInvalid
from agent.hardware.child_messages import IPOIB_MODES
from agent.hardware.host import Child, Host, Link, LinkChange
from agent.model.allocation import Attachment
from agent.model.device import Snapshot
from cni.modes import child, partition
from cni.modes.mode import InterfaceFacts, Planned, Target
from cni.netconf import NetConf

ARPHRD_INFINIBAND = "32"

log = logging.getLogger(__name__)


def key(host: Host, conf: NetConf, container_id: str, ifname: str) -> str:
    """Name the parent, the container and the interface."""
    return child.key(host, conf, container_id, ifname)


def plan(host: Host, snapshot: Snapshot, target: Target) -> Planned:
    """Find the parent, and the partition in its port's table. Changes nothing.

    Raises HardwareError for a parent that is not IPoIB, and for a partition that its port is not a member of.
    """
    conf = target.conf
    if conf.settings.mac is not None:
        raise RequestInvalid("mac cannot be had in mode ipoib: the address is made of the port's GID and a queue pair")
    child.refuse_settings(conf)
    parent = child.parent_of(host, conf)
    folder = host.root / "sys/class/net" / parent.name
    if partition.text(folder / "type") != ARPHRD_INFINIBAND:
        raise HardwareError(f"{parent.name} is no IPoIB interface: name one as master (ib0, say), or take mode macvlan")
    mode = partition.text(folder / "mode")
    if conf.pkey is not None:
        partition.require(folder / "device", partition.port_of(folder), conf.pkey)
    made = Child(
        kind="ipoib",
        name=target.ifname,
        mode=mode if mode in IPOIB_MODES else "datagram",
        mtu=conf.mtu,
        pkey=conf.pkey if conf.pkey is not None else partition.number(partition.text(folder / "pkey")),
    )
    found = child.planned(target, parent, made, "")
    return replace(found, undo=replace(found.undo, extra={**found.undo.extra, "pkey": made.pkey}))


def enter(host: Host, planned: Planned, netns: int) -> InterfaceFacts:
    """Make it in the namespace, or make it in the host and move it there."""
    try:
        return child.enter(host, planned, netns)
    except NetlinkFailed as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP) or planned.link is None:
            raise
        log.info("no IPoIB child can be made in another namespace: %s", error)
        return _enter_by_moving(host, planned, planned.link, netns, error)


def _enter_by_moving(host: Host, planned: Planned, parent: Link, netns: int, error: NetlinkFailed) -> InterfaceFacts:
    made, _ = planned.facts
    name = temporary_name(planned.device)
    try:
        host.links.create(replace(made, name=name, up=False), parent, None)
    except NetlinkFailed:
        raise error from None  # refused for another reason, and that error says which
    found = host.links.find(name)
    if found is None:
        raise HardwareError(f"ipoib interface {name} was made in the host but is not there")
    host.links.move_in(found, netns, LinkChange(name=made.name, up=True))
    moved = host.links.find(made.name, netns)
    if moved is None:
        raise HardwareError(f"ipoib interface {made.name} was moved into the pod but is not there")
    return InterfaceFacts(moved.name, moved.mac, moved.mtu, None)


def leave(host: Host, snapshot: Snapshot, attachment: Attachment, netns: int | None) -> Sequence[str]:
    """Remove it from the pod, or from the host if it did not get further, and verify that."""
    child.leave(host, attachment, netns)
    left = host.links.find(temporary_name(attachment.device))
    if left is not None and left.kind == "ipoib":
        host.links.remove(left)
    return ()


def away(host: Host, attachment: Attachment) -> bool:
    """Tell whether the pod's namespace, with which it ends, cannot be judged from here."""
    return child.away(attachment)


def differences(host: Host, attachment: Attachment, netns: int, conf: NetConf) -> list[str]:
    """Tell what about it is not as it was made."""
    found = child.differences(host, attachment, netns)
    pkey, folder = attachment.undo.extra.get("pkey"), host.root / "sys/class/net" / attachment.undo.netdev
    if pkey is not None and not partition.has(folder / "device", partition.port_of(folder), pkey):
        found.append(f"{attachment.undo.netdev} is not in partition {pkey:#06x} any more")
    return found


def temporary_name(device: str) -> str:
    """Name the interface in the host, from the row's key: no other has that name."""
    return "nf" + hashlib.blake2b(device.encode(), digest_size=6).hexdigest()
