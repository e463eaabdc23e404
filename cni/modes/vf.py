"""Mode `vf`: one Ethernet VF into a pod and back.

Entering: settings on the PF, then the interface. Leaving works from any point in between, and may
be repeated: it looks at where the device is and brings it to what the undo record says. So the same
code serves DEL, a failed ADD, and the reconciler after a crash.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from agent.errors import HardwareError, RequestInvalid
from agent.hardware.host import Host, Link, LinkChange
from agent.model.allocation import Attachment, Undo
from agent.model.device import Snapshot
from cni.modes import guid, moving, pf, rdma
from cni.modes.mode import InterfaceFacts, Planned, Target
from cni.netconf import NetConf

log = logging.getLogger(__name__)


def key(host: Host, conf: NetConf, container_id: str, ifname: str) -> str:
    """Name a VF by its PCI address."""
    if conf.device is None:
        raise RequestInvalid("deviceID is missing: name a VF by its PCI address")
    return conf.device


def plan(host: Host, snapshot: Snapshot, target: Target) -> Planned:
    """Find the device and record how it is now. Changes nothing.

    Raises DeviceGone for a device that vanished, HardwareError for one that is no VF or has no interface.
    """
    device, conf = target.device, target.conf
    facts = pf.known(snapshot, device)
    if facts.physfn is None:
        raise HardwareError(
            f"{device} is not a VF, and mode vf takes nothing else: the node may need it itself;"
            " mode nic moves whole adapters"
        )
    if facts.is_for_programs:
        raise HardwareError(f"{device} is bound to {facts.driver}, which gives no interface: bind it to its own driver")
    if conf.function_reset:
        raise RequestInvalid(f"functionReset is for VFs that programs drive, and {device} has a network driver")
    if conf.guid is not None or conf.pkey is not None:
        raise RequestInvalid(guid.not_infiniband("guid" if conf.guid is not None else "pkey", device, facts.physfn))
    link, undo = recorded(host, snapshot, target, "a network driver")
    up = not conf.ports  # a bond takes what is down, and brings it up
    return Planned(target, undo, link, LinkChange(name=target.ifname, mac=conf.settings.mac, mtu=conf.mtu, up=up))


def recorded(host: Host, snapshot: Snapshot, target: Target, needed: str) -> tuple[Link, Undo]:
    """Find a VF's interface in the host, and record it with its PF's settings and its RDMA device. Changes nothing.

    Raises HardwareError for one without an interface, which then lacks what is `needed`, or that the host uses.
    """
    device, conf = target.device, target.conf
    link = host.find_netdev(device)
    if link is None:
        raise HardwareError(
            f"{device} has no interface in the host (driver {pf.driver(host, device) or 'none'}):"
            f" it needs {needed}, or sits in another namespace"
        )
    moving.refuse_needed(snapshot, link)
    undo = moving.record(host, link, mode=target.mode)
    undo = pf.with_settings(host, pf.known(snapshot, device), undo, conf.settings, conf.name)
    if conf.rdma or snapshot.rdma_exclusive:
        undo = rdma.with_device(host, snapshot, device, conf.rdma, undo)
    return link, undo


def enter(host: Host, planned: Planned, netns: int) -> InterfaceFacts:
    """Set the VF up on its PF and move its interface into the namespace."""
    undo, link, change = planned.undo, planned.link, planned.change
    assert link is not None
    pf.apply(host, planned.target.device, undo, planned.target.conf.settings)
    where = moving.by_address(host, planned.target.device, planned.target.ifname)
    moving.move_in(host, planned, link, where, netns)
    if undo.rdma is not None:
        rdma.enter(host, planned.target.device, undo, netns, any_node=planned.any_node)
    return moving.facts(planned, change.mac or undo.mac, change.mtu or undo.mtu)


def leave(host: Host, attachment: Attachment, netns: int | None) -> Sequence[str]:
    """Bring a VF back to the host as it was found, from wherever it is, and verify it.

    A device that no longer exists is success. `netns` is the pod's namespace if it is still open.
    Raises HardwareError if the device is not (verifiably) back.
    """
    device = attachment.device
    if pf.exists(host, device):
        try:
            rdma.leave(host, device, attachment, netns)
        finally:
            _leave(host, attachment, netns)
    return ()


def _leave(host: Host, attachment: Attachment, netns: int | None) -> None:
    device, undo = attachment.device, attachment.undo
    where = moving.by_address(host, device, attachment.ifname)
    # The driver may refuse the VF a MAC while the PF enforces another, so that waits for the PF's settings.
    link = moving.bring_back(host, where, undo, netns, keep_mac=not undo.settings.is_empty)
    if link is None and pf.can_have_interface(host, device):
        link = moving.await_return(where)
    pf.restore(host, device, undo)
    if link is None:
        log.warning("%s has no interface: it was unbound, or bound to a driver for programs", device)
        return
    if not undo.settings.is_empty:
        link = where.home() or link  # its MAC may be another now
    moving.settle(host, where, undo, link, pod_may_hold=moving.may_hold(attachment, netns))


def away(host: Host, attachment: Attachment) -> bool:
    """Tell whether the VF is not back: only a namespace that lives can keep it."""
    return pf.is_away(host, attachment.device)


def differences(host: Host, attachment: Attachment, netns: int, conf: NetConf) -> list[str]:
    """Tell what about an attached VF is not as it was set up. Empty: all is well."""
    link = moving.by_address(host, attachment.device, attachment.ifname).there(netns)
    found = moving.link_differences(link, attachment, moving.expected_mac(attachment, conf))
    return found + pf.differences(host, attachment) + rdma.differences(host, attachment, netns)
