"""RDMA devices, their ports and their character devices as /sys/class/infiniband* shows them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from agent.hardware.sysfs_read import Attributes
from agent.model.device import CharDevice, LinkLayer, RdmaDevice, RdmaPort

_LINK_LAYER = {"InfiniBand": LinkLayer.INFINIBAND, "Ethernet": LinkLayer.ETHERNET}
"""Anything else is `Unknown` to sysfs (drivers/infiniband/core/sysfs.c, link_layer_show)."""

CharDevices = Mapping[str, tuple[CharDevice, ...]]


def read_char_devices(read: Attributes) -> CharDevices:
    """List the character devices of all RDMA devices, by RDMA device name."""
    found: defaultdict[str, list[CharDevice]] = defaultdict(list)
    for name in _numbered(read.names("/sys/class/infiniband_verbs"), "uverbs"):
        ibdev = read.text(f"/sys/class/infiniband_verbs/{name}/ibdev")
        if ibdev:
            found[ibdev].append(CharDevice("uverbs", f"/dev/infiniband/{name}"))
    mad_names = read.names("/sys/class/infiniband_mad")
    for kind in ("umad", "issm"):
        for name in _numbered(mad_names, kind):
            folder = f"/sys/class/infiniband_mad/{name}"
            ibdev = read.text(f"{folder}/ibdev")
            if ibdev:
                port = read.whole(f"{folder}/port", 0)
                found[ibdev].append(CharDevice(kind, f"/dev/infiniband/{name}", port or None))
    return {ibdev: tuple(devices) for ibdev, devices in found.items()}


def read_rdma_device(read: Attributes, name: str, char_devices: CharDevices) -> RdmaDevice | None:
    """Read one RDMA device; None if it went away meanwhile."""
    folder = f"/sys/class/infiniband/{name}"
    node_type = read.text(f"{folder}/node_type")
    if node_type is None:
        read.lacks(folder, "node_type")
        return None
    ports = [_port(read, f"{folder}/ports/{n}", int(n)) for n in read.names(f"{folder}/ports") if n.isdecimal()]
    return RdmaDevice(
        name=name,
        node_type=_word(node_type),
        node_guid=read.text(f"{folder}/node_guid") or "",
        sys_image_guid=read.text(f"{folder}/sys_image_guid") or "",
        fw_version=read.text(f"{folder}/fw_ver") or "",
        board_id=read.text(f"{folder}/board_id") or "",
        ports=tuple(sorted(ports, key=lambda p: p.number)),
        char_devices=char_devices.get(name, ()),
    )


def absent_rdma_device(name: str, char_devices: CharDevices) -> RdmaDevice:
    """Say what can be known of an RDMA device that is in a pod: that it is there, and its character devices."""
    return RdmaDevice(name, "", "", "", "", "", (), char_devices.get(name, ()), absent=True)


def rdma_cm_present(read: Attributes) -> bool:
    """Tell whether the RDMA connection manager has its device."""
    return read.exists("/dev/infiniband/rdma_cm") or read.exists("/sys/class/misc/rdma_cm")


def _port(read: Attributes, folder: str, number: int) -> RdmaPort:
    link_layer = _LINK_LAYER.get(read.text(f"{folder}/link_layer") or "", LinkLayer.UNSPECIFIED)
    return RdmaPort(
        number=number,
        state=_word(read.text(f"{folder}/state")) or "UNKNOWN",
        phys_state=_word(read.text(f"{folder}/phys_state")) or "UNKNOWN",
        link_layer=link_layer,
        rate_gbps=_rate(read, f"{folder}/rate"),
        lid=read.whole(f"{folder}/lid", 0, 16),
        pkey=(link_layer is LinkLayer.INFINIBAND and read.whole(f"{folder}/pkeys/0", 0, 16)) or None,
    )


def _word(text: str | None) -> str:
    """Keep the word of sysfs' `4: ACTIVE`."""
    return (text or "").partition(":")[2].strip() or (text or "")


def _rate(read: Attributes, path: str) -> float:
    """Read `400 Gb/sec (4X NDR)` as 400.0; 0 if the port does not tell."""
    text = read.text(path)
    if not text:
        return 0.0
    try:
        return float(text.split()[0])
    except (ValueError, IndexError):
        read.note(path, f"is not a rate: {text[:40]!r}")
        return 0.0


def _numbered(names: list[str], prefix: str) -> list[str]:
    """Pick `uverbs0`, `uverbs1` … in the order of their numbers."""
    picked = [n for n in names if n.startswith(prefix) and n[len(prefix) :].isdecimal()]
    return sorted(picked, key=lambda n: int(n[len(prefix) :]))
