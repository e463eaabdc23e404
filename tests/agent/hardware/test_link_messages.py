from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.hardware.link_messages import (
    IFLA_IFNAME,
    IFLA_LINKINFO,
    IFLA_PARENT_DEV_BUS_NAME,
    RTM_DELLINK,
    RTM_NEWLINK,
    link_events,
)


def attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def message(kind: int, *attributes: bytes) -> bytes:
    body = b"\0" * 16 + b"".join(attributes)
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body


NAME = attribute(IFLA_IFNAME, b"eth0\0")
VETH = attribute(IFLA_LINKINFO | 0x8000, attribute(1, b"veth\0"))
PCI = attribute(IFLA_PARENT_DEV_BUS_NAME, b"pci\0")


@pytest.mark.parametrize(
    ("packet", "events"),
    [
        (message(RTM_NEWLINK, NAME, PCI), ["link eth0 changed"]),
        (message(RTM_DELLINK, NAME, PCI), ["link eth0 gone"]),
        (message(RTM_NEWLINK, NAME), ["link eth0 changed"]),
        (message(RTM_NEWLINK, NAME, VETH), []),
        (message(RTM_NEWLINK, NAME, VETH, PCI), ["link eth0 changed"]),
        (message(20, NAME, PCI), []),
        (message(RTM_NEWLINK, NAME, PCI) + message(RTM_DELLINK, NAME), ["link eth0 changed", "link eth0 gone"]),
    ],
)
def test_links_with_hardware_behind_them_are_events(packet: bytes, events: list[str]) -> None:
    assert list(link_events(packet, virtual_links=False)) == events


def test_software_links_are_events_when_asked_for() -> None:
    assert list(link_events(message(RTM_NEWLINK, NAME, VETH), virtual_links=True)) == ["link eth0 changed"]


@given(st.binary(max_size=200), st.booleans())
def test_no_packet_is_too_strange(packet: bytes, virtual_links: bool) -> None:
    list(link_events(packet, virtual_links=virtual_links))
