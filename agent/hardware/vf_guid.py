"""GUIDs that an InfiniBand PF gives to its VFs: rtnetlink's bytes, and the files of Mellanox's own driver.

A VF takes them when its driver is bound. rtnetlink's attributes are IFLA_VF_IB_{NODE,PORT}_GUID, struct
ifla_vf_guid (include/uapi/linux/if_link.h), whose 64 bits are in the machine's byte order. Where the kernel's
driver refuses them (EOPNOTSUPP), Mellanox's has <PF>/sriov/<index>/{node,port}.
"""

from __future__ import annotations

import errno
import struct
from pathlib import Path

from agent.errors import HardwareError, NetlinkFailed
from agent.hardware import vf_settings
from agent.hardware.link_messages import attribute_table
from agent.hardware.rtnetlink import LinkSocket, translated

IFLA_VF_IB_NODE_GUID, IFLA_VF_IB_PORT_GUID = 10, 11
NONE = "00:00:00:00:00:00:00:00"
ALL_ONES = "ff:ff:ff:ff:ff:ff:ff:ff"

_GUID = struct.Struct("=IxxxxQ")  # the index, then what the compiler leaves out before 64 bits
_KINDS = (("node", IFLA_VF_IB_NODE_GUID), ("port", IFLA_VF_IB_PORT_GUID))
_REFUSED = (errno.EOPNOTSUPP, errno.EMSGSIZE)


def encode(kind: int, vf_index: int, guid: str) -> bytes:
    """Make the attribute that gives one GUID to a VF, as a request about its PF takes it."""
    payload = _GUID.pack(vf_index, int(guid.replace(":", ""), 16))
    return vf_settings.vf_attribute(struct.pack("=HH", 4 + len(payload), kind) + payload)


def decode(content: dict[int, bytes]) -> tuple[str, str] | None:
    """Read node and port GUID from a VF's attributes; None if the kernel does not tell."""
    if any(len(content.get(kind, b"")) < _GUID.size for _, kind in _KINDS):
        return None
    node, port = (_GUID.unpack_from(content[kind])[1] for _, kind in _KINDS)
    return spelled(node), spelled(port)


def spelled(number: int) -> str:
    """Spell a GUID as CNI does: aa:bb:cc:dd:ee:ff:00:11."""
    return number.to_bytes(8, "big").hex(":")


def read(pf_netdev: str, vf_index: int, root: Path) -> tuple[str, str] | None:
    """Read what a PF has for a VF. None if nobody tells."""
    try:
        with translated(f"read the GUIDs of VF {vf_index} of {pf_netdev}"), LinkSocket() as links:
            found = links.find_with_vfs(pf_netdev)
    except NetlinkFailed as error:
        if error.errno not in _REFUSED:
            raise
        found = None
    content = vf_settings.content(found[1], vf_index) if found is not None else None
    told = decode(attribute_table(content)) if content is not None else None
    if told is not None:
        return told
    try:
        node, port = ((_folder(root, pf_netdev, vf_index) / name).read_text().strip().lower() for name, _ in _KINDS)
    except OSError:
        return None
    return node, port


def write(pf_netdev: str, vf_index: int, node: str, port: str, root: Path) -> None:
    """Give both GUIDs to a VF, and read them back where the kernel tells. Raises HardwareError."""
    for (name, kind), guid in zip(_KINDS, (node, port), strict=True):
        action = f"set the {name} GUID of VF {vf_index} of {pf_netdev} to {guid}"
        try:
            with translated(action), LinkSocket() as links:
                pf = links.find(pf_netdev)
                if pf is None:
                    raise HardwareError(f"PF interface {pf_netdev} is gone")
                links.set_vf(pf.ifindex, encode(kind, vf_index, guid))
        except NetlinkFailed as error:
            if error.errno not in _REFUSED:
                raise
            try:
                (_folder(root, pf_netdev, vf_index) / name).write_text(guid)
            except OSError:
                raise error from None  # no such file: the driver knows neither way
    found = read(pf_netdev, vf_index, root)
    if found is not None and found != (node, port):
        raise HardwareError(
            f"VF {vf_index} of {pf_netdev} was given the GUIDs {node} and {port} without an error but has"
            f" {' and '.join(found)}"
        )


def _folder(root: Path, pf_netdev: str, vf_index: int) -> Path:
    return root / "sys/class/net" / pf_netdev / "device/sriov" / str(vf_index)
