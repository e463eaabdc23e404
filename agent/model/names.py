"""What a VF's interface is called in the host, and names that say it has come from somewhere else.

A namespace that ends gives its interfaces back under the names they had in it (net1), or, where those
are taken, as dev<index> (net/core/dev.c, default_device_exit_net). Nobody tells what they were before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from agent.model.device import PciDevice, Snapshot

MAX_NAME = 15
_LEFT_OVER = re.compile(r"dev[0-9]+")
_OF_PODS = re.compile(r"net[0-9]+")
_OF_KERNEL = re.compile(r"eth[0-9]+")


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
    """Name an interface after its PCI address, for when nothing else tells or its own name is taken."""
    return "vf" + re.sub("[:.]", "", address)[-12:]
