"""LLDP frames on real links, in network namespaces of the test's own."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest

from agent.hardware.lldp import GROUPS, LldpSockets, Neighbour, parse_frame
from tests.agent.hardware.frames import announcement, await_up, run, send
from tests.waiting import until


@pytest.fixture
def links(own_network: None) -> None:
    """Two adapters `nic0` and `nic1`, whose other ends are ports of a switch."""
    for n in (0, 1):
        run("ip", "link", "add", f"nic{n}", "type", "veth", "peer", "name", f"port{n}")
        run("ip", "link", "set", f"nic{n}", "up")
        run("ip", "link", "set", f"port{n}", "up")
    await_up("nic0", "port0", "nic1", "port1")


@pytest.fixture
def sockets(links: None) -> Iterator[LldpSockets]:
    made = LldpSockets()
    made.follow({f"nic{n}": (socket.if_nametoindex(f"nic{n}"), f"0000:0{n}:00.0") for n in (0, 1)})
    yield made
    made.close()


def heard(sockets: LldpSockets, count: int) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    deadline = time.monotonic() + 30
    while len(found) < count and time.monotonic() < deadline:
        select.select([sockets.fileno()], [], [], 0.1)
        found += sockets.read()
    return found


def test_an_adapter_that_was_away_for_a_moment_is_heard_again(sockets: LldpSockets) -> None:
    index = socket.if_nametoindex("nic0")
    with subprocess.Popen(["unshare", "-n", "cat"], stdin=subprocess.PIPE) as pod:
        until(lambda: os.stat(f"/proc/{pod.pid}/ns/net").st_ino != os.stat("/proc/self/ns/net").st_ino)
        run("ip", "link", "set", "nic0", "netns", str(pod.pid))
        run("nsenter", "-t", str(pod.pid), "-n", "ip", "link", "set", "nic0", "netns", str(os.getpid()))
        pod.communicate()
    run("ip", "link", "set", "nic0", "up")
    await_up("nic0", "port0")
    assert socket.if_nametoindex("nic0") == index
    sockets.follow({f"nic{n}": (socket.if_nametoindex(f"nic{n}"), f"0000:0{n}:00.0") for n in (0, 1)})
    send("port0", announcement("leaf-a"))
    assert [nic for nic, _ in heard(sockets, 1)] == ["0000:00:00.0"]


@pytest.mark.parametrize("group", GROUPS)
def test_what_the_switch_says_comes_in_with_the_adapter_it_came_to(sockets: LldpSockets, group: bytes) -> None:
    send("port1", announcement("leaf-b", group))
    ((nic, frame),) = heard(sockets, 1)
    assert nic == "0000:01:00.0"
    assert parse_frame(frame) == (Neighbour("02:00:00:00:00:01", "eth1", "leaf-b"), 120)


def test_neither_other_protocols_nor_what_this_machine_sends_comes_in(sockets: LldpSockets) -> None:
    send("nic0", announcement("myself"))
    send("port0", announcement("other", ethertype=0x0800), announcement("leaf-a"))
    frames = heard(sockets, 1)
    assert [parse_frame(frame)[0].system_name for _, frame in frames] == ["leaf-a"]
    assert list(sockets.read()) == []


def test_the_adapter_listens_to_the_addresses_of_lldp(sockets: LldpSockets) -> None:
    listened = run("ip", "maddress", "show", "dev", "nic0")
    for group in GROUPS:
        assert group.hex(":") in listened
    sockets.follow({})
    assert GROUPS[0].hex(":") not in run("ip", "maddress", "show", "dev", "nic0")


def test_a_link_that_goes_down_and_up_is_heard_again(sockets: LldpSockets) -> None:
    run("ip", "link", "set", "nic0", "down")
    assert heard(sockets, 0) == []
    assert list(sockets.read()) == []
    run("ip", "link", "set", "nic0", "up")
    deadline = time.monotonic() + 30
    while not (found := list(sockets.read())):
        assert time.monotonic() < deadline
        send("port0", announcement("leaf-a"))
    assert found[0][0] == "0000:00:00.0"


def test_an_interface_that_is_not_there_is_left_out(links: None) -> None:
    sockets = LldpSockets()
    sockets.follow({"gone0": (4711, "0000:09:00.0")})
    assert list(sockets.read()) == []
    sockets.close()


def test_a_flood_is_read_in_parts(sockets: LldpSockets) -> None:
    send("port0", *[announcement(f"leaf-{n}") for n in range(200)])
    select.select([sockets.fileno()], [], [], 30)
    assert 0 < len(list(sockets.read())) <= 64
