"""GUIDs of an InfiniBand VF: given through its PF, taken when the VF's driver is bound anew, and given back.

A VF that programs drive takes them when a program's driver starts: its PF is all there is to be told.

Binding anew renumbers: the VF's interface, its RDMA device and its character devices come back under whatever
names and numbers are free. So only one VF of a node is bound anew at a time, and what came back is looked for by
PCI address. No computer that this was tried on has an InfiniBand adapter: what is known of drivers is from their
source, and a simulated one stands in the tests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from agent.errors import HardwareError, RequestInvalid
from agent.hardware.host import Host, Link
from agent.hardware.sysfs import pci
from agent.model.allocation import Undo
from agent.model.device import LinkLayer, PciDevice, Snapshot
from cni.modes import moving, pf, rdma

SETTLE_SECONDS = 30.0
"""How long a driver, and udev after it, may take for a VF that was bound anew."""
NONE = "00:00:00:00:00:00:00:00"
ALL_ONES = "ff:ff:ff:ff:ff:ff:ff:ff"
EMPTY = frozenset(rdma.digits(guid) for guid in (NONE, ALL_ONES))
_DIGITS, _ADDRESS_DIGITS = 16, 40
"""Of a GUID, and of the hardware address of an IPoIB interface."""

T = TypeVar("T")

log = logging.getLogger(__name__)


def recorded(host: Host, device: str, vf_index: int) -> dict[str, object]:
    """Say what an undo record must hold before a VF gets another GUID: the old ones, and the driver."""
    uplink = _uplink(host, device)
    bound = pf.driver(host, device)
    if bound is None:
        raise HardwareError(f"{device} has no driver that could take a GUID: bind it to one")
    pci.require_writable(host.root, "binding a VF again for its GUID")
    found = host.vf_control.guids(uplink.name, vf_index)
    return {"guids": list(found or _of_vf(host, device)), "driver": bound}


def recorded_on_pf(host: Host, snapshot: Snapshot, facts: PciDevice) -> dict[str, object]:
    """Say what an undo record must hold before a VF that programs drive gets another GUID: the old ones.

    Zeros if the PF does not tell them. Raises RequestInvalid if it is Ethernet, HardwareError if it cannot be asked.
    """
    device, uplink, known = facts.address, pf.interface(host, facts.address), snapshot.pf_netdev(facts)
    if facts.physfn is None or facts.vf_index is None:
        raise HardwareError(f"guid cannot be set on {device}: it is not a VF, and has its own; leave guid out")
    if known is not None and known.link_layer is not LinkLayer.INFINIBAND:
        raise RequestInvalid(not_infiniband("guid", device, facts.physfn))
    if uplink is None:
        raise HardwareError(
            f"guid cannot be set on {device}: its PF {facts.physfn}, which sets it, has no interface in the host:"
            " load ib_ipoib, or leave guid out"
        )
    return {"guids": list(host.vf_control.guids(uplink.name, facts.vf_index) or (NONE, NONE))}


def not_infiniband(key: str, device: str, physfn: str | None) -> str:
    """Say that a key is for InfiniBand and the device is not."""
    return f"{key} has no effect on {device}: its PF {physfn} has no InfiniBand port that is known; leave {key} out"


def adopted(host: Host, device: str, vf_index: int | None, undo: Undo, before: str) -> Undo:
    """Add to an undo record, made from what another program wrote, the GUID that the VF had before it."""
    uplink, bound, found = pf.interface(host, device), pf.driver(host, device), host.find_rdma(device)
    if uplink is None or bound is None or vf_index is None:
        return undo
    now = host.vf_control.guids(uplink.name, vf_index)
    extra = {"guids": [before, before], "driver": bound, "rdma_name": undo.rdma or (found.name if found else None)}
    return replace(undo, extra={**undo.extra, **extra, "rdma_guid": now[0] if now is not None else None})


def give(host: Host, device: str, undo: Undo, guid: str) -> None:
    """Give a VF its GUID and bind it anew, and wait until it is there again with it.

    The caller holds `renumbering`. Raises HardwareError if it does not come back, or with another GUID, or with
    another verbs node than before.
    """
    before = host.find_rdma(device)
    promised = rdma.node(host, before) if before is not None else None
    _set(host, device, undo, guid, guid)
    rebind(host, device, str(undo.extra["driver"]))
    settled(host, device, undo)
    found = host.find_rdma(device)
    if found is None:
        return
    if rdma.digits(found.node_guid) != rdma.digits(guid):
        raise HardwareError(f"{device} was bound again for the GUID {guid} but has {found.node_guid}: look at dmesg")
    rdma.refuse_other_node(device, found, promised, rdma.node(host, found))


def take_back(host: Host, device: str, undo: Undo) -> None:
    """Give a VF its former GUID again, if it has another, and bind it anew. The caller holds `renumbering`.

    All zeros, which a VF has that was never given one, cannot be set; all ones mean the same.
    """
    if "guids" not in undo.extra:
        return
    driver = str(undo.extra["driver"])
    node, port = _settable(undo)
    now = _on_pf(host, device, undo)
    if (
        now in ((node, port), tuple(undo.extra["guids"]))
        and pf.driver(host, device) == driver
        and not _has_given(host, device, undo)
    ):
        return
    _set(host, device, undo, node, port)
    rebind(host, device, driver)
    settled(host, device, undo)


def set_on_pf(host: Host, device: str, undo: Undo, guid: str) -> None:
    """Give a VF its GUID on its PF alone, read back. For one without a driver of the host that could take it."""
    _set(host, device, undo, guid, guid)


def put_back_on_pf(host: Host, device: str, undo: Undo) -> None:
    """Give a VF its former GUIDs again on its PF alone, if it has others, read back. Repeatable.

    All zeros are spelled as ones here, too. Raises HardwareError if the PF has no interface, or other GUIDs.
    """
    if "guids" not in undo.extra:
        return
    node, port = _settable(undo)
    now = _on_pf(host, device, undo)
    if now is None or now not in ((node, port), tuple(undo.extra["guids"])):
        _set(host, device, undo, node, port)
    if _has_given(host, device, undo):
        log.warning(
            "%s is bound to %s now, and keeps the GUID %s of its pod until it is bound again",
            device,
            pf.driver(host, device),
            undo.extra["rdma_guid"],
        )


def differences(host: Host, device: str, undo: Undo) -> list[str]:
    """Tell whether the PF has another GUID for the VF than the one that it was given."""
    wanted = undo.extra.get("rdma_guid")
    now = _on_pf(host, device, undo) if "guids" in undo.extra and wanted is not None else None
    if now is None or now == (wanted, wanted):
        return []
    return [f"the PF of {device} has the GUIDs {' and '.join(now)}, not {wanted}"]


def _of_vf(host: Host, device: str) -> tuple[str, str]:
    """Read node and port GUID of the VF itself, zeros where it has none.

    Its PF does not tell them on many kernels: with some dozen VFs their GUIDs have no room in its answer
    (net/core/rtnetlink.c, rtnl_vfinfo_size).
    """
    found, link = host.find_rdma(device), host.find_netdev(device)
    node = rdma.digits(found.node_guid) if found is not None else ""
    port = rdma.digits(link.mac) if link is not None else ""
    # IPoIB's address: four bytes of queue pair, then the port's GID, which ends with the GUID (RFC 4391, 9.1.1).
    return _spelled(node), _spelled(port[-_DIGITS:] if len(port) == _ADDRESS_DIGITS else node)


def _spelled(digits: str) -> str:
    return ":".join(digits[i : i + 2] for i in range(0, _DIGITS, 2)) if len(digits) == _DIGITS else NONE


def rebind(host: Host, device: str, driver: str) -> None:
    """Free a function from its driver, whichever that is, and bind it."""
    host.unbind(device)
    host.bind(device, driver)


def settled(host: Host, device: str, undo: Undo) -> Link:
    """Wait until a function's interface is there, and its RDMA device with its verbs node under its own name."""
    link = _awaited(partial(host.find_netdev, device), f"{device} has no interface")
    name = undo.extra.get("rdma_name")
    if name is not None:
        found = _awaited(partial(host.find_rdma, device), f"{device} has no RDMA device")
        _awaited(partial(rdma.node, host, found), f"RDMA device {found.name} of {device} has no verbs node")
        if found.name != name:
            rdma.rename(host, found, str(name))
    return link


def _set(host: Host, device: str, undo: Undo, node: str, port: str) -> None:
    assert undo.vf_index is not None  # of a VF that was given GUIDs
    host.vf_control.set_guids(_uplink(host, device).name, undo.vf_index, node, port)


def _uplink(host: Host, device: str) -> Link:
    uplink = pf.interface(host, device)
    if uplink is None:
        raise HardwareError(f"the PF of {device} has no interface, and GUIDs are set through it: load ib_ipoib")
    return uplink


def _on_pf(host: Host, device: str, undo: Undo) -> tuple[str, str] | None:
    """Read node and port GUID that the PF has for its VF; None where it does not tell."""
    uplink = pf.interface(host, device)
    if uplink is None or undo.vf_index is None:
        return None
    return host.vf_control.guids(uplink.name, undo.vf_index)


def _settable(undo: Undo) -> tuple[str, str]:
    """Spell the former GUIDs as they can be set."""
    node, port = (ALL_ONES if guid == NONE else str(guid) for guid in undo.extra["guids"])
    return node, port


def _has_given(host: Host, device: str, undo: Undo) -> bool:
    """Tell whether the RDMA device still has the GUID of the pod: set back on the PF, but not bound anew since."""
    found = host.find_rdma(device)
    given = undo.extra.get("rdma_guid")
    return found is not None and given is not None and rdma.digits(found.node_guid) == rdma.digits(given)


def _awaited(look: Callable[[], T | None], missing: str) -> T:
    found = moving.awaited(look, SETTLE_SECONDS)
    if found is None:
        raise HardwareError(f"{missing} {SETTLE_SECONDS:g} s after its driver was bound again: look at dmesg")
    return found
