"""The keys of a network about routes, rules, neighbours and settings: what they become, what is said of wrong ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent.config.networks import Setup, network_of_keys
from agent.config.routing import NO_ROUTING, SYSCTLS, Routing
from agent.errors import RequestInvalid

ALL: dict[str, Any] = {
    "routing": "source",
    "gateway": ["10.1.0.1", "fd01::1"],
    "routes": [
        {"dst": "10.0.0.0/8", "gw": "10.1.0.9", "src": "10.1.0.2", "priority": 7, "mtu": 1400, "onlink": True},
        {"dst": "fd00::/16", "table": 100, "advmss": 1200, "scope": 0},
        {"dst": "10.9.0.0/16"},
    ],
    "rules": [
        {"to": "10.9.0.0/16", "table": 100, "priority": 1},
        {"from": "fd01::2", "fwmark": 7, "iif": "eth0", "oif": "net1"},
    ],
    "neighbours": [{"ip": "10.1.0.9", "mac": "02:00:00:00:00:0A"}],
    "sysctls": {"arp_ignore": 8, "accept_ra": 0},
}


def read(*, has_addresses: bool = True, **keys: Any) -> Routing:
    ipam = {"ipam": {"type": "static"}} if has_addresses else {}
    return network_of_keys({**ipam, **keys}).setup.routing


def test_every_key_is_read() -> None:
    found = read(**ALL)
    assert (found.by_source, found.gateways) == (True, ("10.1.0.1", "fd01::1"))
    assert found.routes == tuple(ALL["routes"])
    assert found.rules == (
        {"to": "10.9.0.0/16", "table": 100, "priority": 1},
        {"from": "fd01::2", "fwmark": 7, "iif": "eth0", "oif": "net1", "priority": 5000},
    )
    assert found.neighbours == ({"ip": "10.1.0.9", "mac": "02:00:00:00:00:0a"},)
    assert found.sysctls == {"arp_ignore": 8, "accept_ra": 0}


def test_what_the_books_keep_reads_as_it_was() -> None:
    found = read(**ALL)
    assert Routing.from_document(json.loads(json.dumps(found.document()))) == found
    assert (NO_ROUTING.document(), Routing.from_document({})) == ({}, NO_ROUTING)


def test_a_network_that_says_nothing_of_it_has_the_one_value_that_says_nothing() -> None:
    """By which a pod's start knows that there is nothing to do."""
    assert Setup().routing is NO_ROUTING


@pytest.mark.parametrize(
    ("gateway", "found"),
    [("10.1.0.1", ("10.1.0.1",)), ("none", ()), (["fd01::1"], ("fd01::1",)), ("", None), (None, None)],
)
def test_a_gateway_may_be_one_or_none_or_left_to_the_ipam_plugin(gateway: Any, found: Any) -> None:
    assert read(routing="source", gateway=gateway).gateways == found


@pytest.mark.parametrize("name", SYSCTLS)
def test_each_setting_may_be_what_it_may_be(name: str) -> None:
    for value in SYSCTLS[name]:
        assert read(sysctls={name: value}).sysctls == {name: value}
    with pytest.raises(RequestInvalid, match=rf"sysctls\.{name} must be 0 or 1.*, is 9"):
        read(sysctls={name: 9})
