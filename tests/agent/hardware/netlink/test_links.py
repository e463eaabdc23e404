"""Interfaces of the real kernel, in network namespaces of the test's own."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.errors import HardwareError, NetlinkFailed
from agent.hardware.host import Link, LinkChange, Route
from agent.hardware.netlink.links import Netlink
from agent.hardware.netlink.rtnetlink import IFLA_IFALIAS, LinkMessage
from tests.agent.hardware.many_names import give_all_names


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def alias(message: LinkMessage) -> str | None:
    """Take a link's alias for its device: a veth has none below it."""
    return message.text(IFLA_IFALIAS)


@pytest.fixture
def links(own_network: None) -> Iterator[Netlink]:
    """An interface `v0` for device A, and its peer `p0`."""
    run("ip", "link", "add", "v0", "address", "02:00:00:00:00:01", "type", "veth", "peer", "name", "p0")
    run("ip", "link", "set", "v0", "alias", "A")
    made = Netlink(alias)
    yield made
    made.close()


@pytest.fixture
def pod(own_network: None, tmp_path: Path) -> Iterator[int]:
    """A pod's network namespace."""
    path = tmp_path / "pod"
    path.touch()
    run("unshare", f"--net={path}", "ip", "link", "set", "lo", "up")
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def v0(links: Netlink) -> Link:
    link = links.find("v0")
    assert link is not None
    return link


def test_an_interface_is_found_by_name_and_by_device(links: Netlink) -> None:
    link = v0(links)
    assert (link.name, link.mac, link.mtu, link.up, link.carrier, link.device) == (
        "v0",
        "02:00:00:00:00:01",
        1500,
        False,
        False,
        "A",
    )
    assert links.find_device("A") == link
    assert links.by_device() == {"A": link}
    assert links.find("nothing") is None
    assert links.find_device("B") is None


def test_what_else_a_pod_has_made_is_not_kept_while_an_interface_is_looked_for(
    links: Netlink, pod: int, tmp_path: Path
) -> None:
    """A pod may make thousands, and each may take 64 KiB to tell of: more memory than the agent may have."""
    script = "".join(f"link add b{number} type bridge\n" for number in range(24)) + "link set b7 alias B\n"
    subprocess.run(["nsenter", f"--net={tmp_path / 'pod'}", "ip", "-batch", "-"], input=script, text=True, check=True)
    for number in range(24):
        give_all_names(f"b{number}", pod)
    tracemalloc.start()
    try:
        found = links.find_device("B", pod)
        assert found is not None
        assert found.name == "b7"
        found = None
        assert [link.name for link in links.listed(pod, lambda link: link.device == "B")] == ["b7"]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_an_interface_is_moved_and_changed_in_one_step(links: Netlink, pod: int) -> None:
    links.move_in(v0(links), pod, LinkChange(name="net1", mac="02:00:00:00:00:77", mtu=1400, up=True))
    assert links.find("v0") is None
    link = links.find("net1", pod)
    assert link is not None
    assert (link.mac, link.mtu, link.up, link.device) == ("02:00:00:00:00:77", 1400, True, "A")
    assert links.find_device("A", pod) == link
    links.move_out(link, pod, LinkChange(name="v0", mac="02:00:00:00:00:01", mtu=1500, up=False))
    assert links.find("net1", pod) is None
    assert (v0(links).mac, v0(links).mtu, v0(links).up) == ("02:00:00:00:00:01", 1500, False)


def test_an_interface_that_is_up_can_be_renamed_and_stays_up_if_asked(links: Netlink) -> None:
    run("ip", "link", "set", "v0", "up")
    links.change(v0(links), LinkChange(name="v1", up=True))
    link = links.find("v1")
    assert link is not None
    assert link.up


def test_a_rename_that_fails_leaves_an_interface_up(links: Netlink) -> None:
    run("ip", "link", "set", "v0", "up")
    with pytest.raises(NetlinkFailed, match="change interface v0"):
        links.change(v0(links), LinkChange(name="p0"))
    assert v0(links).up


def shown(folder: Path, *what: str) -> Any:
    """What `ip` shows in the pod."""
    return json.loads(run("nsenter", f"--net={folder}/pod", "ip", "-j", *what))


def configure(links: Netlink, pod: int, addresses: tuple[str, ...], *routes: Route) -> None:
    links.configure("net1", pod, addresses, routes)


@pytest.fixture
def net1(links: Netlink, pod: int) -> None:
    """Put the interface into the pod, up, with carrier."""
    links.move_in(v0(links), pod, LinkChange(name="net1", up=True))
    run("ip", "link", "set", "p0", "up")


@pytest.mark.usefixtures("net1")
def test_addresses_and_routes_are_set_and_may_be_set_again(links: Netlink, pod: int, tmp_path: Path) -> None:
    routes = (
        Route("0.0.0.0/0", "10.0.0.1"),
        Route("10.5.0.0/16", None),
        Route("::/0", "fd00::1"),
        Route("fd05::/64", None),
    )
    for _ in range(2):
        configure(links, pod, ("10.0.0.2/24", "10.1.0.2/31", "fd00::2/64"), *routes)
    assert set(links.addresses("net1", pod)) == {"10.0.0.2/24", "10.1.0.2/31", "fd00::2/64"}

    found = {(r["dst"], r.get("gateway"), r["dev"]) for r in shown(tmp_path, "route") + shown(tmp_path, "-6", "route")}
    assert {
        ("default", "10.0.0.1", "net1"),
        ("10.5.0.0/16", None, "net1"),
        ("default", "fd00::1", "net1"),
        ("fd05::/64", None, "net1"),
    } <= found
    assert len(shown(tmp_path, "route")) == 4
    infos = shown(tmp_path, "address", "show", "net1")[0]["addr_info"]
    assert all("tentative" not in info for info in infos if info["scope"] == "global")
    assert [info.get("broadcast") for info in infos if info["family"] == "inet"] == ["10.0.0.255", None]


@pytest.mark.usefixtures("net1")
def test_what_a_route_may_say_more_reaches_the_kernel(links: Netlink, pod: int, tmp_path: Path) -> None:
    routes = (
        Route("10.5.0.0/16", "10.0.0.1", mtu=1300, advmss=1200, priority=7, table=100, scope=0),
        Route("10.6.0.0/16", None, scope=253),
        Route("fd05::/64", "fd00::1", mtu=1400, priority=9),
        Route("10.7.0.1/16", "192.0.2.1", source="10.0.0.2", onlink=True, protocol=200),
        Route("10.8.0.0/16", "fe80::1"),
    )
    for _ in range(2):
        configure(links, pod, ("10.0.0.2/24", "fd00::2/64"), *routes)

    (other,) = shown(tmp_path, "route", "show", "table", "100")
    assert (other["dst"], other["gateway"], other["metric"]) == ("10.5.0.0/16", "10.0.0.1", 7)
    assert other["metrics"] == [{"mtu": 1300, "advmss": 1200}]
    (near,) = shown(tmp_path, "route", "show", "10.6.0.0/16")
    assert near["scope"] == "link"
    (six,) = shown(tmp_path, "-6", "route", "show", "fd05::/64")
    assert (six["metric"], six["metrics"]) == (9, [{"mtu": 1400}])
    (far,) = shown(tmp_path, "route", "show", "10.7.0.0/16")
    assert (far["gateway"], far["prefsrc"], far["flags"]) == ("192.0.2.1", "10.0.0.2", ["onlink"])
    assert far["protocol"] == "200"
    (other,) = shown(tmp_path, "route", "show", "10.8.0.0/16")
    assert other["via"] == {"family": "inet6", "host": "fe80::1"}
    told = {route.destination: route for route in links.routes(pod, "net1")}["10.7.0.0/16"]
    assert told == Route("10.7.0.0/16", "192.0.2.1", source="10.0.0.2", onlink=True, protocol=200)


@pytest.mark.usefixtures("net1")
def test_a_route_goes_before_another_interfaces_and_does_not_take_it_away(
    links: Netlink, pod: int, tmp_path: Path
) -> None:
    """Whoever binds to an interface, as RDMA-CM does, needs the one through it: each rail has its own."""

    def ip(*words: str) -> str:
        return run("nsenter", f"--net={tmp_path}/pod", "ip", *words)

    ip("link", "add", "net0", "up", "type", "veth", "peer", "name", "lab0")
    ip("link", "set", "lab0", "up")
    both = ("10.9.0.0/16", "10.0.0.1"), ("fd09::/64", "fd00::1")
    links.configure("net0", pod, ("10.0.0.3/24", "fd00::3/64"), tuple(Route(*one) for one in both))
    for _ in range(2):
        configure(links, pod, ("10.0.0.2/24", "fd00::2/64"), *(Route(*one) for one in both))
    for name in ("net0", "net1"):
        assert f"via 10.0.0.1 dev {name}" in ip("route", "get", "10.9.0.1", "oif", name)
        assert f"via fd00::1 dev {name}" in ip("route", "get", "fd09::1", "oif", name)
    assert "dev net1" in ip("route", "get", "10.9.0.1")
    assert ip("route", "show", "10.9.0.0/16").count("via") == 2
    assert ip("-6", "route", "show", "fd09::/64").count("via") == 2


@pytest.mark.usefixtures("net1")
def test_many_routes_are_asked_for_together_and_the_first_that_is_refused_is_named(
    links: Netlink, pod: int, tmp_path: Path
) -> None:
    many = [Route(f"10.7.{n}.0/24", "10.0.0.1") for n in range(200)]
    bad = [Route(f"10.8.{n}.0/24", "192.168.0.1") for n in range(2)]
    with pytest.raises(NetlinkFailed, match=r"add route 10\.8\.0\.0/24 via 192\.168\.0\.1"):
        configure(links, pod, ("10.0.0.2/24",), *many[:100], *bad, *many[100:])
    configure(links, pod, ("10.0.0.2/24",), *many)
    found = run("nsenter", f"--net={tmp_path}/pod", "ip", "route", "show", "root", "10.7.0.0/16")
    assert len(found.splitlines()) == 200


def test_a_pod_without_ipv6_is_told_from_other_refusals(links: Netlink, pod: int) -> None:
    within = (f"--net=/proc/{os.getpid()}/fd/{pod}", "sh", "-c")
    run("nsenter", *within, "echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6")
    links.move_in(v0(links), pod, LinkChange(name="net1", up=True))
    with pytest.raises(NetlinkFailed, match=r"add address fd00::2/64 to net1: .*IPv6 is off there .*: turn it on"):
        configure(links, pod, ("10.0.0.2/24", "fd00::2/64"))


def test_lists_are_complete_while_other_links_come_and_go(links: Netlink) -> None:
    """The kernel tells when a list was disturbed, and it must be asked for again."""
    for number in range(10):
        run("ip", "link", "add", f"a{number}", "type", "veth", "peer", "name", f"b{number}")
    stop = threading.Event()
    script = "".join(f"link add x{n} type veth peer name y{n}\nlink delete x{n}\n" for n in range(50))

    def churn() -> None:
        while not stop.is_set():
            subprocess.run(["ip", "-batch", "-"], input=script, text=True, check=True)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(60):
            assert links.find_device("A") is not None
    finally:
        stop.set()
        thread.join()


def test_who_asks_after_the_close_is_told(own_network: None) -> None:
    links = Netlink()
    before = len(os.listdir("/proc/self/fd"))
    links.find("lo")
    links.close()
    assert len(os.listdir("/proc/self/fd")) < before
    with pytest.raises(HardwareError, match="closed"):
        links.find("lo")


def test_an_interface_whose_name_is_no_text_is_found(links: Netlink) -> None:
    subprocess.run([b"ip", b"link", b"set", b"p0", b"name", b"p\xff"], check=True)
    found = links.find_own([os.fsdecode(b"p\xff")], "B")
    assert found is not None
    assert found.name == "p\N{REPLACEMENT CHARACTER}"
    links.change(found, LinkChange(name="p1"))
    assert links.find("p1") is not None


def test_each_look_tells_how_an_interface_is_now(links: Netlink) -> None:
    before = v0(links)
    assert v0(links) is before  # said in the same bytes, read once
    for change in ("mtu 1400", "address 02:00:00:00:00:09", "alias B", "promisc on", "arp off"):
        former = v0(links)
        run("ip", "link", "set", "v0", *change.split())
        assert v0(links) != former
    assert (v0(links).mtu, v0(links).mac, v0(links).device) == (1400, "02:00:00:00:00:09", "B")


def namespace(path: Path) -> int:
    """Make a network namespace and open it."""
    path.touch()
    subprocess.run(["unshare", f"--net={path}", "true"], check=True)
    return os.open(path, os.O_RDONLY)


def test_a_late_detach_takes_no_other_namespace_for_the_host(own_network: None, tmp_path: Path) -> None:
    subprocess.run(["ip", "link", "add", "v0", "type", "veth", "peer", "name", "p0"], check=True)
    pod, witness = namespace(tmp_path / "pod"), Netlink()
    ending = Netlink()
    link = ending.find("v0")
    assert link is not None
    ending.move_in(link, pod, LinkChange())
    ending.close()
    reused = [namespace(tmp_path / f"other{n}") for n in range(8)]  # one of them has the number of the host's
    with pytest.raises(HardwareError):
        ending.move_out(link, pod, LinkChange())
    assert witness.find("v0", pod) is not None
    witness.close()
    for descriptor in [pod, *reused]:
        os.close(descriptor)
