"""Requests that make children, to the byte, and what a real kernel does with them."""

from __future__ import annotations

import errno
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from agent.errors import NetlinkFailed
from agent.hardware.host import Child, Link
from agent.hardware.netlink.link_messages import creation
from agent.hardware.netlink.links import Netlink

MACVLAN = Child("macvlan", "net1", "bridge", "02:00:00:00:00:07", 1400)
IPOIB = Child("ipoib", "net1", "connected", pkey=0x8001)
SOFT = Child("bridge", "net1", "", "02:00:00:00:00:07", 1400)
"""Any kind of interface that this kernel has."""


def test_a_macvlan_is_asked_for_complete() -> None:
    golden = (
        "00000000 00000000 01000000 01000000"  # any family, no index, up
        "09000300 6e65743100 000000"  # IFLA_IFNAME net1
        "08000500 09000000"  # IFLA_LINK 9
        "08001c00 11000000"  # IFLA_NET_NS_FD 17
        "0a000100 020000000007 0000"  # IFLA_ADDRESS
        "08000400 78050000"  # IFLA_MTU
        "1c001200"  # IFLA_LINKINFO
        "0b000100 6d6163766c616e 00"  # IFLA_INFO_KIND macvlan
        "0c000200 08000100 04000000"  # IFLA_INFO_DATA: IFLA_MACVLAN_MODE bridge
    )
    assert creation(MACVLAN, 9, 17).hex() == golden.replace(" ", "")


@pytest.mark.parametrize(("mode", "number"), [("private", 1), ("vepa", 2), ("bridge", 4), ("passthru", 8)])
def test_each_macvlan_mode_has_its_number(mode: str, number: int) -> None:
    assert creation(replace(MACVLAN, mode=mode), 9, 17)[-4:] == number.to_bytes(4, "little")


@pytest.mark.parametrize(("mode", "number"), [("l2", 0), ("l3", 1), ("l3s", 2)])
def test_an_ipvlan_is_asked_for_with_its_mode_and_no_mac(mode: str, number: int) -> None:
    golden = (
        "00000000 00000000 01000000 01000000"
        "09000300 6e65743100 000000"
        "08000500 09000000"
        "08001c00 11000000"
        "08000400 78050000"
        "1c001200"
        "0a000100 6970766c616e 0000"  # IFLA_INFO_KIND ipvlan
        f"0c000200 06000100 0{number}00 0000"  # IFLA_INFO_DATA: IFLA_IPVLAN_MODE
    )
    assert creation(Child("ipvlan", "net1", mode, None, 1400), 9, 17).hex() == golden.replace(" ", "")


def test_an_ipoib_child_is_asked_for_with_its_partition() -> None:
    golden = (
        "00000000 00000000 01000000 01000000"
        "09000300 6e65743100 000000"
        "08000500 09000000"
        "08001c00 11000000"
        "2c001200"
        "09000100 69706f6962 000000"  # IFLA_INFO_KIND ipoib
        "1c000200"
        "06000100 0180 0000"  # IFLA_IPOIB_PKEY 0x8001
        "06000200 0100 0000"  # IFLA_IPOIB_MODE connected
        "06000300 0100 0000"  # IFLA_IPOIB_UMCAST
    )
    assert creation(IPOIB, 9, 17).hex() == golden.replace(" ", "")


def test_without_a_partition_the_kernel_takes_the_parents() -> None:
    assert b"\x06\x00\x01\x00" not in creation(replace(IPOIB, pkey=None), 9, 17)


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


def test_a_kind_that_the_kernel_lacks_is_an_error(parent: Link) -> None:
    links = Netlink()
    netns = os.open("/proc/self/ns/net", os.O_RDONLY)
    with pytest.raises(NetlinkFailed) as caught:
        links.create(Child("nonsense", "net1", ""), parent, netns)
    assert caught.value.errno == errno.EOPNOTSUPP
    os.close(netns)
    links.close()
