"""What a PF enforces on its VFs, in rtnetlink's bytes. Pure.

The kernel knows no question for one VF: it lists all VFs of a PF in one attribute, whose length has 16
bits. Some 330 VFs (270 with InfiniBand GUIDs) need more, and kernels then let the length wrap round
(include/net/netlink.h, nla_nest_end): what follows looks like other attributes. The bytes are all there,
though, so `find` walks the list itself where the message is long enough for that.
Layout: include/uapi/linux/if_link.h, struct ifla_vf_*.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import fields, replace

from agent.hardware.netlink.codec import ATTRIBUTE, NLA_F_NESTED, NLA_TYPE_MASK, attribute, attribute_table
from agent.model.allocation import VfSettings

IFLA_NUM_VF, IFLA_VFINFO_LIST, IFLA_VF_INFO = 21, 22, 1
VLAN_PROTOCOLS = {"802.1q": 0x8100, "802.1ad": 0x88A8}
LINK_STATES = ("auto", "enable", "disable")
"""IFLA_VF_LINK_STATE_{AUTO,ENABLE,DISABLE}"""

_VF_MAC, _VF_VLAN, _VF_SPOOFCHK, _VF_LINK_STATE, _VF_RATE, _VF_TRUST, _VF_VLAN_LIST = 1, 2, 4, 5, 6, 9, 12
_VF_VLAN_INFO = 1
_MAC_BYTES = 6
_MAX_MAC_BYTES = 32
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


def find(body: bytes, vf_index: int) -> VfSettings | None:
    """Find one VF in a link message's attributes. None if it is not listed, or cut off."""
    found = content(body, vf_index)
    return _decode(attribute_table(found)) if found is not None else None


def content(body: bytes, vf_index: int) -> bytes | None:
    """Find the attributes of one VF in a link message's. None if it is not listed, or cut off."""
    return next((body[start:end] for index, start, end in entries(body) if index == vf_index), None)


def entries(body: bytes) -> Iterator[tuple[int, int, int]]:
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
