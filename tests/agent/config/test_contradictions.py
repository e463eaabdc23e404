"""Selectors that leave nothing to the next one, whatever the node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config import PfSelector, RailNic, Resource, Select, SriovPool, parse
from agent.config.contradictions import covered, covers


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
