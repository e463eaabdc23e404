"""What stays a VF's own: its name and looks while no pod has it, and what tells it from others after a reboot.

A PCI address is a place, not a thing. Another card, a firmware setting or a new riser renumbers buses,
and the next boot finds another device at an address that kubelet still has in its checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from agent.model.device import PciDevice, Snapshot

_NO_GUID = frozenset({"", "0" * 16, "f" * 16})


@dataclass(frozen=True, slots=True)
class KnownDevice:
    """A VF as it was last seen in the host, in the hands of no pod."""

    device: str
    """PCI address at that time."""
    identity: str
    """What it has in every boot; empty if nothing does."""
    netdev: str
    mac: str
    mtu: int
    boot_id: str


def identities(snapshot: Snapshot) -> Callable[[PciDevice], str]:
    """Name VFs by their card and their number there, whatever their address. Empty if the card has no name.

    The card's node GUID, else the PF's MAC address: both are burnt in. A VF's own MAC is not. Each card is looked
    at once.
    """
    cards: dict[str, str] = {}

    def identity(device: PciDevice) -> str:
        pf = snapshot.parent(device)
        if pf is None or device.vf_index is None:
            return ""
        if pf.address not in cards:
            cards[pf.address] = _card(pf)
        card = cards[pf.address]
        return f"{card}/{device.vf_index}" if card else ""

    return identity


def _card(pf: PciDevice) -> str:
    guids = sorted({re.sub("[^0-9a-f]", "", rdma.node_guid.lower()) for rdma in pf.rdma_devices} - _NO_GUID)
    name = guids[0] if guids else pf.netdev.mac if pf.netdev is not None else ""
    return f"{pf.vendor:04x}:{pf.device:04x}/{name}" if name else ""


def moved(known: Iterable[KnownDevice], snapshot: Snapshot) -> dict[str, str]:
    """Tell which VFs of earlier boots have another address now: old → new.

    A name that two devices carry, then or now, tells nothing.
    """
    then = _unique((k.identity, k.device) for k in known if k.boot_id != snapshot.boot_id)
    identity = identities(snapshot)
    now = _unique((identity(d), d.address) for d in snapshot.devices if d.is_vf)
    return {device: now[identity] for identity, device in then.items() if identity in now and now[identity] != device}


def _unique(pairs: Iterable[tuple[str, str]]) -> Mapping[str, str]:
    found: dict[str, str] = {}
    twice = {""}
    for identity, device in pairs:
        if found.setdefault(identity, device) != device:
            twice.add(identity)
    return {identity: device for identity, device in found.items() if identity not in twice}
