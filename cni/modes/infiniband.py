"""Mode `infiniband`: a VF of an InfiniBand PF into a pod and back. Chosen by what the PF's port is.

Entering: link state, GUID (which binds the driver anew), partition, RDMA device, interface. The RDMA device goes
before the interface, for with its move IPoIB makes the interface anew (drivers/infiniband/ulp/ipoib: ipoib_main.c,
ipoib_add_one). Leaving is the exact reverse, works from any point in between and may be repeated.

Partitions are read from a port's table in sysfs, which the subnet manager writes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from agent.errors import HardwareError, RequestInvalid
from agent.hardware.host import Host, Link, LinkChange
from agent.model.allocation import Attachment, Undo, VfSettings
from agent.model.device import Snapshot
from cni.modes import guid, moving, pf, rdma, vf
from cni.modes.mode import InterfaceFacts, Planned, Target
from cni.modes.moving import Whereabouts
from cni.modes.vf import away as away
from cni.modes.vf import key as key
from cni.netconf import NetConf

PARTITION_SECONDS = 5.0
"""How long the subnet manager may take to give a GUID that is new to it its """
REMADE_SECONDS = 5.0
"""How long IPoIB may take to make an interface anew after its RDMA device has moved."""

log = logging.getLogger(__name__)


def plan(host: Host, snapshot: Snapshot, target: Target) -> Planned:
    """Find the VF and record how it is now. Changes nothing.

    Raises DeviceGone for one that vanished, HardwareError for one that has no interface or no GUID.
    """
    device, conf = target.device, target.conf
    if conf.settings != VfSettings(link_state=conf.settings.link_state):
        raise RequestInvalid(f"{device} is an InfiniBand VF: of what a PF enforces, it has guid and link_state only")
    facts = pf.known(snapshot, device)
    if facts.physfn is None or facts.vf_index is None:
        raise HardwareError(f"{device} is not a VF: mode nic moves whole adapters")
    link, undo = vf.recorded(host, snapshot, target, "its driver and ib_ipoib")
    found = host.find_rdma(device)
    extra = {**undo.extra, "pkey": conf.pkey, "rdma_name": found.name if found is not None else None}
    if conf.guid is not None:
        extra |= guid.recorded(host, device, facts.vf_index) | {"rdma_guid": conf.guid}
    elif found is not None and rdma.digits(found.node_guid) in guid.EMPTY:
        raise HardwareError(
            f"{device} has no GUID ({found.node_guid}), and no subnet manager lets it in: give `guid`, or let"
            " ib-kubernetes give runtimeConfig.infinibandGUID"
        )
    undo = replace(undo, vf_index=facts.vf_index, extra=extra)
    return Planned(target, undo, link, LinkChange(name=target.ifname, mtu=conf.mtu, up=True))


def enter(host: Host, planned: Planned, netns: int) -> InterfaceFacts:
    """Set the VF up, and move its RDMA device and then its interface into the namespace."""
    device, undo = planned.target.device, planned.undo
    where = moving.by_address(host, device, planned.target.ifname)
    pf.apply(host, device, undo, planned.target.conf.settings)
    with host.rdma.renumbering(device):
        if "guids" in undo.extra:
            guid.give(host, device, undo, str(undo.extra["rdma_guid"]))
        _await_partition(host, device, undo)
        rdma.enter(host, device, undo, netns, any_node=planned.any_node)
        link = _after_rdma(where, netns, moved=undo.rdma is not None)
        if link is None:
            _change_in_pod(host, where, netns, planned)
        else:
            moving.move_in(host, planned, link, where, netns)
    found = moving.there(where, netns)
    return moving.facts(planned, found.mac, found.mtu)


def leave(host: Host, attachment: Attachment, netns: int | None) -> Sequence[str]:
    """Bring the VF back with its former GUID, RDMA device and interface under their names, and verify that."""
    device, undo = attachment.device, attachment.undo
    if not pf.exists(host, device):
        return ()
    where = moving.by_address(host, device, attachment.ifname)
    with host.rdma.renumbering(device):
        if pf.driver(host, device) is None and "driver" in undo.extra:
            host.bind(device, str(undo.extra["driver"]))  # a crash between unbind and bind
        try:
            moving.bring_back(host, where, undo, netns, keep_mac=True)
        except HardwareError as error:  # it is home in the end, or `settled` says that it is not
            log.warning("%s goes on its way back without its interface: %s", device, error)
        rdma.leave(host, device, attachment, netns)
        pf.restore(host, device, undo)
        guid.take_back(host, device, undo)
        if not pf.can_have_interface(host, device):
            log.warning("%s has no interface: it was unbound, or bound to a driver for programs", device)
            return ()
        link = guid.settled(host, device, undo)
    # The MAC of IPoIB holds a queue pair's number, which is another each time.
    moving.settle(host, where, replace(undo, mac=link.mac), link, pod_may_hold=moving.may_hold(attachment, netns))
    return ()


def differences(host: Host, attachment: Attachment, netns: int, conf: NetConf) -> list[str]:
    """Tell what about an attached VF is not as it was set up. Empty: all is well."""
    device = attachment.device
    found = moving.link_differences(moving.by_address(host, device, attachment.ifname).there(netns), attachment)
    found += pf.differences(host, attachment) + rdma.differences(host, attachment, netns)
    return found + guid.differences(host, device, attachment.undo)


def _after_rdma(where: Whereabouts, netns: int, *, moved: bool) -> Link | None:
    """Find the interface to move once the RDMA device is in the pod; None if it came anew in the pod itself."""
    if moving.awaited(lambda: where.home() or where.there(netns), REMADE_SECONDS if moved else 0.0) is None:
        raise HardwareError(f"{where.device} has no interface any more after its RDMA device has moved")
    return where.home()


def _change_in_pod(host: Host, where: Whereabouts, netns: int, planned: Planned) -> None:
    link, altnames = moving.there(where, netns), planned.target.conf.altnames
    host.links.change(link, planned.change, netns)
    if altnames:
        host.links.change_altnames(link, add=altnames, netns=netns)


def _await_partition(host: Host, device: str, undo: Undo) -> None:
    """Wait for the partition at index 0, which programs take that ask for none. The subnet manager gives it by GUID."""
    pkey, folder = undo.extra.get("pkey"), host.root / "sys/bus/pci/devices" / device
    if pkey is None:
        return
    if moving.awaited(lambda: in_partition(folder, 1, pkey, first=True) or None, PARTITION_SECONDS) is None:
        first = _told(partitions(folder, 1)[:1])
        raise HardwareError(
            f"{device} has partition {first} at index 0, not {pkey:#06x}: let the subnet manager make"
            f" {undo.extra.get('rdma_guid') or 'its GUID'} a member of it"
        )


_MEMBERSHIP = 0x8000


def require_partition(device: Path, port: int, pkey: int) -> None:
    """Raise HardwareError if a port is not a member of a partition. `device` is a PCI function's folder."""
    if not in_partition(device, port, pkey):
        raise HardwareError(
            f"port {port} of {device.resolve().name} is not in partition {pkey:#06x}, but in"
            f" {_told(filter(None, partitions(device, port)))}: add its GUID to that partition in the subnet manager"
        )


def in_partition(device: Path, port: int, pkey: int, *, first: bool = False) -> bool:
    """Tell whether a port is a member of a partition, or has it `first` in its table.

    Whether as a full member counts for nothing. A port whose table cannot be read is taken for a member; with `first`
    one that the subnet manager has written nothing into yet is none.
    """
    entries = partitions(device, port)
    known = entries[:1] if first else tuple(filter(None, entries))
    return not known or any((entry ^ pkey) & ~_MEMBERSHIP == 0 for entry in known)


def _told(entries: Iterable[int]) -> str:
    return ", ".join(f"{entry:#06x}" for entry in entries)


def partitions(device: Path, port: int) -> tuple[int, ...]:
    """List a port's table of partitions, with 0 for an entry without one. Empty if it cannot be read."""
    try:
        names = sorted(os.listdir(device / "infiniband"))
        folder = device / "infiniband" / names[0] / "ports" / str(port) / "pkeys"
        indices = sorted((name for name in os.listdir(folder) if name.isdecimal()), key=int)
    except (OSError, IndexError):
        return ()
    return tuple(sysfs_number(sysfs_text(folder / index)) or 0 for index in indices)


def port_of(netdev: Path) -> int:
    """Return the port of an interface; `netdev` is its folder in /sys/class/net."""
    value = sysfs_number(sysfs_text(netdev / "dev_port"))
    return 1 if value is None else value + 1


def sysfs_number(value: str) -> int | None:
    """Read what sysfs writes as 0x8001 or 1."""
    try:
        return int(value, 0)
    except ValueError:
        return None


def sysfs_text(path: Path) -> str:
    """Read a file of sysfs; an empty text if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
