"""Pods with several interfaces, in one subnet and in several: each address answers on its own interface and MAC."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.hardware import netns as namespaces
from cni.call import GrantedDevice
from tests import asking
from tests.cni import tiny_node
from tests.cni.networks import PREVIOUS, network
from tests.cni.tiny_node import Rig, mac_of, vf

NUMBERS = (1, 2, 3, 4)
"""Of the pod's interfaces, net1 to net4: VFs 0 to 3. VF 4 is outside's."""
ONE = {n: (f"10.9.0.{n}/24", f"fd09::{n}/64") for n in NUMBERS}
FOUR = {n: (f"10.9.{n}.1/24", f"fd09:0:0:{n}::1/64") for n in NUMBERS}
Given = Mapping[int, tuple[str, str]]


@pytest.fixture
def rails(own_network: None, tmp_path: Path) -> Iterator[Rig]:
    tiny_node.create(tmp_path, vfs=5)
    with tiny_node.open_rig(tmp_path) as rig:
        yield rig


def static(*addresses: str, **more: Any) -> dict[str, Any]:
    return {"type": "static", "addresses": [{"address": address} for address in addresses], **more}


def four(rig: Rig, given: Given, **conf: Any) -> Path:
    """Make a pod with four interfaces."""
    pod = rig.pod()
    for n in NUMBERS:
        rig.add("c1", pod, f"net{n}", deviceID=vf(n - 1), ipam=static(*given[n]), **conf)
    return pod


def outside(rig: Rig, given: Given) -> Path:
    """Make somebody who has the last address of each subnet."""
    other = rig.pod("outside")
    last = {
        cidr.rpartition(sep)[0] + sep + f"99/{cidr.partition('/')[2]}"
        for both in given.values()
        for cidr, sep in zip(both, ".:", strict=True)
    }
    rig.add("c2", other, deviceID=vf(4), ipam=static(*sorted(last)))
    return other


def within(pod: Path, work: Any) -> Any:
    descriptor = os.open(pod, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return namespaces.run_in(descriptor, work)
    finally:
        os.close(descriptor)


def own_macs(given: Given, families: slice = slice(0, 2)) -> dict[str, set[str]]:
    return {cidr.partition("/")[0]: {mac_of(n - 1)} for n, both in given.items() for cidr in both[families]}


def asked_for(other: Path, *targets: str) -> Any:
    """Ask outside, by ARP or by NDP, for addresses of the one subnet."""
    source = "10.9.0.99" if "." in targets[0] else "fd09::99"
    return within(other, lambda: asking.who_has("net1", source, targets))


@pytest.mark.parametrize("routing", ["source", "main"])
def test_in_one_subnet_each_interface_answers_for_its_own_addresses_alone(rails: Rig, routing: str) -> None:
    pod, other = four(rails, ONE, routing=routing), outside(rails, ONE)
    for family in (slice(0, 1), slice(1, 2)):
        macs = own_macs(ONE, family)
        assert asked_for(other, *macs) == macs
    assert rails.run_in(pod, "cat", "/proc/sys/net/ipv4/conf/net1/arp_announce").strip() == "2"
    rails.check("c1", pod, "net1")


def test_what_the_network_says_goes_before_what_is_usual_for_several_in_one_subnet(rails: Rig) -> None:
    """And shows what would be so without it: all four answer."""
    pod, other = four(rails, ONE, sysctls={"arp_ignore": 0}), outside(rails, ONE)
    assert asked_for(other, "10.9.0.1") == {"10.9.0.1": {mac_of(n - 1) for n in NUMBERS}}
    rails.check("c1", pod, "net1")


@pytest.mark.parametrize("given", [ONE, FOUR], ids=["one subnet", "four subnets"])
def test_with_source_routing_each_address_answers_through_its_own_interface(rails: Rig, given: Given) -> None:
    pod, other = four(rails, given, routing="source"), outside(rails, given)
    targets = [cidr.partition("/")[0] for both in given.values() for cidr in both]
    assert within(other, lambda: asking.ping("net1", targets)) == own_macs(given)
    for n in NUMBERS:
        rails.check("c1", pod, f"net{n}")


@pytest.mark.parametrize("routing", ["source", "main"])
def test_what_kubelet_gave_comes_by_one_call_and_answers_the_same(rails: Rig, routing: str) -> None:
    pod = rails.pod()
    ipam = {"type": "host-local", "dataDir": str(rails.folder / "leases"), "subnet": "10.9.0.0/24"}
    joined = network(
        {"name": "rails", "routing": routing, "gateway": "none" if routing == "source" else "", "ipam": ipam}
    )
    rails.granted[:] = [GrantedDevice(vf(n - 1), "rdma/vf", joined) for n in NUMBERS]
    answer = rails.add("c1", pod, ifname="eth0", prevResult=PREVIOUS)
    given = {ip["address"].partition("/")[0]: {mac_of(n)} for n, ip in enumerate(answer["ips"][1:])}
    rails.granted.clear()
    other = outside(rails, ONE)
    assert len(given) == 4
    assert asked_for(other, *given) == given
    if routing == "source":
        assert within(other, lambda: asking.ping("net1", tuple(given))) == given
    rails.check("c1", pod, "eth0")


@pytest.mark.parametrize(("filter_of_net4", "answering"), [(None, {"10.9.0.1", "10.9.0.4"}), (0, {"10.9.0.1"})])
def test_several_in_one_subnet_answer_also_where_the_host_filters_strictly(
    rails: Rig, filter_of_net4: int | None, answering: set[str]
) -> None:
    """A pod has `all` from the host, and the higher of it and of the interface's counts: loose before strict."""
    pod = rails.pod()
    rails.run_in(pod, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/conf/all/rp_filter")
    for n in (1, 4):
        said = {"sysctls": {"rp_filter": filter_of_net4}} if n == 4 and filter_of_net4 is not None else {}
        rails.add("c1", pod, f"net{n}", deviceID=vf(n - 1), ipam=static(*ONE[n]), **said)
    other = outside(rails, ONE)
    found = within(other, lambda: asking.ping("net1", sorted(answering | {"10.9.0.1"})))
    assert found.keys() == answering
    if filter_of_net4 is not None:
        assert not within(other, lambda: asking.ping("net1", ["10.9.0.4"], patience=0.5))
