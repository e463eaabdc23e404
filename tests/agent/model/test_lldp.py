from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.hardware.lldp import GROUPS, MAX_TEXT, Neighbour, NotLldp, parse_frame

SOURCE = bytes.fromhex("001c73aabbcc")


def field(kind: int, value: bytes) -> bytes:
    return struct.pack("!H", kind << 9 | len(value)) + value


def frame(*fields: bytes, group: bytes = GROUPS[0], ethertype: int = 0x88CC) -> bytes:
    return group + SOURCE + struct.pack("!H", ethertype) + b"".join(fields)


CHASSIS = field(1, b"\x04" + SOURCE)
PORT = field(2, b"\x05Ethernet1/7")
TTL = field(3, struct.pack("!H", 120))
NAME = field(5, b"leaf-r17-a")
END = field(0, b"")


@pytest.mark.parametrize("group", GROUPS)
def test_a_switchs_announcement_names_chassis_port_and_system(group: bytes) -> None:
    found = parse_frame(frame(CHASSIS, PORT, TTL, NAME, END, b"\0" * 20, group=group))
    assert found == (Neighbour("00:1c:73:aa:bb:cc", "Ethernet1/7", "leaf-r17-a"), 120)


@pytest.mark.parametrize(
    ("chassis", "text"),
    [
        (b"\x07leaf-7", "leaf-7"),
        (b"\x05\x01\x0a\x00\x00\x01", "10.0.0.1"),
        (b"\x05\x02" + bytes(15) + b"\x01", "::1"),
        (b"\x04\x01\x02", "0102"),
        (b"\x07\xff\xfe", "fffe"),
        (b"\x07 a\x00b\n ", "ab"),
    ],
)
def test_an_identity_is_shown_by_its_kind(chassis: bytes, text: str) -> None:
    assert parse_frame(frame(field(1, chassis), PORT, TTL, END))[0].chassis == text


def test_an_announcement_may_end_without_an_end_mark_and_with_unknown_fields() -> None:
    assert parse_frame(frame(CHASSIS, PORT, TTL, field(127, b"\x00\x80\xc2\x01")))[0].system_name == ""


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (b"", "has 0 bytes"),
        (b"\0" * 10000, "bytes"),
        (frame(CHASSIS, PORT, TTL, group=b"\xff" * 6), "not addressed"),
        (frame(CHASSIS, PORT, TTL, ethertype=0x0800), "not addressed"),
        (frame(), "does not begin"),
        (frame(PORT, CHASSIS, TTL), "does not begin"),
        (frame(CHASSIS, PORT, NAME), "does not begin"),
        (frame(CHASSIS, PORT, TTL, CHASSIS), "says twice"),
        (frame(CHASSIS, PORT, field(3, b"\1")), "time to live"),
        (frame(field(1, b"\x04"), PORT, TTL), "identity"),
        (frame(field(1, b"\x04" + b"x" * 256), PORT, TTL), "identity"),
        (frame(CHASSIS, PORT, TTL, NAME[:-1]), "ends in the middle"),
    ],
)
def test_what_is_no_announcement_is_refused(bad: bytes, why: str) -> None:
    with pytest.raises(NotLldp, match=why):
        parse_frame(bad)


@given(st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for content in (data, frame(data), frame(CHASSIS, PORT, TTL, data)):
        try:
            found, valid = parse_frame(content)
        except NotLldp:
            continue
        assert 0 <= valid <= 65535
        for text in (found.chassis, found.port, found.system_name):
            assert text.isprintable()
            assert len(text) <= max(2 * 256, MAX_TEXT)
