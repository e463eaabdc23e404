"""The step that takes a function's RDMA device along, for systems that keep RDMA devices apart (exclusive mode).

Used by the modes that move hardware. The undo record holds the device's name and index; in the pod it is found
by index, which neither a rename nor a move changes, and in the host by the PCI function it hangs below. Without
such a record each function here does nothing, and asks nothing of the kernel.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agent.errors import DriverUnavailable, HardwareError, NetlinkFailed
from agent.hardware.host import Host, RdmaLink
from agent.model.allocation import Attachment, Undo
from agent.model.device import Snapshot
from cni.modes import moving, pf
from cni.modes.moving import RETURN_SECONDS

EXCLUSIVE_REMEDY = (
    "boot the node with ib_core.netns_mode=0, or run `rdma system set netns exclusive` before any pod does;"
    " or leave `rdma` out of the network"
)

log = logging.getLogger(__name__)


def with_device(host: Host, snapshot: Snapshot, device: str, wanted: bool | None, undo: Undo) -> Undo:
    """Add a function's RDMA device to an undo record, if it is to go along. Changes nothing.

    `wanted` is the network's key `rdma`: False leaves the device in the host, True takes no less than a device
    of the pod's own, None takes it along if the system is in exclusive mode.
    Raises HardwareError if the device cannot go along.
    """
    facts = snapshot.by_address.get(device)
    if wanted is False or (wanted is None and not (snapshot.rdma_exclusive and facts and facts.rdma_devices)):
        return undo
    mode = host.rdma.mode()
    if mode != "exclusive":
        if wanted is None:  # changed since the scan
            return undo
        raise HardwareError(
            f"{device}: `rdma: true` asks for an RDMA device of the pod's own, but RDMA devices are"
            f" {'shared by all namespaces of' if mode else 'unknown to'} this system: {EXCLUSIVE_REMEDY}"
        )
    found = host.find_rdma(device)
    if found is None:
        if wanted is None:
            return undo
        raise HardwareError(f"{device} has no RDMA device in the host: load its RDMA driver (mlx5_ib, irdma …)")
    if _is_software(host, device, found):
        raise HardwareError(
            f"RDMA device {found.name} is software over the interface of {device} and would end when that moves:"
            f" remove it (rdma link delete {found.name}), or set `rdma: false` in the network"
        )
    return replace(undo, rdma=found.name, extra={**undo.extra, "rdma_index": found.index})


def enter(host: Host, device: str, undo: Undo, netns: int, *, any_node: bool = False) -> None:
    """Move the RDMA device of an undo record into the namespace.

    Raises HardwareError if its driver refuses, or, but for `any_node`, if its character device has another number
    afterwards: the container was promised the old one.
    """
    if undo.rdma is None:
        return
    with host.rdma.renumbering(device):
        found = next((d for d in host.rdma.devices() if _is_it(d, undo)), None)
        if found is None:
            raise HardwareError(f"RDMA device {undo.rdma} of {device} has gone from the host: was its driver rebound?")
        promised = node(host, found)
        try:
            host.rdma.move_in(found, netns)
        except NetlinkFailed as error:
            if error.errno == errno.EOPNOTSUPP:
                raise NetlinkFailed(error.action, error.errno, _refusal(host, device, found)) from error
            raise
        if not any_node:
            refuse_other_node(device, found, promised, node(host, found, netns))


def refuse_other_node(device: str, found: RdmaLink, promised: str | None, given: str | None) -> None:
    """Raise HardwareError if a device's verbs node is not the one that it had before."""
    if promised is not None and given != promised:
        raise HardwareError(
            f"RDMA device {found.name} of {device} came with {promised} and has {given or 'none'} in the pod, so"
            " containers would get the wrong device: let the pod be created again"
        )


def require_node(host: Host, row: Attachment, netns: int, promised: str) -> None:
    """Raise HardwareError if an attached device came to another verbs node than `promised`.

    Only moves and binding anew give another; a device that did neither is not looked at. A VF of InfiniBand may have
    been bound anew for its former pod's GUID.
    """
    found, where = moved(host, row, netns)
    if found is not None:
        refuse_other_node(row.device, found, promised, node(host, found, where))


def moved(host: Host, row: Attachment, netns: int) -> tuple[RdmaLink | None, int | None]:
    """Find the RDMA device of a row, and the namespace that has it (None: the host).

    None for a device that was neither moved nor bound anew for its pod.
    """
    undo = row.undo
    if undo.rdma is not None:
        return next((d for d in host.rdma.devices(netns) if _is_it(d, undo)), None), netns
    if "guids" in undo.extra or undo.mode == "infiniband":
        return host.find_rdma(row.device), None
    return None, None


def renumbered(host: Host, row: Attachment, netns: int, edits: Mapping[str, Any]) -> Mapping[str, Any]:
    """Say the containerEdits of a row's device with the character devices that it has now.

    Raises HardwareError if it has none any more of a sort that containers are to get.
    """
    found, where = moved(host, row, netns)
    nodes = edits.get("deviceNodes", ())
    if found is None or not nodes:
        return edits
    new: dict[str, str] = {}
    for kind in ("uverbs", "umad", "issm"):
        start = f"/dev/infiniband/{kind}"
        old = [each["path"] for each in nodes if each["path"].startswith(start)]
        for number, path in enumerate(old, 1):  # of ports, in their order; a device has one of verbs
            port = None if kind == "uverbs" else number
            try:
                name = host.rdma.char_device(found, kind, port, where)
            except (NetlinkFailed, DriverUnavailable) as error:
                raise HardwareError(
                    f"{row.device} came into its pod without {kind}, in place of {path}: {error}"
                ) from error
            new[path] = f"/dev/infiniband/{name}"
    if all(old_path == new_path for old_path, new_path in new.items()):
        return edits
    return {**edits, "deviceNodes": [_at(each, new) for each in nodes]}


def _at(node: Mapping[str, Any], new: Mapping[str, str]) -> Mapping[str, Any]:
    path = new.get(node["path"])
    if path is None:
        return node
    return {**node, "path": path, **({"hostPath": path} if "hostPath" in node else {})}


def node(host: Host, device: RdmaLink, netns: int | None = None) -> str | None:
    """Name the device's verbs node, None if it has none (ib_uverbs is not loaded)."""
    try:
        return f"/dev/infiniband/{host.rdma.char_device(device, 'uverbs', netns=netns)}"
    except (NetlinkFailed, DriverUnavailable):
        return None


def leave(host: Host, device: str, attachment: Attachment, netns: int | None) -> None:
    """Bring the RDMA device back to the host under its own name, from wherever it is, and verify it. Repeatable.

    Raises HardwareError if it is not back although the function has a driver that makes one, DeviceBusy if it
    cannot be brought back for now. One that is home already waits for nobody.
    """
    undo = attachment.undo
    if undo.rdma is None:
        return
    at_home = host.find_rdma(device)
    if at_home is not None and at_home.name == undo.rdma:
        return
    with host.rdma.renumbering(device):
        if netns is not None:
            _bring_out(host, device, undo, netns)
        found = _await_return(host, device, undo.rdma)
        if found is not None and found.name != undo.rdma:
            rename(host, found, undo.rdma)


def differences(host: Host, attachment: Attachment, netns: int) -> list[str]:
    """Tell whether the RDMA device is not in the pod."""
    undo = attachment.undo
    if undo.rdma is None or any(_is_it(d, undo) for d in host.rdma.devices(netns)):
        return []
    return [f"RDMA device {undo.rdma} is not in the pod"]


def _bring_out(host: Host, device: str, undo: Undo, netns: int) -> None:
    found = next((d for d in host.rdma.devices(netns) if _is_it(d, undo)), None)
    if found is None:
        return
    try:
        host.rdma.move_out(found, netns)
    except NetlinkFailed:
        if host.find_rdma(device) is None:  # it is back by itself otherwise: the namespace ended just now
            raise


def _await_return(host: Host, device: str, name: str) -> RdmaLink | None:
    if not pf.can_have_interface(host, device):
        return host.find_rdma(device)  # no driver, no device: in no namespace
    found = moving.awaited(lambda: host.find_rdma(device), RETURN_SECONDS)
    if found is None:
        raise HardwareError(
            f"RDMA device {name} of {device} is not in the host after {RETURN_SECONDS:g} s: it is in a"
            " namespace that still lives, or its RDMA driver is gone"
        )
    return found


def rename(host: Host, found: RdmaLink, name: str) -> None:
    """Give a device of the host its name again, as far as that is free."""
    try:
        host.rdma.rename(found, name)
    except NetlinkFailed as error:
        if error.errno != errno.EEXIST:
            raise
        log.warning("RDMA device %s keeps that name: another is called %s now", found.name, name)


def _is_it(device: RdmaLink, undo: Undo) -> bool:
    """Know a device again: by its index, or by the GUID that it was given where its driver was bound anew."""
    guid = undo.extra.get("rdma_guid")
    if guid is not None and digits(device.node_guid) == digits(guid):
        return True
    return device.index == undo.extra.get("rdma_index")


def digits(guid: str) -> str:
    """Spell a GUID without separators: sysfs has colons after four digits, CNI after two."""
    return guid.replace(":", "").lower()


def _is_software(host: Host, device: str, found: RdmaLink) -> bool:
    return not (host.root / "sys/bus/pci/devices" / device / "infiniband" / found.name).exists()


def _refusal(host: Host, device: str, found: RdmaLink) -> str:
    return (
        f"the driver {pf.driver(host, device) or 'of the device'} of {device} cannot take {found.name} away from"
        " its users, so the kernel does not move it: set `rdma: false` in the network to leave it in the host, or"
        " run the node in shared mode (ib_core.netns_mode=1)"
    )
