"""Mode `infiniband`: a VF of an InfiniBand PF into a pod and back. Chosen by what the PF's port is.

Entering: link state, GUID (which binds the driver anew), partition, RDMA device, interface. The RDMA device goes
before the interface, for with its move IPoIB makes the interface anew (drivers/infiniband/ulp/ipoib: ipoib_main.c,
ipoib_add_one). Leaving is the exact reverse, works from any point in between and may be repeated.

Partitions are read from a port's table in sysfs, which the subnet manager writes.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from agent.errors import HardwareError, RequestInvalid
from agent.hardware.host import Host, Link, LinkChange
from agent.model.allocation import Attachment, Undo, VfSettings
from agent.model.device import Snapshot
from cni.modes import guid, moving, pf, rdma
from cni.modes.mode import InterfaceFacts, Planned, Target
from cni.modes.moving import POLL_SECONDS, Whereabouts
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
    link = host.find_netdev(device)
    if link is None:
        raise HardwareError(
            f"{device} has no interface in the host (driver {pf.driver(host, device) or 'none'}):"
            " it needs its driver and ib_ipoib, or sits in another namespace"
        )
    moving.refuse_needed(snapshot, link)
    undo = replace(moving.record(host, link, mode="infiniband"), vf_index=facts.vf_index)
    if not conf.settings.is_empty:
        undo = pf.with_settings(host, facts, undo, conf.settings, conf.name)
    undo = rdma.with_device(host, snapshot, device, conf.rdma, undo)
    found = host.find_rdma(device)
    extra = {**undo.extra, "pkey": conf.pkey, "rdma_name": found.name if found is not None else None}
    if conf.guid is not None:
        extra |= guid.recorded(host, device, facts.vf_index) | {"rdma_guid": conf.guid}
    elif found is not None and rdma.digits(found.node_guid) in guid.EMPTY:
        raise HardwareError(
            f"{device} has no GUID ({found.node_guid}), and no subnet manager lets it in: give `guid`, or let"
            " ib-kubernetes give runtimeConfig.infinibandGUID"
        )
    change = LinkChange(name=target.ifname, mtu=conf.mtu, up=True)
    undo = replace(undo, extra=extra)
    return Planned(
        device=device,
        ifname=target.ifname,
        undo=undo,
        pci_id=device,
        link=link,
        change=change,
        settings=conf.settings,
        altnames=conf.altnames,
    )


def enter(host: Host, planned: Planned, netns: int) -> InterfaceFacts:
    """Set the VF up, and move its RDMA device and then its interface into the namespace."""
    device, undo = planned.device, planned.undo
    where = moving.by_address(host, device, planned.ifname)
    pf.apply(host, device, undo, planned.settings)
    with host.rdma.renumbering(device):
        if "guids" in undo.extra:
            guid.give(host, device, undo, str(undo.extra["rdma_guid"]))
        _await_partition(host, device, undo)
        rdma.enter(host, device, undo, netns, any_node=planned.any_node)
        link = _after_rdma(where, netns, moved=undo.rdma is not None)
        if link is None:
            _change_in_pod(host, where, netns, planned)
        else:
            moving.move_in(host, link, where, netns, planned.change, planned.altnames)
    found = where.there(netns)
    if found is None:
        raise HardwareError(f"{device} was moved into the pod but is not there")
    return InterfaceFacts(planned.ifname, found.mac, found.mtu, planned.pci_id)


def leave(host: Host, snapshot: Snapshot, attachment: Attachment, netns: int | None) -> Sequence[str]:
    """Bring the VF back with its former GUID, RDMA device and interface under their names, and verify that."""
    device, undo = attachment.device, attachment.undo
    if not pf.exists(host, device):
        return ()
    where = moving.by_address(host, device, attachment.ifname)
    with host.rdma.renumbering(device):
        if pf.driver(host, device) is None and "driver" in undo.extra:
            host.bind(device, str(undo.extra["driver"]))  # a crash between unbind and bind
        with _noted(device):  # it is home in the end, or `settled` says that it is not
            moving.bring_back(host, where, undo, netns, keep_mac=True)
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


def away(host: Host, attachment: Attachment) -> bool:
    """Tell whether the VF is not back: only a namespace that lives can keep it."""
    return pf.is_away(host, attachment.device)


def differences(host: Host, attachment: Attachment, netns: int, conf: NetConf) -> list[str]:
    """Tell what about an attached VF is not as it was set up. Empty: all is well."""
    device, undo, request = attachment.device, attachment.undo, attachment.request
    link = moving.by_address(host, device, attachment.ifname).there(netns)
    mac, mtu = link.mac if link is not None else "", request["mtu"] or undo.mtu
    found = moving.link_differences(link, attachment.ifname, mac, mtu, tuple(request.get("altnames", ())))
    found += pf.differences(host, attachment) + rdma.differences(host, attachment, netns)
    return found + guid.differences(host, device, undo)


def _after_rdma(where: Whereabouts, netns: int, *, moved: bool) -> Link | None:
    """Find the interface to move once the RDMA device is in the pod; None if it came anew in the pod itself."""
    deadline = time.monotonic() + (REMADE_SECONDS if moved else 0.0)
    while True:
        link = where.home()
        if link is not None:
            return link
        if where.there(netns) is not None:
            return None
        if time.monotonic() > deadline:
            raise HardwareError(f"{where.device} has no interface any more after its RDMA device has moved")
        time.sleep(POLL_SECONDS)


def _change_in_pod(host: Host, where: Whereabouts, netns: int, planned: Planned) -> None:
    link = where.there(netns)
    if link is None:
        raise HardwareError(f"{planned.device} was created again in the pod but is not there")
    host.links.change(link, planned.change, netns)
    if planned.altnames:
        host.links.change_altnames(link, add=planned.altnames, netns=netns)


@contextmanager
def _noted(device: str) -> Iterator[None]:
    try:
        yield
    except HardwareError as error:
        log.warning("%s goes on its way back without its interface: %s", device, error)


def _await_partition(host: Host, device: str, undo: Undo) -> None:
    """Wait for the partition at index 0, which programs take that ask for none. The subnet manager gives it by GUID."""
    pkey, folder = undo.extra.get("pkey"), host.root / "sys/bus/pci/devices" / device
    if pkey is None:
        return
    deadline = time.monotonic() + PARTITION_SECONDS
    while True:
        found = first_partition(folder, 1)
        if found is None:
            log.warning("%s: nobody can tell whether it is in partition %#06x", device, pkey)
            return
        if is_same_partition(found, pkey):
            return
        if time.monotonic() > deadline:
            raise HardwareError(
                f"{device} has partition {found:#06x} at index 0, not {pkey:#06x}: let the subnet manager make"
                f" {undo.extra.get('rdma_guid') or 'its GUID'} a member of it"
            )
        time.sleep(POLL_SECONDS)


_MEMBERSHIP = 0x8000


def require_partition(device: Path, port: int, pkey: int) -> None:
    """Raise HardwareError if a port is not a member of a partition. `device` is a PCI function's folder."""
    if not in_partition(device, port, pkey):
        known = ", ".join(f"{entry:#06x}" for entry in partitions(device, port))
        raise HardwareError(
            f"port {port} of {device.resolve().name} is not in partition {pkey:#06x}, but in {known}: add its GUID to"
            " that partition in the subnet manager"
        )


def in_partition(device: Path, port: int, pkey: int) -> bool:
    """Tell whether a port is a member of a partition. One whose table cannot be read is taken for one."""
    entries = partitions(device, port)
    return not entries or any(is_same_partition(entry, pkey) for entry in entries)


def is_same_partition(one: int, other: int) -> bool:
    """Tell whether two keys are of one partition, whoever is a full member of it."""
    return (one ^ other) & ~_MEMBERSHIP == 0


def partitions(device: Path, port: int) -> tuple[int, ...]:
    """List the partitions of a port, in the order of the table; entries without one are left out."""
    try:
        names = sorted(os.listdir(device / "infiniband"))
        folder = device / "infiniband" / names[0] / "ports" / str(port) / "pkeys"
        indices = sorted((name for name in os.listdir(folder) if name.isdecimal()), key=int)
    except (OSError, IndexError):
        return ()
    found = (sysfs_number(sysfs_text(folder / index)) for index in indices)
    return tuple(entry for entry in found if entry)


def first_partition(device: Path, port: int) -> int | None:
    """Return the partition at index 0, which programs take that ask for none; None if it cannot be read."""
    try:
        names = sorted(os.listdir(device / "infiniband"))
    except OSError:
        return None
    return sysfs_number(sysfs_text(device / f"infiniband/{names[0]}/ports/{port}/pkeys/0")) if names else None


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
