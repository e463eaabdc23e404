"""Settings of VFs through their PFs' interfaces, and the GUIDs that an InfiniBand PF gives to its VFs.

A VF takes its GUIDs when its driver is bound. rtnetlink's attributes are IFLA_VF_IB_{NODE,PORT}_GUID, struct
ifla_vf_guid (include/uapi/linux/if_link.h), whose 64 bits are in the machine's byte order. Where the kernel's
driver refuses them (EOPNOTSUPP), Mellanox's has <PF>/sriov/<index>/{node,port}.
"""

from __future__ import annotations

import errno
import logging
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from agent.errors import HardwareError, NetlinkFailed
from agent.hardware.netlink import vf_settings
from agent.hardware.netlink.codec import attribute, attribute_table
from agent.hardware.netlink.rtnetlink import LinkSocket, translated
from agent.hardware.sysfs import trunk
from agent.model.allocation import VfSettings

SETTLE_SECONDS = 2.0
"""How long a driver may take until a VF's setting holds."""
POLL_SECONDS = 0.05
IFLA_VF_IB_NODE_GUID, IFLA_VF_IB_PORT_GUID = 10, 11
NONE = "00:00:00:00:00:00:00:00"

_GUID = struct.Struct("=IxxxxQ")  # the index, then what the compiler leaves out before 64 bits
_KINDS = (("node", IFLA_VF_IB_NODE_GUID), ("port", IFLA_VF_IB_PORT_GUID))
_REFUSED = (errno.EOPNOTSUPP, errno.EMSGSIZE)

log = logging.getLogger(__name__)


class PfNetlink:
    """`host.VfControl` on the real kernel."""

    def __init__(
        self,
        settle_seconds: float = SETTLE_SECONDS,
        root: Path = Path("/"),
        open_links: Callable[[], LinkSocket] = LinkSocket,
        write: trunk.Write = Path.write_text,
    ) -> None:
        self._settle_seconds = settle_seconds
        self._root = root
        self._open_links = open_links
        self._write = write

    def guids(self, pf_netdev: str, vf_index: int) -> tuple[str, str] | None:
        """Read the node and port GUID that a PF has for a VF; None if it does not tell."""
        return read_guids(pf_netdev, vf_index, self._root)

    def set_guids(self, pf_netdev: str, vf_index: int, node: str, port: str) -> None:
        """Give both GUIDs to a VF, which takes them when its driver is bound anew, and read them back."""
        write_guids(pf_netdev, vf_index, node, port, self._root)

    def read(self, pf_netdev: str, vf_index: int) -> VfSettings:
        """Read what a PF enforces on one VF.

        rtnetlink can only list all VFs of a PF at once, so this is not for the common path of
        a VF whose settings nobody asked to change.
        """
        with translated(f"read VF {vf_index} of {pf_netdev}"), self._open_links() as links:
            found = _read(links, pf_netdev, vf_index)
        return replace(found, trunk=trunk.read(self._root, pf_netdev, vf_index))

    def traffic(self, pf_netdev: str) -> bytes | None:
        """Read a PF's link message with what it counted of its VFs, undecoded; None if it is gone."""
        with translated(f"read what {pf_netdev} counts"), self._open_links() as links:
            found = links.find_with_vfs(pf_netdev, statistics=True)
        return found[1] if found is not None else None

    def apply(self, pf_netdev: str, vf_index: int, settings: VfSettings) -> None:
        """Set those settings that are not None, one by one, and read them back until they hold."""
        with trunk.changing(self._root, pf_netdev, vf_index, settings.trunk, self._write):
            self._apply(pf_netdev, vf_index, replace(settings, trunk=None))

    def _apply(self, pf_netdev: str, vf_index: int, settings: VfSettings) -> None:
        """Set what rtnetlink can.

        Drivers set a MAC asynchronously, answer EAGAIN or EBUSY while the VF is being reset, or refuse single
        attributes; one request per attribute tells which it was, and the reading tells whether it holds.
        """
        if settings.is_empty:
            return
        deadline = time.monotonic() + self._settle_seconds
        with translated(f"look at VF {vf_index} of {pf_netdev}"), self._open_links() as links:
            pf = links.find(pf_netdev)
            if pf is None:
                raise HardwareError(f"PF interface {pf_netdev} is gone")
            if not vf_settings.is_complete(settings):
                before = _read_back(links, pf_netdev, vf_index)
                if before is not None:  # else what is lacking counts as 0
                    settings = vf_settings.completed(settings, before)
            wrong = tuple(VfSettings.__dataclass_fields__)
            while wrong:
                for what, names, attribute in vf_settings.changes(vf_index, settings):
                    if set(names) & set(wrong):
                        with translated(f"set {what} of VF {vf_index} on {pf_netdev}"):
                            _insist(links, pf.ifindex, attribute, deadline)
                after = _read_back(links, pf_netdev, vf_index)
                if after is None:
                    return  # each request has been acknowledged
                wrong = vf_settings.differing(settings, after)
                if wrong and time.monotonic() > deadline:
                    wanted, found = getattr(settings, wrong[0]), getattr(after, wrong[0])
                    raise HardwareError(
                        f"VF {vf_index} of {pf_netdev}: {wrong[0]} was set to {wanted!r} without an error"
                        f" but is {found!r} after {self._settle_seconds:g} s"
                    )
                if wrong:
                    time.sleep(POLL_SECONDS)


def _read_back(links: LinkSocket, pf_netdev: str, vf_index: int) -> VfSettings | None:
    """Read what a PF enforces on a VF; None if it has more VFs than fit into one answer."""
    try:
        return _read(links, pf_netdev, vf_index)
    except OSError as error:
        if error.errno != errno.EMSGSIZE:
            raise
    log.warning("%s has too many VFs to be asked what it enforces on VF %d", pf_netdev, vf_index)
    return None


def _read(links: LinkSocket, pf_netdev: str, vf_index: int) -> VfSettings:
    found = links.find_with_vfs(pf_netdev)
    settings = vf_settings.find(found[1], vf_index) if found is not None else None
    if settings is None:
        raise HardwareError(f"{pf_netdev} has no VF {vf_index}: look at its sriov_numvfs")
    return settings


def _insist(links: LinkSocket, ifindex: int, attribute: bytes, deadline: float) -> None:
    """Repeat a request that the driver cannot take at the moment (i40e EAGAIN, ice EBUSY: the VF is being reset)."""
    while True:
        try:
            return links.set_vf(ifindex, attribute)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EBUSY) or time.monotonic() > deadline:
                raise
        time.sleep(POLL_SECONDS)


def encode_guid(kind: int, vf_index: int, guid: str) -> bytes:
    """Make the attribute that gives one GUID to a VF, as a request about its PF takes it."""
    payload = _GUID.pack(vf_index, int(guid.replace(":", ""), 16))
    return vf_settings.vf_attribute(attribute(kind, payload))


def decode_guids(content: dict[int, bytes]) -> tuple[str, str] | None:
    """Read node and port GUID from a VF's attributes; None if the kernel does not tell."""
    if any(len(content.get(kind, b"")) < _GUID.size for _, kind in _KINDS):
        return None
    node, port = (_GUID.unpack_from(content[kind])[1] for _, kind in _KINDS)
    return _spelled(node), _spelled(port)


def _spelled(number: int) -> str:
    """Spell a GUID as CNI does: aa:bb:cc:dd:ee:ff:00:11."""
    return number.to_bytes(8, "big").hex(":")


def read_guids(pf_netdev: str, vf_index: int, root: Path) -> tuple[str, str] | None:
    """Read what a PF has for a VF. None if nobody tells."""
    try:
        with translated(f"read the GUIDs of VF {vf_index} of {pf_netdev}"), LinkSocket() as links:
            found = links.find_with_vfs(pf_netdev)
    except NetlinkFailed as error:
        if error.errno not in _REFUSED:
            raise
        found = None
    content = vf_settings.content(found[1], vf_index) if found is not None else None
    told = decode_guids(attribute_table(content)) if content is not None else None
    if told is not None:
        return told
    try:
        node, port = (
            (_guid_folder(root, pf_netdev, vf_index) / name).read_text().strip().lower() for name, _ in _KINDS
        )
    except OSError:
        return None
    return node, port


def write_guids(pf_netdev: str, vf_index: int, node: str, port: str, root: Path) -> None:
    """Give both GUIDs to a VF, and read them back where the kernel tells. Raises HardwareError."""
    for (name, kind), guid in zip(_KINDS, (node, port), strict=True):
        action = f"set the {name} GUID of VF {vf_index} of {pf_netdev} to {guid}"
        try:
            with translated(action), LinkSocket() as links:
                pf = links.find(pf_netdev)
                if pf is None:
                    raise HardwareError(f"PF interface {pf_netdev} is gone")
                links.set_vf(pf.ifindex, encode_guid(kind, vf_index, guid))
        except NetlinkFailed as error:
            if error.errno not in _REFUSED:
                raise
            try:
                (_guid_folder(root, pf_netdev, vf_index) / name).write_text(guid)
            except OSError:
                raise error from None  # no such file: the driver knows neither way
    found = read_guids(pf_netdev, vf_index, root)
    if found is not None and found != (node, port):
        raise HardwareError(
            f"VF {vf_index} of {pf_netdev} was given the GUIDs {node} and {port} without an error but has"
            f" {' and '.join(found)}"
        )


def _guid_folder(root: Path, pf_netdev: str, vf_index: int) -> Path:
    return root / "sys/class/net" / pf_netdev / "device/sriov" / str(vf_index)
