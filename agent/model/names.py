"""What a VF's interface is called in the host, and names that say it has come from somewhere else.

A namespace that ends gives its interfaces back under the names they had in it (net1), or, where those
are taken, as dev<index> (net/core/dev.c, default_device_exit_net). Nobody tells what they were before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from agent.model.device import PciDevice, Snapshot

MAX_NAME = 15
_LEFT_OVER = re.compile(r"dev[0-9]+")
_OF_PODS = re.compile(r"(net|eth)[0-9]+")


def may_be_strange(name: str) -> bool:
    """Tell whether a name is worth asking how the interface should be called."""
    return bool(_LEFT_OVER.fullmatch(name) or _OF_PODS.fullmatch(name))


def is_strange(name: str, usual: str | None) -> bool:
    """Tell whether an interface has the name of another life. `usual` is what it should be called, if known.

    Any other name is somebody's choice: an administrator's, or udev's.
    """
    if name == usual:
        return False
    return bool(_LEFT_OVER.fullmatch(name)) or (usual is not None and bool(_OF_PODS.fullmatch(name)))


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
        if _LEFT_OVER.fullmatch(name) or _OF_PODS.fullmatch(name):
            continue
        stems.add(name.removesuffix(number) if name.endswith(number) else None)
    stem = stems.pop() if len(stems) == 1 else None
    return f"{stem}{device.vf_index}"[:MAX_NAME] if stem else None


def usual_name(
    device: PciDevice, snapshot: Snapshot, known: str | None, udev: Mapping[str, str] | None = None
) -> str | None:
    """Say what a VF should be called in the host, by the best witness there is; None if none can tell.

    `known` is what it was called before, `udev` what udev would call it.
    """
    pf = snapshot.pf_netdev(device)
    by_udev = next((n for key in ("ID_NET_NAME", "ID_NET_NAME_PATH") if (n := (udev or {}).get(key))), None)
    by_pf = f"{pf.name}v{device.vf_index}" if pf is not None and device.is_vf and device.vf_index is not None else None
    found = known or name_by_siblings(device, snapshot) or by_udev or by_pf
    return found[:MAX_NAME] if found else None
