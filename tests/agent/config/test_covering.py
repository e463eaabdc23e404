"""Selectors that leave nothing to the next one, whatever the node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config import PfSelector, RailNic, Resource, Select, SriovPool, parse
from agent.config.covering import covered, covers
from agent.errors import ConfigError


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
