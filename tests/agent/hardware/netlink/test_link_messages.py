from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.hardware.netlink.codec import attribute_table, attributes
from agent.hardware.netlink.link_messages import (
    IFLA_IFNAME,
    IFLA_LINKINFO,
    IFLA_PARENT_DEV_BUS_NAME,
    IFLA_PARENT_DEV_NAME,
    RTM_DELLINK,
    RTM_NEWLINK,
    link_events,
)
from agent.model.change import of_function, of_netdev


def attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def message(kind: int, *parts: bytes) -> bytes:
    body = b"\0" * 16 + b"".join(parts)
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
    assert [what for what, _ in link_events(packet)] == events


def test_software_links_are_events_when_asked_for() -> None:
    packet = message(RTM_NEWLINK, NAME, VETH)
    assert list(link_events(packet, virtual_links=True)) == [("link eth0 changed", of_netdev("eth0"))]


def test_a_link_names_the_function_below_it() -> None:
    device = attribute(IFLA_PARENT_DEV_NAME, b"0000:3b:00.1\0")
    ((_, change),) = link_events(message(RTM_NEWLINK, NAME, PCI, device))
    assert change == of_function("0000:3b:00.1") | of_netdev("eth0")


def test_what_is_below_may_be_no_function() -> None:
    device = attribute(IFLA_PARENT_DEV_NAME, b"virtio0\0")
    ((_, change),) = link_events(message(RTM_NEWLINK, NAME, device))
    assert change == of_netdev("eth0")


@given(st.binary(max_size=200), st.booleans())
def test_no_packet_is_too_strange(packet: bytes, virtual_links: bool) -> None:
    list(link_events(packet, virtual_links=virtual_links))


@given(st.binary(max_size=200), st.integers(0, 8))
def test_a_table_of_attributes_has_the_last_of_each_type(body: bytes, start: int) -> None:
    assert attribute_table(body, start) == dict(attributes(body[start:]))


def test_a_table_ends_where_an_attribute_makes_no_sense() -> None:
    assert attribute_table(NAME + b"\x03\0\1\0" + PCI) == {IFLA_IFNAME: b"eth0\0"}
    assert attribute_table(VETH) == {IFLA_LINKINFO: attribute(1, b"veth\0")}
