"""Bonds, with the kernel's own driver: of adapters in the host, with children upon it; and of two VFs of a pod."""

from __future__ import annotations

import fcntl
import itertools
import socket
import sqlite3
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent.errors import AttachmentError, DeviceBusy, NetlinkFailed
from agent.hardware import netns as namespaces
from cni.call import GrantedDevice
from tests.cni.networks import network
from tests.vm.adapters import MakePod, MakeVfs, Pf, cable, ip, link, run, wait_until
from tests.vm.direct import Direct, look, opened
from tests.vm.node import ping
from tests.vm.test_shared_adapters import CLUSTER
from tests.vm.test_shared_adapters import node as node

BOND = "bond9"


@pytest.fixture
def bond(pfs: tuple[Pf, ...]) -> Iterator[str]:
    """An active-backup bond of the first adapter, as a host has one of both its ports."""
    run("modprobe", "-a", "bonding", "macvlan", "ipvlan")
    ip("link", "add", BOND, "type", "bond", "mode", "active-backup", "miimon", "100")
    ip("link", "set", pfs[0].netdev, "down")
    ip("link", "set", pfs[0].netdev, "master", BOND)
    ip("link", "set", BOND, "up")
    wait_until("the bond's carrier", lambda: "LOWER_UP" in link(BOND)["flags"])
    yield BOND
    ip("link", "set", pfs[0].netdev, "nomaster")
    ip("link", "delete", BOND)
    ip("link", "set", pfs[0].netdev, "up")
    wait_until("the adapter's carrier", lambda: "LOWER_UP" in link(pfs[0].netdev)["flags"])


@pytest.mark.parametrize(("mode", "named"), [("macvlan", "share"), ("ipvlan", "share"), ("ipvlan", "master")])
def test_pods_talk_upon_the_bond_that_an_adapter_is_a_port_of(
    node: Direct, pfs: tuple[Pf, ...], bond: str, netns: MakePod, mode: str, named: str
) -> None:
    where = {"deviceID": pfs[0].address} if named == "share" else {"master": bond}
    pods = [netns(), netns()]
    for number, pod in enumerate(pods, 1):
        node.do("add", pod, pod, mode=mode, **where)
        shown = link("net1", pod)
        assert shown["linkinfo"]["info_kind"] == mode
        assert (shown["address"] == link(bond)["address"]) == (mode == "ipvlan")
        assert shown["link_index"] == link(bond)["ifindex"]
        node.address(pod, f"10.98.0.{number}/24")
        node.do("check", pod, pod, mode=mode, **where)
    ping(f"/run/netns/{pods[0]}", "10.98.0.2")
    for pod in pods:
        node.do("delete", pod, pod)
    node.await_back()
    assert all("net1" not in ip("-n", pod, "-brief", "link") for pod in pods)


@pytest.mark.parametrize("mode", ["l2", "l3", "l3s"])
def test_an_ipvlan_has_its_mode_and_others_upon_it_too(
    node: Direct, pfs: tuple[Pf, ...], netns: MakePod, mode: str
) -> None:
    run("modprobe", "-a", "macvlan", "ipvlan")
    pod, other = netns(), netns()
    node.do("add", pod, pod, mode="ipvlan", master=pfs[1].netdev, ipvlanMode=mode)
    assert link("net1", pod)["linkinfo"]["info_data"]["mode"] == mode
    with pytest.raises(DeviceBusy, match="so it can carry no ipvlan of mode"):
        node.do("add", other, other, mode="ipvlan", master=pfs[1].netdev, ipvlanMode="l3" if mode == "l2" else "l2")
    with pytest.raises(DeviceBusy, match="so it can carry no macvlan"):
        node.do("add", other, other, mode="macvlan", master=pfs[1].netdev)
    node.bring_home(pod, pod)
    node.do("add", other, other, mode="macvlan", master=pfs[1].netdev)
    node.bring_home(other, other)


def test_what_others_have_made_upon_it_is_told(node: Direct, pfs: tuple[Pf, ...], netns: MakePod) -> None:
    run("modprobe", "-a", "macvlan", "ipvlan")
    ip("link", "add", "theirs", "link", pfs[1].netdev, "type", "macvlan")
    try:
        with pytest.raises(NetlinkFailed, match=r"in use otherwise, .* by macvlans"):
            node.do("add", "c1", netns(), mode="ipvlan", master=pfs[1].netdev)
    finally:
        ip("link", "delete", "theirs")


PAUSE_SECONDS = 0.01
"""Between two questions over a bond."""
MOST_SECONDS = 10.0
"""What a lost link may cost, from when the VF's driver tells of it. Far above what is measured, which the test tells:
a busy computer must not fail it, a bond that stays dead must."""
SIOCGIFFLAGS, IFF_RUNNING = 0x8913, 0x40


@pytest.fixture
def pairs(pfs: tuple[Pf, ...], vfs: MakeVfs) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Two VFs of each adapter, as they are again after the test."""
    run("modprobe", "bonding")
    made = tuple(vfs(pf, 2) for pf in pfs)
    before = look(*pfs)
    yield made
    wait_until("the adapters' carrier", lambda: all("LOWER_UP" in link(pf.netdev)["flags"] for pf in pfs))
    wait_until("everything back as it was", lambda: look(*pfs) == before)


def bonded(node: Direct, pod: str, devices: tuple[str, ...], **keys: Any) -> Mapping[str, Any]:
    node.granted[:] = [GrantedDevice(d, "rdma/vf", network({"bond": "active-backup", **keys})) for d in devices]
    answer: Mapping[str, Any] = node.do("add", pod, pod, "eth0", prevResult=CLUSTER)
    return answer


def active(pod: str) -> str:
    """Which VF of net1 carries; empty if none does yet."""
    return str(link("net1", pod)["linkinfo"]["info_data"].get("active_slave", ""))


@contextmanager
def asked(pod: str, peer: str, address: str, port: str) -> Iterator[tuple[list[float], list[float]]]:
    """Ask a peer again and again over UDP. Note when each answer came, and at each look that a port had no link."""

    def bound(name: str, to: str) -> socket.socket:
        def make() -> socket.socket:
            made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            made.bind((to, 7777))
            made.settimeout(PAUSE_SECONDS)
            return made

        with open(f"/run/netns/{name}") as inside:
            return namespaces.run_in(inside.fileno(), make)

    answers, without = list[float](), list[float]()
    done = threading.Event()
    mine, theirs = bound(pod, "0.0.0.0"), bound(peer, "0.0.0.0")

    def answer() -> None:
        while not done.is_set():
            try:
                data, source = theirs.recvfrom(64)
                theirs.sendto(data, source)
            except OSError:
                pass

    def ask() -> None:
        while not done.is_set():
            found = fcntl.ioctl(mine, SIOCGIFFLAGS, struct.pack("16sH14x", port.encode(), 0))
            if not struct.unpack_from("16xH", found)[0] & IFF_RUNNING:
                without.append(time.monotonic())
            try:
                mine.sendto(b"?", (address, 7777))
                mine.recvfrom(64)
                answers.append(time.monotonic())
            except OSError:
                pass
            time.sleep(PAUSE_SECONDS)

    threads = [threading.Thread(target=work) for work in (answer, ask)]
    for thread in threads:
        thread.start()
    try:
        yield answers, without
    finally:
        done.set()
        for thread in threads:
            thread.join()
        mine.close()
        theirs.close()


@pytest.mark.parametrize(("spoofchk", "targets"), [("on", []), ("off", []), ("on", ["10.97.0.2"])])
def test_a_bond_of_two_vfs_goes_on_over_the_other_when_one_loses_its_link(
    node: Direct,
    pfs: tuple[Pf, ...],
    pairs: tuple[tuple[str, ...], ...],
    netns: MakePod,
    spoofchk: str,
    targets: list[str],
) -> None:
    """The PF goes down, and with it its VFs' links. igbvf hears of this when it looks, each two seconds.

    What the bond costs counts from there. QEMU's igbvf hears nothing of a cable that is pulled: only a bond that asks
    its peer does.
    """
    pod, peer = netns(), netns()
    answer = bonded(node, pod, (pairs[0][0], pairs[1][0]), spoofchk=spoofchk, mtu=1400, arpTargets=targets)
    assert [i["name"] for i in answer["interfaces"]] == ["eth0", "net1p0", "net1p1", "net1"]
    shown = link("net1", pod)
    assert shown["linkinfo"]["info_kind"] == "bond"
    data = shown["linkinfo"]["info_data"]
    assert (data["mode"], data["fail_over_mac"]) == ("active-backup", "active")
    assert (data.get("miimon", 0), data.get("arp_interval", 0)) == ((0, 200) if targets else (100, 0))
    wait_until("both VFs' links", lambda: all("LOWER_UP" in link(f"net1p{n}", pod)["flags"] for n in range(2)))
    carrier = 0
    node.granted[:] = [GrantedDevice(pairs[1 - carrier][1], "rdma/peer", network({"mtu": 1400}))]
    node.do("add", peer, peer, "eth0", prevResult=CLUSTER)
    for name, number in ((pod, 1), (peer, 2)):
        node.address(name, f"10.97.0.{number}/24")
    ping(f"/run/netns/{pod}", "10.97.0.2")
    wait_until("a VF that carries", lambda: active(pod))
    ip("-n", pod, "link", "set", "net1", "type", "bond", "active_slave", f"net1p{carrier}")
    ping(f"/run/netns/{pod}", "10.97.0.2")
    node.do("check", pod, pod, "eth0", prevResult=answer)
    macs = [link("net1", pod)["address"]]
    netdev = pfs[carrier].netdev
    pull = partial(cable, carrier, "off") if targets else partial(ip, "link", "set", netdev, "down")
    try:
        with asked(pod, peer, "10.97.0.2", f"net1p{carrier}") as (answers, without):
            wait_until("answers", lambda: len(answers) > 20)
            lost = time.monotonic()
            pull()
            wait_until("the other VF to carry", lambda: active(pod) == f"net1p{1 - carrier}")
            since = len(answers)
            wait_until("answers over the other", lambda: len(answers) > since + 50)
        macs.append(link("net1", pod)["address"])
        whole = max(b - a for a, b in itertools.pairwise(answers) if b > lost)
        gap = whole if targets else next(at for at in answers if at > without[0]) - without[0]
        assert not (targets and without)
        print(f"{spoofchk} {targets}: an answer {gap:.3f} s after the link was lost, {whole:.3f} s after the last one")
        assert gap < MOST_SECONDS
        assert macs[0] != macs[1]
        assert macs == [link(f"net1p{n}", pod)["address"] for n in (carrier, 1 - carrier)]
        node.do("check", pod, pod, "eth0", prevResult=answer)
    finally:
        cable(carrier, "on")
        ip("link", "set", netdev, "up")
    node.do("delete", pod, pod, "eth0")
    node.bring_home(peer, peer, "eth0")
    assert "net1" not in ip("-n", pod, "-brief", "link")


def test_a_bond_that_was_taken_apart_in_the_pod_is_told_and_goes_home(
    node: Direct, pairs: tuple[tuple[str, ...], ...], netns: MakePod
) -> None:
    pod = netns()
    answer = bonded(node, pod, (pairs[0][0], pairs[1][0]), vlan=5, altNames=["storage"])
    assert link("net1", pod)["altnames"] == ["storage"]
    ip("-n", pod, "link", "set", "net1p1", "nomaster")
    with pytest.raises(AttachmentError, match=f"{pairs[1][0]} is no port of net1"):
        node.do("check", pod, pod, "eth0", prevResult=answer)
    ip("-n", pod, "link", "set", "net1", "down", "name", "mine")
    node.bring_home(pod, pod, "eth0")


@pytest.mark.parametrize("namespace", ["lives", "ended"])
def test_a_crash_brings_both_vfs_home(
    pairs: tuple[tuple[str, ...], ...], netns: MakePod, tmp_path: Path, namespace: str
) -> None:
    """The rows alone are left of an ADD that did not end: as after SIGKILL between the bond and the answer."""
    pod = netns()
    with opened(tmp_path, follows=True) as node:
        bonded(node, pod, (pairs[0][0], pairs[1][0]), vlan=5, mtu=1400)
    with sqlite3.connect(tmp_path / "ledger.db") as books:
        books.execute("UPDATE attachments SET state = 'attaching'")
    books.close()
    if namespace == "ended":
        ip("netns", "delete", pod)
    with opened(tmp_path, follows=True) as later:

        def is_healed() -> bool:
            for row in later.ledger.attachments():
                later.attachments.heal(row.device)
            return not later.ledger.attachments()

        wait_until("all rows healed", is_healed)
        assert later.ledger.quarantines() == ()
    if namespace == "lives":
        assert "net1" not in ip("-n", pod, "-brief", "link")
