"""All that is wrong with a network is listed at once, and what other projects' keys and stray templates mean here."""

from __future__ import annotations

import pytest

from agent.config.compat.keys import OF_OTHER_PLUGINS
from tests.agent.config.refused import problems_of

WRONG = """
networks:
  - name: rails
    ifName: [{rail}]
    mtu: abc
    vlan: 9999
    vlanQoS: 9
    vfio: maybe
    spoofchk: 7
    trunk: [x, 5000]
    foo: 1
    ipam: {type: bridge}
    routing: sauce
    gateway: [10.0.0.1, 10.0.0.2]
    routes: [{dst: x}, {gw: 10.0.0.1, bar: 1}]
    rules: [{from: nowhere}, {table: 255}]
    neighbours: [{ip: 10.0.0.9}]
    sysctls: {a: 1, arp_ignore: 9}
"""


def test_each_key_of_a_network_that_is_wrong_is_named_in_one_go() -> None:
    found = [problem.removeprefix("networks[0]").lstrip(":. ") for problem in problems_of(WRONG)]
    named = [problem.partition(" ")[0].rstrip(":") for problem in found]
    assert named == [
        *("ifName[0]", "ipam.type", "vlan", "vlanQoS", "spoofchk", "mtu", "trunk[0]", "trunk[1]", "vfio"),
        *("routing", "routes[0].dst", "routes[1].dst", "routes[1].bar", "gateway"),
        *("rules[0].from", "rules[0].table", "rules[1]", "rules[1].table"),
        *("neighbours[0].mac", "sysctls.a", "sysctls.arp_ignore", "ifName", "foo"),
    ]


def test_templates_that_are_not_understood_hide_nothing_else() -> None:
    text = 'networks: [{name: a, ifName: "x{ril}", vlan: "{rail-1}", gateway: "10.{pf*2}.0.1", mtu: 1}]'
    found = "\n".join(problems_of(text))
    for part in ("{ril}, which stands for nothing", "{rail-1}, which is not understood", "{pf}, which is a name"):
        assert part in found
    assert "networks[0]: mtu must be a whole number from 68" in found
    assert "vlan must" not in found


def test_all_keys_that_a_mode_does_not_heed_are_named() -> None:
    assert len(problems_of("networks: [{name: a, mode: nic, trust: on, vlan: 5, macvlanMode: vepa}]")) == 3


@pytest.mark.parametrize(
    "text",
    [
        "resources: [{name: a/b, kind: vf, network: {rail}}]",
        'resources: [{name: a/b, kind: vf, network: "net-{rail}"}]',
        "resources: [{name: a/b, kind: vf, network: {ens1: {rail}}}]",
        "resources: [{name: a/b, kind: vf, select: {pf: [{pf}]}}]",
        "topology: {rails: [{pf}]}",
        "networks: [{name: {rail}}]",
    ],
)
def test_a_template_where_none_is_understood_is_told_where_it_would_be(text: str) -> None:
    assert problems_of(text)[0].endswith("understood in the texts of an entry of `networks` only, in quotes")


@pytest.mark.parametrize(
    "text",
    [
        "resources: [{name: a/b, kind: vf, network: net-{rail}}]",
        "networks: [{name: a, ifName: [net{rail}]}]",
        "networks: [{name: a, gateway: 10.{rail}.0.1, ifName: r{rail}}]",
        "networks: [{name: a, ifName: {rail}{vf}}]",
        "networks: [{name: a, altNames: [{rail}]}]",
    ],
)
def test_a_template_in_a_flow_mapping_needs_quotes_too(text: str) -> None:
    (problem,) = problems_of(text)
    assert "put the text in quotes" in problem


@pytest.mark.parametrize("key", OF_OTHER_PLUGINS)
@pytest.mark.parametrize(
    "text",
    ["%s: x", "resources: [{name: a/b, kind: vf, %s: x}]", "resources: [{name: a/b, kind: vf, select: {%s: x}}]"],
)
def test_a_key_of_another_plugins_file_says_what_to_write_and_that_its_file_is_read_as_well(
    text: str, key: str
) -> None:
    (problem,) = problems_of(text % key)
    assert f"{key}: is a key of " in problem
    assert "-config" in problem


def test_a_pool_that_was_copied_says_first_what_to_write_instead_of_its_keys() -> None:
    found = problems_of("resources: [{resourceName: vf, deviceType: netDevice, selectors: {pfNames: [a]}, slect: {}}]")
    said = [problem.removeprefix("resources[0].").partition(" of ")[0] for problem in found]
    assert said == [
        *(
            "resourceName: is a key",
            "deviceType: is a key",
            "selectors: is a key",
            "name: is missing",
            "kind: is missing",
        )
    ]


def test_foreign_keys_are_not_among_those_that_are_known() -> None:
    *_, problem = problems_of("resources: [{name: a/b, kind: vf, resourceName: x, resorceName: x}]")
    assert "resources[0].resorceName: is not a known key here; known are: " in problem
    assert "resourceName" not in problem
