"""Announcements as a neighbour hears them: on a real link, and in its neighbour table."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.hardware.netlink.announce import Announcer, frame

MAC = bytes.fromhex("020000000007")


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_the_frames_are_what_the_standards_say() -> None:
    assert frame(MAC, "10.0.0.7/24").hex() == (
        "ffffffffffff0200000000070806"  # to everybody, ARP
        "0001080006040001"  # Ethernet, IPv4, request
        "0200000000070a000007"
        "0000000000000a000007"
    )
    assert frame(MAC, "fd00::7/64").hex() == (
        "33330000000102000000000786dd"  # to all nodes, IPv6
        "6000000000203aff"  # 32 bytes of ICMPv6, hop limit 255
        "fd000000000000000000000000000007ff020000000000000000000000000001"
        "88005a8920000000"  # advertisement, override
        "fd0000000000000000000000000000070201020000000007"
    )


@pytest.fixture
def pod(own_network: None, tmp_path: Path) -> Iterator[Path]:
    """A pod with net1, whose other end is here."""
    path = tmp_path / "pod"
    path.touch()
    run("unshare", f"--net={path}", "true")
    run("ip", "link", "add", "name", "here", "type", "veth", "peer", "name", "net1", "address", "02:00:00:00:00:07")
    run("ip", "link", "set", "net1", "netns", str(path))
    run("nsenter", f"--net={path}", "ip", "link", "set", "net1", "up")
    run("ip", "address", "add", "10.0.0.1/24", "dev", "here")
    run("ip", "address", "add", "fd00::1/64", "dev", "here", "nodad")
    for address in ("10.0.0.7", "fd00::7"):  # as of the address's former owner
        run("ip", "neighbour", "add", address, "lladdr", "02:00:00:00:00:99", "dev", "here", "nud", "stale")
    yield path
    run("umount", "--lazy", str(path))


def known(*addresses: str) -> set[str]:
    entries = json.loads(run("ip", "-json", "neighbour", "show", "dev", "here"))
    return {entry["lladdr"] for entry in entries if entry["dst"] in addresses}


def heard(*addresses: str) -> None:
    deadline = time.monotonic() + 30
    while known(*addresses) != {"02:00:00:00:00:07"}:
        assert time.monotonic() < deadline, known(*addresses)
        time.sleep(0.02)


def up_and_ready() -> None:
    """Set the neighbour's link up, and wait until its IPv6 listens: the kernel begins up to a second later."""
    run("ip", "link", "set", "here", "up")
    deadline = time.monotonic() + 30
    while "fe80::" not in run("ip", "-6", "address", "show", "dev", "here", "-tentative"):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def announcing() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "announce"]


def test_a_neighbour_that_knew_the_former_owner_learns_the_new_one(pod: Path) -> None:
    up_and_ready()
    with open(pod) as netns:
        Announcer().start(netns.fileno(), "net1", ("10.0.0.7/24", "fd00::7/64"))
    heard("10.0.0.7", "fd00::7")


def test_a_link_that_gets_its_carrier_later_is_waited_for(pod: Path) -> None:
    with open(pod) as netns:
        Announcer(seconds=10).start(netns.fileno(), "net1", ("10.0.0.7/24",))
    run("ip", "link", "set", "here", "up")
    heard("10.0.0.7")


@pytest.mark.parametrize("ifname", ["net1", "nothing"])
def test_a_link_without_carrier_or_none_at_all_is_given_up(pod: Path, ifname: str) -> None:
    with open(pod) as netns:
        Announcer(seconds=0.05).start(netns.fileno(), ifname, ("10.0.0.7/24",))
    for thread in announcing():
        thread.join(10)
    assert announcing() == []
    assert known("10.0.0.7") == {"02:00:00:00:00:99"}


def test_nothing_to_announce_starts_nothing(pod: Path) -> None:
    with open(pod) as netns:
        Announcer().start(netns.fileno(), "net1", ())
    assert announcing() == []
