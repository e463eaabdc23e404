"""What the routing keys of a network make in a pod, what CHECK says of it, and what a VF takes home: nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.errors import AttachmentError
from agent.hardware import netns as namespaces
from cni.call import GrantedDevice
from cni.routing import table_of
from tests import asking
from tests.cni import tiny_node
from tests.cni.networks import PREVIOUS, network
from tests.cni.tiny_node import PF_NETDEV, Rig, mac_of, netdev, vf

ADDRESSES = [{"address": "10.9.0.2/24", "gateway": "10.9.0.1"}, {"address": "fd09::2/64", "gateway": "fd09::1"}]
STATIC = {"type": "static", "addresses": ADDRESSES}
SOURCE: dict[str, Any] = {"routing": "source", "ipam": STATIC}
TABLE = table_of("net1")


def show(rig: Rig, pod: Path, *words: str) -> Any:
    return json.loads(rig.run_in(pod, "ip", "-j", *words) or "[]")


def routes(rig: Rig, pod: Path, table: int | str, *family: str) -> set[tuple[str, str | None]]:
    return {(r["dst"], r.get("gateway")) for r in show(rig, pod, *family, "route", "show", "table", str(table))}


def rules(rig: Rig, pod: Path, *family: str) -> list[tuple[int, str, str]]:
    found = [(r["priority"], r["src"], r["table"]) for r in show(rig, pod, *family, "rule", "show")]
    return [rule for rule in found if rule[2] not in ("local", "main", "default")]


def setting(rig: Rig, pod: Path, name: str, ifname: str = "net1", family: str = "ipv4") -> int:
    return int(rig.run_in(pod, "cat", f"/proc/sys/net/{family}/conf/{ifname}/{name}"))


def test_source_routing_gives_an_interface_a_table_and_its_addresses_rules(rig: Rig) -> None:
    pod = rig.pod()
    answer = rig.add("c1", pod, **SOURCE)
    assert rules(rig, pod) == [(10000, "10.9.0.2", str(TABLE))]
    assert rules(rig, pod, "-6") == [(10000, "fd09::2", str(TABLE))]
    assert routes(rig, pod, TABLE) == {("10.9.0.0/24", None), ("default", "10.9.0.1")}
    assert routes(rig, pod, TABLE, "-6") == {("fd09::/64", None), ("default", "fd09::1")}
    assert "default" not in {destination for destination, _ in routes(rig, pod, "main")}
    assert [setting(rig, pod, name) for name in ("arp_ignore", "arp_announce", "rp_filter")] == [1, 2, 2]
    assert "routes" not in answer
    rig.check("c1", pod)


def test_a_default_route_of_the_ipam_plugin_becomes_the_interfaces_and_not_the_pods(rig: Rig) -> None:
    pod = rig.pod()
    ipam = {**STATIC, "routes": [{"dst": "0.0.0.0/0"}, {"dst": "10.10.0.0/16"}]}
    rig.add("c1", pod, routing="source", ipam=ipam, routes=[{"dst": "10.11.0.0/16", "table": 7}])
    near = ("10.9.0.0/24", None)
    assert routes(rig, pod, "main") == {near, ("10.10.0.0/16", "10.9.0.1")}
    assert routes(rig, pod, TABLE) == {near, ("10.10.0.0/16", "10.9.0.1"), ("default", "10.9.0.1")}
    assert routes(rig, pod, 7) == {("10.11.0.0/16", "10.9.0.1")}
    rig.check("c1", pod)


@pytest.mark.parametrize(
    ("gateway", "found"),
    [("none", None), ("10.9.0.77", "10.9.0.77"), ("10.99.0.1", "10.99.0.1")],
    ids=["none", "another", "one outside of the subnet"],
)
def test_the_network_may_name_another_gateway_or_none(rig: Rig, gateway: str, found: str | None) -> None:
    pod = rig.pod()
    rig.add("c1", pod, **SOURCE, gateway=gateway)
    assert dict(routes(rig, pod, TABLE)).get("default") == found
    rig.check("c1", pod)


def test_routes_rules_and_neighbours_are_made_as_the_network_says(rig: Rig) -> None:
    pod = rig.pod()
    answer = rig.add(
        "c1",
        pod,
        ipam=STATIC,
        routes=[
            {"dst": "10.10.0.0/16", "gw": "10.9.0.5", "src": "10.9.0.2", "mtu": 1300, "priority": 9},
            {"dst": "10.11.0.0/16"},
            {"dst": "fd10::/64", "table": 100},
            {"dst": "10.12.0.0/16", "scope": 253},
        ],
        rules=[{"to": "10.13.0.0/16", "table": 100}, {"fwmark": 7, "table": 101, "priority": 77}],
        neighbours=[{"ip": "10.9.0.5", "mac": "02:00:00:00:00:55"}, {"ip": "FD09::5", "mac": "02:00:00:00:00:66"}],
    )
    (route,) = show(rig, pod, "route", "show", "10.10.0.0/16")
    assert (route["gateway"], route["prefsrc"], route["metric"]) == ("10.9.0.5", "10.9.0.2", 9)
    assert {("10.11.0.0/16", "10.9.0.1"), ("10.12.0.0/16", None)} <= routes(rig, pod, "main")
    assert routes(rig, pod, 100, "-6") == {("fd10::/64", "fd09::1")}
    assert rules(rig, pod) == [(77, "all", "101"), (5000, "all", "100")]
    assert rules(rig, pod, "-6") == [(77, "all", "101")]
    near = {
        (n["dst"], n["lladdr"], *n["state"])
        for n in show(rig, pod, "neighbour", "show", "dev", "net1")
        if "lladdr" in n
    }
    assert {("10.9.0.5", "02:00:00:00:00:55", "PERMANENT"), ("fd09::5", "02:00:00:00:00:66", "PERMANENT")} <= near
    assert [route["dst"] for route in answer["routes"]] == ["10.10.0.0/16", "10.11.0.0/16", "fd10::/64", "10.12.0.0/16"]
    rig.check("c1", pod)


def test_settings_of_both_families_are_set_without_addresses_too(rig: Rig) -> None:
    pod = rig.pod()
    rig.add("c1", pod, sysctls={"arp_notify": 1, "accept_ra": 0, "autoconf": 0})
    assert setting(rig, pod, "arp_notify") == 1
    assert [setting(rig, pod, name, family="ipv6") for name in ("accept_ra", "autoconf")] == [0, 0]
    assert setting(rig, pod, "accept_ra", "lo", "ipv6") == 1
    rig.check("c1", pod)


def test_an_interface_alone_in_its_subnet_is_left_as_it_is(rig: Rig) -> None:
    pod = rig.pod()
    usual = setting(rig, pod, "arp_ignore", "default"), setting(rig, pod, "rp_filter", "default")
    rig.add("c1", pod, ipam=STATIC)
    other = {"type": "static", "addresses": [{"address": "10.8.0.2/24"}]}
    rig.add("c1", pod, "net2", deviceID=vf(1), ipam=other)
    for name in ("net1", "net2"):
        assert (setting(rig, pod, "arp_ignore", name), setting(rig, pod, "rp_filter", name)) == usual


def test_a_second_interface_in_the_subnet_changes_the_first_but_not_what_its_network_says(rig: Rig) -> None:
    pod = rig.pod()
    rig.add("c1", pod, ipam=STATIC, sysctls={"rp_filter": 0})
    beside = {"type": "static", "addresses": [{"address": "10.9.0.3/24"}]}
    rig.add("c1", pod, "net2", deviceID=vf(1), ipam=beside)
    found = {name: [setting(rig, pod, key, name) for key in ("arp_ignore", "rp_filter")] for name in ("net1", "net2")}
    assert found == {"net1": [1, 0], "net2": [1, 2]}
    rig.check("c1", pod)
    rig.check("c1", pod, "net2")


@pytest.mark.parametrize("mode", ["macvlan", "nic"])
def test_other_modes_heed_the_keys_as_well(rig: Rig, mode: str) -> None:
    pod = rig.pod()
    device = {"deviceID": None, "master": PF_NETDEV} if mode == "macvlan" else {"deviceID": "0000:3b:00.0"}
    rig.run_in(Path("/proc/self/ns/net"), "ip", "link", "set", PF_NETDEV, "up")
    rig.add("c1", pod, mode=mode, **device, **SOURCE, sysctls={"arp_notify": 1})
    assert rules(rig, pod) == [(10000, "10.9.0.2", str(TABLE))]
    assert (setting(rig, pod, "arp_notify"), setting(rig, pod, "arp_ignore")) == (1, 1)
    rig.check("c1", pod)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (f"ip rule delete table {TABLE}", f"the rule for table {TABLE} at 10000 is missing"),
        (
            f"ip route delete default table {TABLE}",
            f"the route to 0.0.0.0/0 via 10.9.0.1 by net1 in table {TABLE} is missing",
        ),
        ("ip neighbour delete 10.9.0.5 dev net1", "the neighbour 10.9.0.5 of net1 is missing"),
        ("echo 0 > /proc/sys/net/ipv4/conf/net1/arp_ignore", "net1 has arp_ignore 0, not 1"),
        ("echo 1 > /proc/sys/net/ipv6/conf/net1/accept_ra", "net1 has accept_ra 1, not 0"),
    ],
)
def test_check_tells_what_is_not_as_the_network_says(rig: Rig, command: str, text: str) -> None:
    pod = rig.pod()
    near = [{"ip": "10.9.0.5", "mac": "02:00:00:00:00:55"}]
    rig.add("c1", pod, **SOURCE, neighbours=near, sysctls={"accept_ra": 0})
    rig.check("c1", pod)
    rig.run_in(pod, "sh", "-c", command)
    with pytest.raises(AttachmentError) as caught:
        rig.check("c1", pod)
    assert str(caught.value) == text


def test_a_vf_takes_nothing_of_it_home(rig: Rig) -> None:
    """The kernel makes the settings of an interface anew in each namespace that it comes to (net/ipv4/devinet.c)."""
    pod, home = rig.pod(), Path("/proc/self/ns/net")
    names = ("arp_ignore", "arp_announce", "rp_filter", "arp_notify")

    def at_home() -> list[Any]:
        mine = [setting(rig, home, name, netdev(0)) for name in names]
        six = [setting(rig, home, name, netdev(0), "ipv6") for name in ("accept_ra", "disable_ipv6")]
        return [mine, six, rules(rig, home), rules(rig, home, "-6"), routes(rig, home, "all")]

    before = at_home()
    near = [{"ip": "10.9.0.5", "mac": "02:00:00:00:00:55"}]
    rig.add("c1", pod, **SOURCE, neighbours=near, sysctls={"arp_notify": 1, "accept_ra": 0})
    rig.detach("c1", pod)
    assert at_home() == before
    assert "02:00:00:00:00:55" not in rig.run_in(home, "ip", "neighbour", "show")


def test_an_interface_that_comes_anew_finds_no_rule_of_the_one_before(rig: Rig) -> None:
    """The namespace may live on: one may be unplugged from a running pod, and plugged in anew with another address."""
    pod = rig.pod()
    rig.add("c1", pod, **SOURCE, rules=[{"to": "10.13.0.0/16"}])
    rig.detach("c1", pod)
    assert len(rules(rig, pod)) == 2
    rig.add("c1", pod, routing="source", ipam={"type": "static", "addresses": [{"address": "10.9.0.7/24"}]})
    assert rules(rig, pod) == [(10000, "10.9.0.7", str(TABLE))]
    assert rules(rig, pod, "-6") == []


def test_tables_are_numbered_by_names_and_no_two_alike() -> None:
    names = [f"{kind}{n}" for kind in ("net", "eth", "rail", "ib") for n in range(256)]
    tables = {table_of(name) for name in names}
    assert len(tables) == len(names)
    assert min(tables) > 255
    assert table_of("net1") == TABLE


# -------------------------------------------------------------------------------- pods with several interfaces, in on


NUMBERS = (1, 2, 3, 4)
"""Of the pod's interfaces, net1 to net4: VFs 0 to 3. VF 4 is outside's."""
ONE = {n: (f"10.9.0.{n}/24", f"fd09::{n}/64") for n in NUMBERS}
FOUR = {n: (f"10.9.{n}.1/24", f"fd09:0:0:{n}::1/64") for n in NUMBERS}
Given = Mapping[int, tuple[str, str]]


@pytest.fixture
def rails(own_network: None, tmp_path: Path) -> Iterator[Rig]:
    with tiny_node.open_rig(tmp_path, vfs=5) as rig:
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
