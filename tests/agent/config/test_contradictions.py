"""Selectors that leave nothing to the next one, whatever the node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config import PfSelector, RailNic, Resource, Select, SriovPool, parse
from agent.config.contradictions import covered, covers
from agent.errors import ConfigError
from tests.agent.config.refused import problems_of


@pytest.mark.parametrize(
    ("wide", "narrow", "expected"),
    [
        (Select(), Select(), True),
        (Select(), Select(vendors=(1,)), True),
        (Select(vendors=(1,)), Select(), False),
        (Select(vendors=(1, 2)), Select(vendors=(1,), drivers=("x",)), True),
        (Select(vendors=(1,)), Select(vendors=(1, 2)), False),
        (Select(is_rdma=True), Select(), False),
        (Select(), Select(is_rdma=True), True),
        (Select(vdpa_type="vhost"), Select(vdpa_type="virtio"), False),
        (Select(need_vhost_net=True), Select(), True),
        (Select(any_of=(Select(vendors=(1,)), Select(vendors=(2,)))), Select(vendors=(2,)), True),
        (Select(vendors=(1,), any_of=(Select(drivers=("x",)),)), Select(drivers=("x",)), False),
        (Select(vendors=(1,)), Select(any_of=(Select(vendors=(1,)), Select(vendors=(2,)))), False),
        (Select(vendors=(1,)), Select(any_of=(Select(vendors=(1,), devices=(3,)), Select(vendors=(1,)))), True),
        (Select(pf=(PfSelector("a"),)), Select(pf=(PfSelector("a", frozenset({1})),)), False),
    ],
)
def test_a_selector_covers_another(wide: Select, narrow: Select, expected: bool) -> None:
    assert covers(wide, narrow) is expected


few = st.frozensets(st.integers(0, 2), max_size=3).map(lambda found: tuple(sorted(found)))
plain = st.builds(Select, vendors=few, devices=few)
selects = st.builds(Select, vendors=few, devices=few, any_of=st.lists(plain, max_size=2).map(tuple))


def takes(select: Select, vendor: int, device: int) -> bool:
    mine = (not select.vendors or vendor in select.vendors) and (not select.devices or device in select.devices)
    return mine and (not select.any_of or any(takes(other, vendor, device) for other in select.any_of))


@given(selects, selects)
def test_what_is_covered_takes_nothing_else(wide: Select, narrow: Select) -> None:
    if covers(wide, narrow):
        for vendor in range(4):
            for device in range(4):
                assert takes(wide, vendor, device) or not takes(narrow, vendor, device)


def test_only_resources_of_one_kind_and_of_our_own_are_compared() -> None:
    pool = SriovPool("intel.com")
    assert list(covered([Resource("a", "vf"), Resource("b", "hca"), Resource("c", "vf", compat=pool)])) == []
    assert list(covered([Resource("a", "vf", compat=pool), Resource("b", "vf")])) == []
    rail = Resource("c", "rail", nic=RailNic("hca"))
    assert list(covered([Resource("a", "gpu"), Resource("b", "hca"), rail])) == [(2, "gpu", 0), (2, "nic.select", 1)]


def test_the_configuration_is_refused_with_both_names() -> None:
    with pytest.raises(ConfigError) as refused:
        parse("resources: [{name: a/b, kind: vf}, {name: a/c, kind: vf, select: {vendors: ['15b3']}}]", "x")
    (problem,) = refused.value.problems
    assert problem.startswith("resources[1].select: selects nothing that resources[0] (a/b) does not select too")


@pytest.mark.parametrize("wrong", ["pf: ens1f0", "vendors: [8086]", "vendorz: ['8086']"])
def test_a_selector_that_could_not_be_read_covers_nothing_and_is_covered_by_nothing(wrong: str) -> None:
    for first, second in ((wrong, "vendors: ['15b3']"), ("vendors: ['15b3']", wrong)):
        text = (
            f"resources: [{{name: a/b, kind: vf, select: {{{first}}}}}, {{name: a/c, kind: vf, select: {{{second}}}}}]"
        )
        with pytest.raises(ConfigError) as refused:
            parse(text, "x")
        (problem,) = refused.value.problems
        assert wrong.partition(":")[0] in problem


def test_networks_upon_one_interface_make_what_it_can_carry_at_once() -> None:
    text = """\
networks:
  - {name: a, mode: ipvlan, master: bond0}
  - {name: b, mode: macvlan, master: bond0}
  - {name: c, mode: ipvlan, master: bond0, ipvlanMode: l3}
  - {name: d, mode: ipvlan, master: bond0}
  - {name: e, mode: macvlan, master: bond1}
"""
    with pytest.raises(ConfigError) as caught:
        parse(text, "test")
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "networks[1].master",
        "networks[2].master",
    ]
    assert "bond0 carries what networks[0] (a) makes, and an interface carries" in caught.value.problems[0]


def test_a_bond_is_made_of_vfs_that_are_spread() -> None:
    text = """\
networks: [{name: pair, bond: active-backup}]
resources:
  - {name: rdma/vf, kind: vf, network: pair, select: {vendors: ["15b3"]}}
  - {name: rdma/filled, kind: vf, network: pair, spread: false, select: {vendors: ["8086"]}}
  - {name: rdma/nic, kind: nic, network: pair, select: {vendors: ["14e4"]}}
"""
    with pytest.raises(ConfigError) as caught:
        parse(text, "test")
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "resources[1].network",
        "resources[2].network",
        "networks[0], for rdma/nic",
    ]
    good = parse("\n".join(text.splitlines()[:3]), "test")
    assert [resource.bonded for resource in good.resources] == [True]


@pytest.mark.parametrize("word", ["rails", "ncclTopo"])
def test_a_file_of_the_pods_network_needs_one(word: str) -> None:
    late = f"{{name: a/b, kind: hca, shares: 1, binding: late, environment: [nccl, {word}]}}"
    (problem,) = problems_of(f"resources: [{late}]")
    assert problem.startswith(f"resources[0].environment: {word} needs network: ")


@pytest.mark.parametrize(
    ("ipam", "gateway", "family"),
    [
        ("{type: host-local, subnet: 10.1.0.0/16}", "fd00::1", 6),
        ("{type: host-local, ranges: [[{subnet: 'fd00::/64'}]]}", "10.1.0.1", 4),
        ("{type: whereabouts, range: 10.1.0.5-10.1.0.9/16}", "[10.1.0.1, 'fd00::1']", 6),
        ("{type: whereabouts, ipRanges: [{range: 'fd00::/64'}]}", "10.1.0.1", 4),
        ("{type: static, addresses: [{address: 10.1.0.5/16}]}", "fd00::1", 6),
        ("{type: dhcp}", "fd00::1", 6),
    ],
)
def test_a_gateway_is_of_a_family_that_the_network_has(ipam: str, gateway: str, family: int) -> None:
    entry = f"name: a, routing: source, ipam: {ipam}"
    (problem,) = problems_of(f"networks: [{{{entry}, gateway: {gateway}}}]")
    assert problem.startswith("networks[0].gateway: ")
    other = 10 - family
    assert f" is of IPv{family}, and ipam gives addresses of IPv{other} alone, so it has no effect: leave" in problem
    parse(f"networks: [{{{entry}, gateway: {'10.1.0.1' if family == 6 else 'fd00::1'}}}]", "test")


@pytest.mark.parametrize(
    "text",
    [
        "networks: [{name: a, routing: source, ipam: {type: ours, subnet: 10.1.0.0/16}, gateway: 'fd00::1'}]",
        "networks: [{name: a, routing: source, ipam: {type: host-local, subnet: 10.1.0.0/16}, gateway: none}]",
        "networks: [{name: a, ipam: {type: dhcp}, gateway: 'fe80::1', routes: [{dst: 'fd00::/8'}]}]",
        """
networks: [{name: a, routing: source, ipam: {type: host-local, subnet: 10.1.0.0/16}, gateway: "fd00::1"}]
resources: [{name: a/b, kind: vf, offer: dra, network: a}]
""",
    ],
    ids=["a plugin that nobody knows", "none", "a route takes it", "claims may bring addresses"],
)
def test_a_gateway_is_let_be_that_may_be_of_use(text: str) -> None:
    parse(text, "test")


@pytest.mark.parametrize(
    ("resource", "problem"),
    [
        (
            "{name: a/b, kind: vf, mounts: [/opt/cray, '/opt/amazon:/opt/cray']}",
            "resources[0].mounts: gives /opt/cray in the container twice: name it once",
        ),
        (
            "{name: a/b, kind: vf, mounts: [/etc/shadow]}",
            "resources[0].mounts[0]: '/etc/shadow': this folder of the host is not allowed; allowed are /usr/lib, ",
        ),
        ("{name: a/b, kind: vf, mounts: [5]}", "resources[0].mounts[0]: must be HOST or HOST:CONTAINER, two absolute"),
        ("{name: a/b, kind: gpu, mounts: [/opt/cray]}", "resources[0].mounts: is for vf, hca, nic, rail, not gpu"),
    ],
)
def test_mounts_that_no_container_can_have_are_refused(resource: str, problem: str) -> None:
    (found,) = problems_of(f"resources: [{resource}]")
    assert found.startswith(problem)
