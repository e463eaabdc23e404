"""A pod with four VFs: each of its addresses answers on its own interface and MAC, and the VFs take nothing home."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent.hardware import netns as namespaces
from tests import asking
from tests.vm.adapters import MakePod, MakeVfs, Pf, ip, link, netdevs
from tests.vm.direct import Direct, look, opened

IFNAMES = ("net1", "net2", "net3", "net4")
"""Of the pod: VFs 0 and 1 of both adapters."""
ONE = {f"net{n}": (f"10.9.0.{n}/24", f"fd09::{n}/64") for n in range(1, 5)}
FOUR = {f"net{n}": (f"10.9.{n}.1/24", f"fd09:0:0:{n}::1/64") for n in range(1, 5)}
QUIET = 1.0
"""Seconds: the emulated processor takes its time."""


@pytest.fixture(scope="module")
def full(pfs: tuple[Pf, ...], vfs: MakeVfs) -> tuple[Pf, ...]:
    for pf in pfs:
        vfs(pf, 3)
    return pfs


@pytest.fixture
def direct(full: tuple[Pf, ...], tmp_path: Path) -> Iterator[Direct]:
    with opened(tmp_path) as parts:
        yield parts


def settings(address: str) -> list[str]:
    """Read what a pod's network sets, of a VF in the host."""
    (name,) = netdevs(address)
    folders = [Path("/proc/sys/net", family, "conf", name) for family in ("ipv4", "ipv6")]
    names = ("arp_ignore", "arp_announce", "rp_filter"), ("accept_ra", "disable_ipv6")
    return [(folder / key).read_text() for folder, keys in zip(folders, names, strict=True) for key in keys]


def last_of(cidr: str) -> str:
    address, _, length = cidr.partition("/")
    sep = ":" if ":" in address else "."
    return f"{address.rpartition(sep)[0]}{sep}99/{length}"


def within(pod: str, work: Callable[[], Any]) -> Any:
    descriptor = os.open(f"/run/netns/{pod}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return namespaces.run_in(descriptor, work)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("given", [ONE, FOUR], ids=["one subnet", "four subnets"])
def test_every_address_answers_on_its_own_interface_and_mac(
    full: tuple[Pf, ...], direct: Direct, netns: MakePod, given: Mapping[str, tuple[str, str]]
) -> None:
    devices = [address for index in range(2) for address in (pf.vfs()[index] for pf in full)]
    before = look(*full), [settings(address) for address in devices]
    pod, outside = netns(), netns()
    for ifname, device in zip(IFNAMES, devices, strict=True):
        addresses = [{"address": address} for address in given[ifname]]
        ipam = {"type": "static", "addresses": addresses}
        direct.add("c1", pod, device, ifname, routing="source", ipam=ipam, sysctls={"accept_ra": 0})
    others = sorted({last_of(cidr) for both in given.values() for cidr in both})
    ipam = {"type": "static", "addresses": [{"address": address} for address in others]}
    direct.add("c2", outside, full[1].vfs()[2], ipam=ipam)

    expected = {cidr.partition("/")[0]: {link(name, pod)["address"]} for name, both in given.items() for cidr in both}
    for cidr in others:  # as arping does
        length = cidr.partition("/")[2]
        near = [t for t in expected if last_of(f"{t}/{length}") == cidr]
        found = within(outside, partial(asking.who_has, "net1", cidr.partition("/")[0], near, QUIET))
        assert found == {target: expected[target] for target in near}
    assert within(outside, partial(asking.ping, "net1", tuple(expected), QUIET)) == expected
    for ifname, both in given.items():
        for cidr in both:  # as ping does that is told its source
            to, source = last_of(cidr).partition("/")[0], cidr.partition("/")[0]
            assert f"dev {ifname} " in ip("-n", pod, "route", "get", to, "from", source)
        direct.check("c1", pod, ifname)

    direct.delete("c1", pod, *IFNAMES)
    direct.delete("c2", outside)
    assert (direct.ledger.attachments(), direct.ledger.quarantines()) == ((), ())
    assert (look(*full), [settings(address) for address in devices]) == before
