"""All that is wrong with a network is listed at once, and what other projects' keys and stray templates mean here."""

from __future__ import annotations

import pytest

from agent.config.gone import OF_OTHER_PLUGINS
from tests.agent.config.refused import problems_of


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


def test_foreign_keys_are_not_among_those_that_are_known() -> None:
    *_, problem = problems_of("resources: [{name: a/b, kind: vf, resourceName: x, resorceName: x}]")
    assert "resources[0].resorceName: is not a known key here; known are: " in problem
    assert "resourceName" not in problem
