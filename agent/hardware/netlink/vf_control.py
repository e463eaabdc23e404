"""Settings of VFs through their PFs' interfaces, and the GUIDs that an InfiniBand PF gives to its VFs.

The kernel knows no question for one VF: it lists all VFs of a PF in one attribute, whose length has 16
bits. Some 330 VFs (270 with InfiniBand GUIDs) need more, and kernels then let the length wrap round
(include/net/netlink.h, nla_nest_end): what follows looks like other attributes. The bytes are all there,
though, so `vf_entries` walks the list itself where the message is long enough for that.
Layout: include/uapi/linux/if_link.h, struct ifla_vf_*.

A VF takes its GUIDs when its driver is bound. rtnetlink's attributes are IFLA_VF_IB_{NODE,PORT}_GUID, struct
ifla_vf_guid (include/uapi/linux/if_link.h), whose 64 bits are in the machine's byte order. Where the kernel's
driver refuses them (EOPNOTSUPP), Mellanox's has <PF>/sriov/<index>/{node,port}.
"""

from __future__ import annotations

import errno
import logging
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path

from agent.errors import HardwareError, NetlinkFailed
from agent.hardware.netlink.rtnetlink import (
    ATTRIBUTE,
    IFLA_EXT_MASK,
    IFLA_IFNAME,
    LINK,
    NLA_F_NESTED,
    NLA_TYPE_MASK,
    RTEXT_FILTER_SKIP_STATS,
    RTM_GETLINK,
    RTM_SETLINK,
    NetlinkSocket,
    attribute,
    attribute_table,
    link_body,
    text_attribute,
    translated,
    word,
)
from agent.hardware.sysfs import trunk
from agent.model.allocation import VfSettings

IFLA_NUM_VF, IFLA_VFINFO_LIST, IFLA_VF_INFO = 21, 22, 1
RTEXT_FILTER_VF = 1
VLAN_PROTOCOLS = {"802.1q": 0x8100, "802.1ad": 0x88A8}
LINK_STATES = ("auto", "enable", "disable")
"""IFLA_VF_LINK_STATE_{AUTO,ENABLE,DISABLE}"""

_VF_MAC, _VF_VLAN, _VF_SPOOFCHK, _VF_LINK_STATE, _VF_RATE, _VF_TRUST, _VF_VLAN_LIST = 1, 2, 4, 5, 6, 9, 12
_VF_VLAN_INFO = 1
_MAC_BYTES = 6
_MAX_MAC_BYTES = 32
_RECEIVE_BYTES = 1 << 20
"""More than 4,000 VFs take; a longer answer would be cut, and VFs that are cut off are not found."""
_WRAP = 1 << 16
_ENTRY = struct.Struct("=HHHHI")
"""Of a VF's entry: its header, the header of the first attribute in it (the MAC), and the VF's index there."""
_WORDS2, _WORDS3 = struct.Struct("=II"), struct.Struct("=III")
_PROTOCOL = struct.Struct(">Hxx")
"""As on the wire; the two bytes of padding must be there, or the kernel answers EINVAL (do_setvfinfo)."""


def completed(settings: VfSettings, before: VfSettings) -> VfSettings:
    """Fill up what the kernel sets together: VLAN with priority and protocol, and the two rates."""
    found = settings
    for group in (("vlan", "vlan_qos", "vlan_proto"), ("min_tx_rate", "max_tx_rate")):
        if any(getattr(settings, name) is not None for name in group):
            found = replace(found, **{n: getattr(before, n) for n in group if getattr(settings, n) is None})
    return found


def is_complete(settings: VfSettings) -> bool:
    """Tell whether nothing that the kernel sets together is half given."""
    return completed(settings, VfSettings()) == completed(settings, _OTHER)


_OTHER = VfSettings(vlan=1, vlan_qos=1, vlan_proto="802.1ad", min_tx_rate=1, max_tx_rate=1)


def changes(vf_index: int, settings: VfSettings) -> Iterator[tuple[str, tuple[str, ...], bytes]]:
    """Yield what each request changes: in words, by field names, and as the attribute to send.

    One request for each, so that the kernel's refusal tells which it was. What a group lacks counts as 0.
    """
    if settings.vlan is not None or settings.vlan_qos is not None or settings.vlan_proto is not None:
        vlan, proto = settings.vlan or 0, VLAN_PROTOCOLS[settings.vlan_proto or "802.1q"]
        info = _WORDS3.pack(vf_index, vlan, settings.vlan_qos or 0) + _PROTOCOL.pack(proto)
        content = attribute(_VF_VLAN_LIST | NLA_F_NESTED, attribute(_VF_VLAN_INFO, info))
        yield f"VLAN {vlan}", ("vlan", "vlan_qos", "vlan_proto"), vf_attribute(content)
    if settings.mac is not None:
        mac = bytes.fromhex(settings.mac.replace(":", "")).ljust(_MAX_MAC_BYTES, b"\0")
        yield f"MAC {settings.mac}", ("mac",), vf_attribute(attribute(_VF_MAC, struct.pack("=I", vf_index) + mac))
    if settings.min_tx_rate is not None or settings.max_tx_rate is not None:
        low, high = settings.min_tx_rate or 0, settings.max_tx_rate or 0
        content = attribute(_VF_RATE, _WORDS3.pack(vf_index, low, high))
        yield f"rate {low}..{high} Mbit/s", ("min_tx_rate", "max_tx_rate"), vf_attribute(content)
    for kind, name, value in (
        (_VF_SPOOFCHK, "spoofchk", settings.spoofchk),
        (_VF_TRUST, "trust", settings.trust),
        (_VF_LINK_STATE, "link_state", LINK_STATES.index(settings.link_state) if settings.link_state else None),
    ):
        if value is not None:
            shown = f"{name.replace('_', ' ')} {getattr(settings, name)}"
            yield shown, (name,), vf_attribute(attribute(kind, _WORDS2.pack(vf_index, int(value))))


def vf_attribute(content: bytes) -> bytes:
    """Wrap one IFLA_VF_* attribute up as a request about a PF takes it."""
    return attribute(IFLA_VFINFO_LIST | NLA_F_NESTED, attribute(IFLA_VF_INFO | NLA_F_NESTED, content))


def differing(wanted: VfSettings, found: VfSettings) -> tuple[str, ...]:
    """Name the fields that are wanted otherwise than they are. A driver that does not tell differs in nothing."""
    return tuple(
        field.name
        for field in fields(VfSettings)
        if None not in (w := getattr(wanted, field.name), f := getattr(found, field.name)) and w != f
    )


def find_vf(body: bytes, vf_index: int) -> VfSettings | None:
    """Find one VF in a link message's attributes. None if it is not listed, or cut off."""
    found = vf_content(body, vf_index)
    return _decode(attribute_table(found)) if found is not None else None


def vf_content(body: bytes, vf_index: int) -> bytes | None:
    """Find the attributes of one VF in a link message's. None if it is not listed, or cut off."""
    return next((body[start:end] for index, start, end in vf_entries(body) if index == vf_index), None)


def vf_entries(body: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield VF index, and begin and end of the content, of each IFLA_VF_INFO."""
    offset, number = 0, 0
    while offset + ATTRIBUTE.size <= len(body):
        length, kind = ATTRIBUTE.unpack_from(body, offset)
        kind &= NLA_TYPE_MASK
        if kind == IFLA_NUM_VF and length >= 8:
            (number,) = struct.unpack_from("=I", body, offset + 4)
        if kind == IFLA_VFINFO_LIST:
            # A list that cannot have wrapped is as long as it says.
            end = len(body) if len(body) - offset >= _WRAP else min(offset + length, len(body))
            yield from _walk(body, offset + ATTRIBUTE.size, end, number)
            return
        if length < ATTRIBUTE.size:
            return
        offset += (length + 3) & ~3


def _walk(body: bytes, offset: int, end: int, number: int) -> Iterator[tuple[int, int, int]]:
    """Yield at most `number` entries: a VF whose driver does not answer is left out of the list."""
    for _ in range(number):
        if offset + _ENTRY.size > end:
            return
        length, kind, _, first, index = _ENTRY.unpack_from(body, offset)
        if kind & NLA_TYPE_MASK != IFLA_VF_INFO or first != _VF_MAC or offset + length > end:
            return  # the list has ended, or is cut off here
        yield index, offset + ATTRIBUTE.size, offset + length
        offset += (length + 3) & ~3


def _decode(content: dict[int, bytes]) -> VfSettings:
    mac = content[_VF_MAC][4 : 4 + _MAC_BYTES]  # after the VF's index
    vlan, qos, proto = _vlan(content)
    rates = _numbers(content, _VF_RATE)
    state = _numbers(content, _VF_LINK_STATE)
    return VfSettings(
        mac=mac.hex(":"),
        vlan=vlan,
        vlan_qos=qos,
        vlan_proto=proto,
        min_tx_rate=rates[0] if len(rates) > 1 else None,
        max_tx_rate=rates[1] if len(rates) > 1 else None,
        spoofchk=_flag(content, _VF_SPOOFCHK),
        trust=_flag(content, _VF_TRUST),
        link_state=LINK_STATES[state[0]] if state and state[0] < len(LINK_STATES) else None,
    )


def _vlan(content: dict[int, bytes]) -> tuple[int | None, int | None, str | None]:
    info = attribute_table(content.get(_VF_VLAN_LIST, b"")).get(_VF_VLAN_INFO)
    if info is not None and len(info) >= _WORDS3.size + 2:
        _, vlan, qos = _WORDS3.unpack_from(info)
        number = int.from_bytes(info[_WORDS3.size : _WORDS3.size + 2], "big")
        return vlan, qos, next((name for name, value in VLAN_PROTOCOLS.items() if value == number), None)
    numbers = _numbers(content, _VF_VLAN)
    return (numbers[0], numbers[1], None) if len(numbers) > 1 else (None, None, None)


def _numbers(content: dict[int, bytes], kind: int) -> tuple[int, ...]:
    """The words of an attribute after the first, which is the VF's index."""
    payload = content.get(kind, b"")
    return struct.unpack(f"={len(payload) // 4}I", payload[: len(payload) & ~3])[1:]


def _flag(content: dict[int, bytes], kind: int) -> bool | None:
    """The kernel says 0xffffffff where a driver does not tell."""
    numbers = _numbers(content, kind)
    return bool(numbers[0]) if numbers and numbers[0] in (0, 1) else None


SETTLE_SECONDS = 2.0
"""How long a driver may take until a VF's setting holds."""
POLL_SECONDS = 0.05
IFLA_VF_IB_NODE_GUID, IFLA_VF_IB_PORT_GUID = 10, 11

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
        open_links: Callable[[], NetlinkSocket] = NetlinkSocket,
        write: trunk.Write = Path.write_text,
    ) -> None:
        self._settle_seconds = settle_seconds
        self._root = root
        self._open_links = open_links
        self._write = write

    def guids(self, pf_netdev: str, vf_index: int) -> tuple[str, str] | None:
        """Read the node and port GUID that a PF has for a VF; None if nobody tells."""
        try:
            with translated(f"read the GUIDs of VF {vf_index} of {pf_netdev}"), NetlinkSocket() as links:
                found = with_vfs(links, pf_netdev)
        except NetlinkFailed as error:
            if error.errno not in _REFUSED:
                raise
            found = None
        content = vf_content(found, vf_index) if found is not None else None
        told = decode_guids(attribute_table(content)) if content is not None else None
        if told is not None:
            return told
        try:
            node, port = (
                (_guid_folder(self._root, pf_netdev, vf_index) / name).read_text().strip().lower() for name, _ in _KINDS
            )
        except OSError:
            return None
        return node, port

    def set_guids(self, pf_netdev: str, vf_index: int, node: str, port: str) -> None:
        """Give both GUIDs to a VF, which takes them when its driver is bound again, and read them back if possible."""
        for (name, kind), guid in zip(_KINDS, (node, port), strict=True):
            action = f"set the {name} GUID of VF {vf_index} of {pf_netdev} to {guid}"
            try:
                with translated(action), NetlinkSocket() as links:
                    pf = links.find(pf_netdev)
                    if pf is None:
                        raise HardwareError(f"PF interface {pf_netdev} is gone")
                    links.ask(RTM_SETLINK, 0, link_body(pf.ifindex) + encode_guid(kind, vf_index, guid))
            except NetlinkFailed as error:
                if error.errno not in _REFUSED:
                    raise
                try:
                    (_guid_folder(self._root, pf_netdev, vf_index) / name).write_text(guid)
                except OSError:
                    raise error from None  # no such file: the driver knows neither way
        found = self.guids(pf_netdev, vf_index)
        if found is not None and found != (node, port):
            raise HardwareError(
                f"VF {vf_index} of {pf_netdev} was given the GUIDs {node} and {port} without an error but has"
                f" {' and '.join(found)}"
            )

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
            return with_vfs(links, pf_netdev, statistics=True)

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
            if not is_complete(settings):
                before = _read_back(links, pf_netdev, vf_index)
                if before is not None:  # else what is lacking counts as 0
                    settings = completed(settings, before)
            wrong = tuple(VfSettings.__dataclass_fields__)
            while wrong:
                for what, names, attribute in changes(vf_index, settings):
                    if set(names) & set(wrong):
                        with translated(f"set {what} of VF {vf_index} on {pf_netdev}"):
                            _insist(links, pf.ifindex, attribute, deadline)
                after = _read_back(links, pf_netdev, vf_index)
                if after is None:
                    return  # each request has been acknowledged
                wrong = differing(settings, after)
                if wrong and time.monotonic() > deadline:
                    wanted, found = getattr(settings, wrong[0]), getattr(after, wrong[0])
                    raise HardwareError(
                        f"VF {vf_index} of {pf_netdev}: {wrong[0]} was set to {wanted!r} without an error"
                        f" but is {found!r} after {self._settle_seconds:g} s"
                    )
                if wrong:
                    time.sleep(POLL_SECONDS)


def _read_back(links: NetlinkSocket, pf_netdev: str, vf_index: int) -> VfSettings | None:
    """Read what a PF enforces on a VF; None if it has more VFs than fit into one answer."""
    try:
        return _read(links, pf_netdev, vf_index)
    except OSError as error:
        if error.errno != errno.EMSGSIZE:
            raise
    log.warning("%s has too many VFs to be asked what it enforces on VF %d", pf_netdev, vf_index)
    return None


def _read(links: NetlinkSocket, pf_netdev: str, vf_index: int) -> VfSettings:
    found = with_vfs(links, pf_netdev)
    settings = find_vf(found, vf_index) if found is not None else None
    if settings is None:
        raise HardwareError(f"{pf_netdev} has no VF {vf_index}: look at its sriov_numvfs")
    return settings


def with_vfs(links: NetlinkSocket, pf_netdev: str, *, statistics: bool = False) -> bytes | None:
    """Look a PF up by name, and return the attributes of it and all its VFs as they came. Raises OSError."""
    mask = word(IFLA_EXT_MASK, RTEXT_FILTER_VF | (0 if statistics else RTEXT_FILTER_SKIP_STATS))
    found = links.answer(RTM_GETLINK, link_body(0) + mask + text_attribute(IFLA_IFNAME, pf_netdev), most=_RECEIVE_BYTES)
    return found[LINK.size :] if found is not None else None


def _insist(links: NetlinkSocket, ifindex: int, attribute: bytes, deadline: float) -> None:
    """Repeat a request that the driver cannot take at the moment (i40e EAGAIN, ice EBUSY: the VF is being reset)."""
    while True:
        try:
            return links.ask(RTM_SETLINK, 0, link_body(ifindex) + attribute)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EBUSY) or time.monotonic() > deadline:
                raise
        time.sleep(POLL_SECONDS)


def encode_guid(kind: int, vf_index: int, guid: str) -> bytes:
    """Make the attribute that gives one GUID to a VF, as a request about its PF takes it."""
    payload = _GUID.pack(vf_index, int(guid.replace(":", ""), 16))
    return vf_attribute(attribute(kind, payload))


def decode_guids(content: dict[int, bytes]) -> tuple[str, str] | None:
    """Read node and port GUID from a VF's attributes; None if the kernel does not tell."""
    if any(len(content.get(kind, b"")) < _GUID.size for _, kind in _KINDS):
        return None
    node, port = (_GUID.unpack_from(content[kind])[1] for _, kind in _KINDS)
    return _spelled(node), _spelled(port)


def _spelled(number: int) -> str:
    """Spell a GUID as CNI does: aa:bb:cc:dd:ee:ff:00:11."""
    return number.to_bytes(8, "big").hex(":")


def _guid_folder(root: Path, pf_netdev: str, vf_index: int) -> Path:
    return root / "sys/class/net" / pf_netdev / "device/sriov" / str(vf_index)
