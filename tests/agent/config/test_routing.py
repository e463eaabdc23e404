"""The keys of a network about routes, rules, neighbours and settings: what they become, what is said of wrong ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent.config.networks import Setup
from agent.config.routing import KEYS, NO_ROUTING, SYSCTLS, Routing, read_routing
from agent.errors import RequestInvalid
from agent.model.fields import Fields

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
    fields = Fields(keys)
    found = read_routing(fields, has_addresses=has_addresses)
    assert fields.asked == set(KEYS)
    return found


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


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"routing": "policy"}, "routing must be source or main, is 'policy'"),
        (
            {"routing": "source", "has_addresses": False},
            "routing: source is about addresses, and none are given: say ipam",
        ),
        ({"routing": "source", "gateway": "10.1.0"}, "gateway must be an IP address, a list of one for each family"),
        ({"routing": "source", "gateway": ["10.1.0.1", "10.1.0.2"]}, "gateway must be an IP address, a list of one"),
        ({"gateway": "10.1.0.1"}, "gateway has no effect without routing: source, or a route that lacks gw"),
        ({"routes": {}}, "routes must be a list of at most 64 objects, is {}"),
        ({"routes": [{}]}, r"routes\[0\]\.dst is missing: it must be a network such as 10\.0\.0\.0/8"),
        ({"routes": [{"dst": "10.0.0.1/8"}]}, r"routes\[0\]\.dst must be a network such as .*, is '10\.0\.0\.1/8'"),
        ({"routes": [{"dst": "10.0.0.0/8", "gw": "fd00::1"}]}, r"routes\[0\]\.gw must be an address of dst's family"),
        (
            {"routes": [{"dst": "10.0.0.0/8", "metric": 7}]},
            r"routes\[0\]\.metric is not a known key; known are: .*prio",
        ),
        ({"routes": [{"dst": "10.0.0.0/8", "onlink": True}]}, r"routes\[0\]\.onlink is about a gateway: say gw, too"),
        ({"routes": [{"dst": "10.0.0.0/8", "table": 255}]}, r"routes\[0\]\.table must not be 255"),
        ({"rules": [{"table": 100}]}, r"rules\[0\] must say which packets it is about: from, to, iif, oif or fwmark"),
        ({"rules": [{"from": "10.0.0.1"}]}, r"rules\[0\]\.table is missing: only with routing: source"),
        ({"rules": [{"from": "10.0.0.1", "to": "fd00::1", "table": 1}]}, r"rules\[0\]\.to must be of from's family"),
        ({"rules": [{"from": "10.0.0.1/8", "table": 1}]}, r"rules\[0\]\.from must be a network or an address"),
        ({"rules": [{"from": "10.0.0.1", "table": 1, "priority": 0}]}, r"rules\[0\]\.priority must be a whole number"),
        ({"neighbours": [{"ip": "10.0.0.1"}]}, r"neighbours\[0\]\.mac is missing: it must be a MAC address"),
        ({"neighbours": [{"ip": "10.0.0.1", "mac": "02:00"}]}, r"neighbours\[0\]\.mac must be a MAC address"),
        ({"sysctls": {"ip_forward": 1}}, r"sysctls\.ip_forward is not a known setting; known are: .*arp_filter"),
        ({"sysctls": {"rp_filter": True}}, r"sysctls\.rp_filter must be 0 or 1 or 2, is True"),
    ],
)
def test_what_is_wrong_is_told_with_its_path(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestInvalid, match=text):
        read(**keys)
