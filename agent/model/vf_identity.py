"""What stays a VF's own: its name and looks while no pod has it, and what tells it from others after a reboot. Pure.

A PCI address is a place, not a thing. Another card, a firmware setting or a new riser renumbers buses,
and the next boot finds another device at an address that kubelet still has in its checkpoint.

A namespace that ends gives its interfaces back under the names they had in it (net1), or, where those
are taken, as dev<index> (net/core/dev.c, default_device_exit_net). Nobody tells what they were before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from agent.model.device import PciDevice, Snapshot

MAX_NAME = 15
_LEFT_OVER = re.compile(r"dev[0-9]+")
_OF_PODS = re.compile(r"net[0-9]+")
_OF_KERNEL = re.compile(r"eth[0-9]+")


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


RailKey = tuple[int, int]
"""A rail's number, and the plane."""


@dataclass(frozen=True, slots=True)
class Rail:
    """An adapter to the fabric, or one plane of it, and its number."""

    number: int
    """Planes of one adapter have the same."""
    device: str
    """PCI address, of one that is away the last."""
    identity: str
    """What the card has in every boot; empty if nothing."""
    netdev: str
    """Its interface in the host, of one that is away the last; empty if it had none."""
    is_named: bool = False
    """Whether the configuration lists it."""
    plane: int = 0
    """Counts the PFs of an adapter that is split into several, each for a fabric of its own."""
    is_settled: bool = True
    """Whether it was numbered when resources took adapters, and no vital product data of these was due."""

    @property
    def key(self) -> RailKey:
        """What tells it from the others."""
        return self.number, self.plane


def identities(snapshot: Snapshot) -> Callable[[PciDevice], str]:
    """Name VFs by their card and their number there, whatever their address, and others as cards. Empty for no name.

    The card's node GUID, else the PF's MAC address: both are burnt in. A VF's own MAC is not. Each card is looked
    at once.
    """
    cards: dict[str, str] = {}

    def identity(device: PciDevice) -> str:
        if not device.is_vf:
            return _card(device)
        pf = snapshot.parent(device)
        if pf is None or device.vf_index is None:
            return ""
        if pf.address not in cards:
            cards[pf.address] = _card(pf)
        card = cards[pf.address]
        return f"{card}/{device.vf_index}" if card else ""

    return identity


def _card(pf: PciDevice) -> str:
    guids = sorted(rdma.guid for rdma in pf.rdma_devices if rdma.guid)
    name = guids[0] if guids else pf.netdev.mac if pf.netdev is not None else ""
    return f"{pf.vendor:04x}:{pf.device:04x}/{name}" if name else ""


def addresses(snapshot: Snapshot) -> Mapping[str, str]:
    """Map what devices have in every boot to where they are now. A name that two devices carry tells nothing."""
    identity = identities(snapshot)
    return _unique((identity(device), device.address) for device in snapshot.devices)


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


class Witness(Enum):
    """Who says what an interface should be called."""

    MEMORY = "memory"
    """The books: it was seen under this name in this boot."""
    NEIGHBOURS = "neighbours"
    """The names of the same PF's other VFs, or udev's database."""
    GUESS = "guess"
    """What is usual, or a name that is at least nobody else's."""


@dataclass(frozen=True, slots=True)
class Usual:
    """What an interface should be called."""

    name: str
    witness: Witness


def may_be_strange(name: str) -> bool:
    """Tell whether a name is worth asking how the interface should be called."""
    return is_left_over(name) or bool(_OF_KERNEL.fullmatch(name))


def is_left_over(name: str) -> bool:
    """Tell whether a name looks as if a pod had given it, or the kernel on the way back from one."""
    return bool(_LEFT_OVER.fullmatch(name) or _OF_PODS.fullmatch(name))


def is_strange(name: str, usual: Usual) -> bool:
    """Tell whether an interface has the name of another life.

    dev<index> is never given otherwise. Any other name may be somebody's choice, an administrator's or
    udev's, or the kernel's own (eth<n>): then only a good witness makes it strange. Where the kernel names VFs,
    it does so by the order of their coming, which is another each time that a driver is bound.
    """
    if name == usual.name:
        return False
    if _LEFT_OVER.fullmatch(name):
        return True
    if _OF_KERNEL.fullmatch(name):
        return usual.witness is Witness.MEMORY and not _OF_KERNEL.fullmatch(usual.name)
    return bool(_OF_PODS.fullmatch(name)) and usual.witness is not Witness.GUESS


def name_by_siblings(device: PciDevice, snapshot: Snapshot) -> str | None:
    """Work a VF's name out from those of the same PF's other VFs: ens1f0v0, ens1f0v2 → ens1f0v1.

    None where they do not agree, or there are none in the host.
    """
    pf = snapshot.parent(device)
    if pf is None or device.vf_index is None:
        return None
    stems = set()
    for address in pf.vfs:
        sibling = snapshot.by_address.get(address)
        if sibling is None or sibling.address == device.address or sibling.netdev is None:
            continue
        name, number = sibling.netdev.name, str(sibling.vf_index)
        if may_be_strange(name) or name == name_by_place(sibling.address):
            continue
        stems.add(name.removesuffix(number) if name.endswith(number) else None)
    stem = stems.pop() if len(stems) == 1 else None
    return f"{stem}{device.vf_index}"[:MAX_NAME] if stem else None


def usual_name(
    device: PciDevice, snapshot: Snapshot, known: str | None, udev: Mapping[str, str] = MappingProxyType({})
) -> Usual:
    """Say what a VF should be called in the host, by the best witness there is.

    `known` is what it was called before in this boot, `udev` what udev's database says of its interface.
    """
    if known is not None:
        return Usual(known, Witness.MEMORY)
    told = name_by_siblings(device, snapshot) or udev.get("ID_NET_NAME") or udev.get("ID_NET_NAME_PATH")
    if told:
        return Usual(told[:MAX_NAME], Witness.NEIGHBOURS)
    if _has_kernel_named_siblings(device, snapshot):
        return Usual(name_by_place(device.address), Witness.NEIGHBOURS)
    pf = snapshot.pf_netdev(device)
    if pf is None or device.vf_index is None or _OF_KERNEL.fullmatch(pf.name):
        return Usual(name_by_place(device.address), Witness.GUESS)
    return Usual(f"{pf.name}v{device.vf_index}"[:MAX_NAME], Witness.GUESS)


def _has_kernel_named_siblings(device: PciDevice, snapshot: Snapshot) -> bool:
    """Tell whether another VF of the same PF is called ethN: nobody names VFs on this node, but pods do."""
    pf = snapshot.parent(device)
    siblings = (snapshot.by_address.get(a) for a in (pf.vfs if pf is not None else ()) if a != device.address)
    return any(s is not None and s.netdev is not None and _OF_KERNEL.fullmatch(s.netdev.name) for s in siblings)


def name_by_place(address: str) -> str:
    """Name an interface after its PCI address, for when nothing else tells or its own name is taken.

    With `net.ifnames=0` the kernel gives the lowest free ethN to whoever comes next.
    """
    return "vf" + "".join(filter(str.isalnum, address))[-12:]
