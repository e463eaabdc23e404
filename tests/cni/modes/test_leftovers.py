"""All that a pod may do to an interface that a move does not undo: put back, and read again."""

from __future__ import annotations

import struct
import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.errors import HardwareError
from agent.hardware import netns as namespaces
from agent.hardware import tcx
from agent.hardware.host import Link, LinkChange
from agent.hardware.netlink import rtnetlink
from agent.hardware.netlink.links import Netlink
from hack.sim.fabric import device_of
from tests.cni.modes.programs import (
    BPF_PROG_TYPE_SCHED_CLS,
    BPF_PROG_TYPE_XDP,
    BPF_XDP,
    attach,
    attached,
    exchange,
    hold,
    loaded,
)
from tests.cni.tiny_node import Rig, netdev, open_rig, vf
from tests.waiting import until

XDP_FLAGS_SKB_MODE = 2
LONG = "enP57949s1f0npf0vf12"
"""Longer than a name may be, as those of udev often are."""


def seen(rig: Rig) -> Link:
    link = rig.home()
    return replace(link, ifindex=0, carrier=False)


@pytest.mark.parametrize(
    ("before", "change"),  # of the VF in the host, and of net1 in the pod
    [
        ("", "link set net1 promisc on"),
        ("", "link set net1 allmulticast on"),
        ("", "link set net1 arp off"),
        ("", "link set net1 multicast off"),
        ("", "link set net1 broadcast 02:00:00:00:00:98"),
        ("", "link set net1 mode dormant"),
        ("", "link set net1 mtu 1234"),
        ("", "link set net1 address 02:00:00:00:00:99"),
        ("", "link set net1 down"),
        ("", "link set net1 down\nlink set net1 name mine"),
        ("", "link property add dev net1 altname mine"),
        ("", f"link property add dev net1 altname {netdev(0)}"),
        ("", f"link property add dev net1 altname {netdev(1)}"),
        ("set {} up promisc on", "link set net1 promisc off"),
        ("set {} arp off multicast off", "link set net1 arp on multicast on"),
        (f"property add dev {{}} altname {LONG}", f"link property del dev net1 altname {LONG}"),
        ("property add dev {} altname net1", "link set net1 mtu 1234"),
    ],
)
def test_what_a_pod_changed_is_as_it_was(rig: Rig, before: str, change: str) -> None:
    if before:
        subprocess.run(["ip", "link", *before.format(netdev(0)).split()], check=True)
    pod, link = rig.pod(), seen(rig)
    rig.add("c1", pod)
    for line in change.splitlines():
        rig.run_in(pod, "ip", *line.split())
    rig.detach("c1", pod)
    assert (seen(rig), rig.ledger.quarantines()) == (link, ())


@pytest.mark.parametrize("namespace_ends", [False, True], ids=["moved", "left alone"])
def test_names_that_a_pod_gave_are_gone_whatever_their_bytes(rig: Rig, namespace_ends: bool) -> None:
    """The kernel takes any (net/core/rtnetlink.c, rtnl_alt_ifname)."""
    pod, before = rig.pod(), seen(rig)
    rig.add("c1", pod)
    for name in ("no\udcff\udcfetext", "second\nline", "50%d"):
        with open(pod) as netns:
            rig.machine.links.change_altnames(rig.link(pod), add=(name,), netns=netns.fileno())
    link = rig.link(pod)
    assert len(link.altnames) == 3
    if namespace_ends:  # where an interface of hardware keeps its other names
        with open(pod) as netns:
            rig.machine.links.move_out(link, netns.fileno(), LinkChange())
        rig.remove(pod)
    rig.delete("c1", None if namespace_ends else pod)
    rig.await_healed() if namespace_ends else rig.await_back()
    assert (seen(rig), rig.ledger.quarantines()) == (before, ())


def test_queueing_disciplines_addresses_and_routes_end_with_the_move(rig: Rig) -> None:
    pod = rig.pod()
    rig.add("c1", pod)
    rig.run_in(
        pod, "tc", "qdisc", "add", "dev", "net1", "root", "tbf", "rate", "1mbit", "burst", "10k", "latency", "9ms"
    )
    rig.run_in(pod, "tc", "qdisc", "add", "dev", "net1", "clsact")
    rig.run_in(pod, "ip", "address", "add", "10.0.0.2/24", "dev", "net1")
    rig.run_in(pod, "ip", "neighbour", "add", "10.0.0.3", "lladdr", "02:00:00:00:00:03", "dev", "net1")
    rig.detach("c1", pod)
    for what in (("tc", "qdisc"), ("ip", "address"), ("ip", "route"), ("ip", "neighbour")):
        shown = subprocess.run([*what, "show", "dev", netdev(0)], check=True, capture_output=True, text=True).stdout
        assert not {"tbf", "clsact", "10.0.0.2", "10.0.0.3"} & set(shown.replace("/", " ").split())


def attach_xdp(pod: Path, program: int) -> None:
    """Attach a program to net1 as `ip link set xdp` does."""

    def attach() -> None:
        with rtnetlink.NetlinkSocket() as links:
            link = links.find("net1")
            assert link is not None
            content = rtnetlink.attribute(1, struct.pack("=i", program)) + rtnetlink.word(3, XDP_FLAGS_SKB_MODE)
            xdp = rtnetlink.attribute(rtnetlink.IFLA_XDP | rtnetlink.NLA_F_NESTED, content)
            links.ask(rtnetlink.RTM_NEWLINK, 0, rtnetlink.link_body(link.ifindex) + xdp)

    with open(pod) as netns:
        namespaces.run_in(netns.fileno(), attach)


def test_an_xdp_program_survives_a_move_and_is_detached(rig: Rig) -> None:
    pod, before = rig.pod(), seen(rig)
    rig.add("c1", pod)
    with loaded() as program:
        attach_xdp(pod, program)
    link = rig.link(pod)
    assert link.xdp
    rig.detach("c1", pod)
    assert (seen(rig), rig.ledger.quarantines()) == (before, ())


HOOKS = pytest.mark.parametrize(
    ("kind", "where", "word"),
    [
        (BPF_PROG_TYPE_XDP, BPF_XDP, "XDP"),
        (BPF_PROG_TYPE_SCHED_CLS, tcx.BPF_TCX_INGRESS, "tcx"),
        (BPF_PROG_TYPE_SCHED_CLS, tcx.BPF_TCX_EGRESS, "tcx"),
    ],
    ids=["XDP", "ingress", "egress"],
)


@HOOKS
def test_a_link_that_a_process_of_the_pod_may_hold_keeps_the_vf_back(
    rig: Rig, kind: int, where: int, word: str
) -> None:
    pod, before = rig.pod(), seen(rig)
    rig.add("c1", pod)
    link = rig.link(pod)
    with loaded(kind) as program, hold(pod, link.ifindex, program, where):
        rig.delete("c1", pod)
        assert word in rig.await_withheld()
        with pytest.raises(HardwareError):  # it still may
            rig.attachments.heal(vf(0))
    until(lambda: rig.attachments.heal(vf(0)) is not None)
    assert (seen(rig), rig.ledger.quarantines(), rig.ledger.attachments()) == (before, (), ())


@HOOKS
def test_a_link_that_outlives_the_pods_namespace_is_the_hosts_and_stays(
    rig: Rig, kind: int, where: int, word: str
) -> None:
    pod = rig.pod()
    rig.add("c1", pod)
    link = rig.link(pod)
    with loaded(kind) as program, hold(pod, link.ifindex, program, where):
        rig.delete("c1", pod)  # which brings it to the host
        rig.await_withheld()
        rig.remove(pod)
        assert rig.attachments.heal(vf(0)) is not None
        assert (rig.ledger.quarantines(), rig.ledger.attachments()) == ((), ())
        assert carried(rig)


def carried(rig: Rig) -> bool:
    """Tell whether the VF has any program."""
    link = rig.home()
    return bool(link.xdp or attached(link.ifindex))


def test_a_link_of_the_host_that_changed_its_program_while_the_pod_ran_is_spared(rig: Rig) -> None:
    link = rig.home()
    pod = rig.pod()
    with (
        loaded(BPF_PROG_TYPE_SCHED_CLS) as old,
        loaded(BPF_PROG_TYPE_SCHED_CLS) as new,
        hold(None, link.ifindex, old, tcx.BPF_TCX_INGRESS) as held,
    ):
        before = attached(link.ifindex)
        rig.add("c1", pod)
        exchange(held, new)
        rig.detach("c1", pod)
        link = rig.home()
        (after,) = attached(link.ifindex)
        assert (rig.ledger.quarantines(), after.link) == ((), before[0].link)
        assert after.program != before[0].program


def test_a_link_does_not_keep_the_pods_other_programs_on_the_vf(rig: Rig) -> None:
    pod = rig.pod()
    rig.add("c1", pod)
    link = rig.link(pod)
    with (
        loaded(BPF_PROG_TYPE_SCHED_CLS) as first,
        loaded(BPF_PROG_TYPE_SCHED_CLS) as second,
        hold(pod, link.ifindex, first, tcx.BPF_TCX_INGRESS),
    ):
        attach(pod, link.ifindex, second, tcx.BPF_TCX_INGRESS)
        rig.delete("c1", pod)
        rig.await_withheld()
        home = rig.home()
        assert [bool(found.link) for found in attached(home.ifindex)] == [True]


@pytest.mark.parametrize("side", [tcx.BPF_TCX_INGRESS, tcx.BPF_TCX_EGRESS])
def test_a_tcx_program_of_the_pod_is_detached_and_one_of_the_host_is_not(rig: Rig, side: int) -> None:
    before = rig.home()
    with loaded(BPF_PROG_TYPE_SCHED_CLS) as program:
        attach(None, before.ifindex, program, side)
    own = attached(before.ifindex)
    assert len(own) == 1
    pod = rig.pod()
    rig.add("c1", pod)
    link = rig.link(pod)
    with open(pod) as netns, loaded(BPF_PROG_TYPE_SCHED_CLS) as program:
        attach(pod, link.ifindex, program, side)
        assert len(namespaces.run_in(netns.fileno(), lambda: attached(link.ifindex))) == 2
    rig.detach("c1", pod)
    after = rig.home()
    assert (attached(after.ifindex), rig.ledger.quarantines()) == (own, ())


class Slow(Netlink):
    """An interface whose driver does what it is told a little later, as iavf does with a MAC."""

    def __init__(self, device_of: Any, held: int) -> None:
        super().__init__(device_of)
        self.held = held
        self.later: list[tuple[Link, LinkChange, int | None]] = []

    def move_in(self, link: Link, netns: int, change: LinkChange) -> None:
        super().move_in(link, netns, replace(change, mac=None))
        self.later.append((link, LinkChange(mac=change.mac), netns))

    def find(self, name: str, netns: int | None = None) -> Link | None:
        link = super().find(name, netns)
        if self.later and link is not None:
            self.held -= 1
            if self.held <= 0:
                super().change(link, self.later.pop()[1], netns)
        return link


class Deaf(Netlink):
    """An interface whose driver says that it has done what it has not."""

    times = 0
    """How often it will yet do so with an MTU."""

    def move_out(self, link: Link, netns: int, change: LinkChange) -> None:
        super().move_out(link, netns, self._heard(change))

    def change(self, link: Link, change: LinkChange, netns: int | None = None) -> None:
        super().change(link, self._heard(change), netns)

    def _heard(self, change: LinkChange) -> LinkChange:
        if change.mtu is None or not self.times:
            return change
        self.times -= 1
        return replace(change, mtu=None)


def test_what_the_driver_only_says_to_have_put_back_is_seen(own_network: None, tmp_path: Path) -> None:
    with closing(Deaf(device_of)) as links, open_rig(tmp_path, host=lambda m: replace(m, links=links)) as rig:
        pod, before = rig.pod(), seen(rig)
        rig.add("c1", pod, mtu=1400)
        links.times = 3
        rig.detach("c1", pod)
        assert (seen(rig), links.times, rig.ledger.quarantines()) == (before, 0, ())
        rig.add("c1", pod, mtu=1400)
        links.times = 1 << 30
        rig.delete("c1", pod)
        assert "came back with mtu 1400, not 1500" in rig.await_withheld()
        links.times = 0
        assert rig.attachments.heal(vf(0)) == "half-detaching"
        assert (seen(rig), rig.ledger.quarantines()) == (before, ())


@pytest.mark.parametrize("held", [3, 100_000], ids=["soon", "never"])
def test_a_mac_that_the_driver_sets_later_is_waited_for(own_network: None, tmp_path: Path, held: int) -> None:
    with closing(Slow(device_of, held)) as links, open_rig(tmp_path, host=lambda m: replace(m, links=links)) as rig:
        pod, before = rig.pod(), seen(rig)
        if held > 100:
            with pytest.raises(HardwareError, match="was given the MAC 02:00:00:00:00:77 without an error but has"):
                rig.add("c1", pod, mac="02:00:00:00:00:77")
            assert seen(rig) == before
            return
        rig.add("c1", pod, mac="02:00:00:00:00:77")
        link = rig.link(pod)
        assert link.mac == "02:00:00:00:00:77"
