"""Link requests spoken directly, to a real kernel."""

from __future__ import annotations

import errno
import socket
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import NetlinkFailed
from agent.hardware.host import Child, Link
from agent.hardware.netlink.links import Netlink
from agent.hardware.netlink.rtnetlink import (
    IFLA_IFNAME,
    IFLA_LINKINFO,
    IFLA_PARENT_DEV_BUS_NAME,
    IFLA_PARENT_DEV_NAME,
    IFLA_PROP_LIST,
    RTM_DELLINK,
    RTM_NEWLINK,
    NetlinkSocket,
    creation,
    link_events,
)
from agent.model.change import Change, of_function, of_netdev
from tests.agent.hardware.attributes import attribute
from tests.agent.hardware.many_names import NAMES, give_all_names


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def test_a_link_with_as_many_other_names_as_it_can_have_is_read_to_its_end(own_network: None) -> None:
    """What tells the device below it comes after the names."""
    run("ip", "link", "add", "v0", "type", "veth", "peer", "name", "p0")
    with NetlinkSocket() as links:
        bare = links.find("v0")
        give_all_names("v0")
        found = links.find("v0")
        assert bare is not None
        assert found is not None
        assert len(found.altnames) == NAMES
        assert found.attributes.keys() - {IFLA_PROP_LIST} == bare.attributes.keys()
        (listed,) = (link for link in links.chosen(lambda link: link) if link.ifindex == found.ifindex)
        assert listed.altnames == found.altnames
        assert listed.attributes.keys() == found.attributes.keys()


def test_what_a_process_sends_is_no_answer(own_network: None) -> None:
    with NetlinkSocket() as links, socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as other:
        assert links.find("lo") is not None  # from here on it has a port
        table = Path("/proc/thread-self/net/netlink").read_text().splitlines()[1:]
        ports = [int(port) for _, protocol, port, *_ in map(str.split, table) if protocol == "0" and port != "0"]
        assert ports
        for port in ports:
            other.sendto(b"short", (port, 0))
        found = links.find("lo")
        assert found is not None
        assert [link.ifindex for link in links.chosen(lambda link: link)] == [found.ifindex]


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


@pytest.mark.parametrize(
    ("device", "change"),
    [(b"0000:3b:00.1\0", of_function("0000:3b:00.1") | of_netdev("eth0")), (b"virtio0\0", of_netdev("eth0"))],
)
def test_a_link_names_the_function_below_it_if_it_is_one(device: bytes, change: Change) -> None:
    packet = message(RTM_NEWLINK, NAME, VETH, attribute(IFLA_PARENT_DEV_NAME, device))
    assert list(link_events(packet, virtual_links=True)) == [("link eth0 changed", change)]


@given(st.binary(max_size=200), st.booleans())
def test_no_packet_is_too_strange(packet: bytes, virtual_links: bool) -> None:
    list(link_events(packet, virtual_links=virtual_links))


SOFT = Child("bridge", "net1", "", "02:00:00:00:00:07", 1400)
"""Any kind of interface that this kernel has."""


HEAD = "00000000 00000000 01000000 01000000 09000300 6e65743100 000000 08000500 09000000 08001c00 11000000"
CHILDREN = yaml.safe_load(Path(__file__).with_name("children.yaml").read_text())


@pytest.mark.parametrize("row", CHILDREN)
def test_an_interface_is_asked_for_complete(row: dict[str, Any]) -> None:
    body = creation(Child(name="net1", **row["child"]), 9, 17)
    assert body.hex() == "".join((HEAD, *row["request"])).replace(" ", "")


@pytest.fixture
def parent(own_network: None) -> Link:
    subprocess.run(["ip", "link", "add", "p0", "up", "type", "veth", "peer", "name", "p1"], check=True)
    links = Netlink()
    found = links.find("p0")
    links.close()
    assert found is not None
    return found


def test_it_is_made_in_the_pod_in_one_request_and_removed(parent: Link, tmp_path: Path) -> None:
    (tmp_path / "pod").touch()
    subprocess.run(["unshare", f"--net={tmp_path / 'pod'}", "true"], check=True)
    links = Netlink()
    with open(tmp_path / "pod") as pod:
        links.create(SOFT, parent, pod.fileno())
        found = links.find("net1", pod.fileno())
        assert found is not None
        assert (found.kind, found.mac, found.mtu, found.up) == ("bridge", "02:00:00:00:00:07", 1400, True)
        assert links.find("net1") is None
        with pytest.raises(NetlinkFailed, match="make bridge interface net1 upon p0") as caught:
            links.create(SOFT, parent, pod.fileno())
        assert caught.value.errno == errno.EEXIST
        links.remove(found, pod.fileno())
        links.remove(found, pod.fileno())
        assert links.find("net1", pod.fileno()) is None
    links.close()
