"""Requests for addresses and routes, as pyroute2 reads them. What the kernel makes of them: test_netlink."""

from __future__ import annotations

from typing import Any

import pytest
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg

from agent.hardware.host import Route
from agent.hardware.netlink import address_messages

HEADER = b"\0" * 16


def decoded(kind: type[Any], body: bytes) -> Any:
    """Have pyroute2 read a message body."""
    message = kind(len(HEADER + body).to_bytes(4, "little") + HEADER[4:] + body)
    message.decode()
    return message


def test_an_ipv4_address_says_its_network_and_broadcast() -> None:
    body = address_messages.address(7, "10.1.2.3/24")
    message = decoded(ifaddrmsg, body)
    assert (message["family"], message["prefixlen"], message["index"], message["flags"]) == (2, 24, 7, 0)
    assert {kind: message.get_attr(kind) for kind in ("IFA_LOCAL", "IFA_ADDRESS", "IFA_BROADCAST")} == {
        "IFA_LOCAL": "10.1.2.3",
        "IFA_ADDRESS": "10.1.2.3",
        "IFA_BROADCAST": "10.1.2.255",
    }
    assert body.hex() == "0218000007000000080002000a010203080001000a010203080004000a0102ff"


@pytest.mark.parametrize("cidr", ["10.1.2.3/31", "10.1.2.3/32", "fd00::2/64"])
def test_what_has_no_broadcast_gets_none(cidr: str) -> None:
    assert decoded(ifaddrmsg, address_messages.address(7, cidr)).get_attr("IFA_BROADCAST") is None


def test_an_ipv6_address_may_be_used_at_once() -> None:
    message = decoded(ifaddrmsg, address_messages.address(7, "fd00::2/64"))
    assert (message["family"], message["prefixlen"], message["flags"]) == (10, 64, address_messages.IFA_F_NODAD)
    assert message.get_attr("IFA_LOCAL") == "fd00::2"


@pytest.mark.parametrize(
    ("route", "header", "attributes"),
    [
        (
            Route("0.0.0.0/0", "10.0.0.1"),
            {"family": 2, "dst_len": 0, "table": 254, "proto": 4, "scope": 0, "type": 1, "flags": 0},
            {"RTA_GATEWAY": "10.0.0.1", "RTA_TABLE": 254, "RTA_OIF": 9, "RTA_DST": None, "RTA_PRIORITY": None},
        ),
        (Route("10.9.0.0/16", None), {"dst_len": 16, "scope": 253}, {"RTA_DST": "10.9.0.0", "RTA_GATEWAY": None}),
        (Route("10.9.0.1/16", None), {"dst_len": 16}, {"RTA_DST": "10.9.0.0"}),
        (Route("fd01::/48", None), {"family": 10, "scope": 0}, {"RTA_DST": "fd01::"}),
        (
            Route("10.9.0.0/16", "10.0.0.1", priority=50, table=1000, source="10.0.0.2", onlink=True, protocol=3),
            {"table": 252, "proto": 3, "flags": 4},
            {"RTA_PRIORITY": 50, "RTA_TABLE": 1000, "RTA_PREFSRC": "10.0.0.2"},
        ),
        (Route("10.9.0.0/16", "10.0.0.1", scope=200), {"scope": 200}, {}),
    ],
)
def test_a_route_says_what_is_known_of_it(route: Route, header: dict[str, int], attributes: dict[str, object]) -> None:
    message = decoded(rtmsg, address_messages.route(9, route))
    assert {key: message[key] for key in header} == header
    assert {key: message.get_attr(key) for key in attributes} == attributes


def test_the_metrics_of_a_route_are_nested() -> None:
    metrics = decoded(rtmsg, address_messages.route(9, Route("10.9.0.0/16", None, mtu=1400, advmss=1360)))
    found = metrics.get_attr("RTA_METRICS")
    assert (found.get_attr("RTAX_MTU"), found.get_attr("RTAX_ADVMSS")) == (1400, 1360)


def test_a_gateway_of_the_other_family_is_told_with_its_family() -> None:
    message = decoded(rtmsg, address_messages.route(9, Route("10.9.0.0/16", "fe80::1")))
    assert message.get_attr("RTA_GATEWAY") is None
    assert message.get_attr("RTA_VIA") == {"family": 10, "addr": "fe80::1"}


@pytest.mark.parametrize("text", ["10.1.2/24", "10.1.2.3/33", "nonsense"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        address_messages.address(1, text)
