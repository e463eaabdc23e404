"""CNI results: in the shape of each version, and checked where they come from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent.errors import RequestInvalid
from agent.hardware.host import Route
from cni import result
from cni.netconf import SUPPORTED_VERSIONS
from cni.result import Leases

NET1 = {
    "name": "net1",
    "mac": "02:00:00:00:00:01",
    "mtu": 9000,
    "sandbox": "/var/run/netns/x",
    "pciID": "0000:3b:00.2",
}
LEASES = Leases(
    ips=(
        {"address": "10.0.0.2/24", "gateway": "10.0.0.1", "version": "4", "interface": 7},
        {"address": "fd00::2/64"},
    ),
    routes=({"dst": "10.1.0.0/16"}, {"dst": "fd01::/64", "gw": "fd00::9"}),
    dns={"nameservers": ["10.0.0.9"]},
)
PREVIOUS: dict[str, Any] = {
    "cniVersion": "0.4.0",
    "interfaces": [{"name": "cbr0"}, {"name": "eth0", "sandbox": "/var/run/netns/x"}],
    "ips": [{"interface": 1, "address": "192.168.0.2/24", "gateway": "192.168.0.1"}],
    "routes": [{"dst": "0.0.0.0/0"}],
    "dns": {"nameservers": ["192.168.0.9"]},
}


def test_the_resolver_of_the_pods_first_network_wins() -> None:
    assert result.build("1.0.0", PREVIOUS, [(NET1, LEASES)])["dns"] == {"nameservers": ["192.168.0.9"]}
    assert result.build("1.0.0", {**PREVIOUS, "dns": {}}, [(NET1, LEASES)])["dns"] == {"nameservers": ["10.0.0.9"]}


@pytest.mark.parametrize("key", ["interfaces", "ips", "routes", "dns"])
def test_a_previous_result_may_hold_null(key: str) -> None:
    made = result.build("1.0.0", {**PREVIOUS, key: None}, [(NET1, LEASES)])
    assert made["interfaces"][-1]["name"] == "net1"
    assert made["ips"][-1]["interface"] == len(made["interfaces"]) - 1


def test_a_route_without_a_gateway_takes_the_one_of_its_family() -> None:
    leases = Leases(
        ips=(
            {"address": "10.0.0.2/24", "gateway": "10.0.0.1"},
            {"address": "10.0.5.2/24", "gateway": "10.0.5.1"},
            {"address": "fd00::2/64"},
        ),
        routes=({"dst": "0.0.0.0/0"}, {"dst": "10.9.0.0/16", "gw": "10.0.5.9"}, {"dst": "::/0"}),
    )
    assert leases.kernel_routes() == (
        Route("0.0.0.0/0", "10.0.0.1"),
        Route("10.9.0.0/16", "10.0.5.9"),
        Route("::/0", None),
    )
    assert leases.addresses == ("10.0.0.2/24", "10.0.5.2/24", "fd00::2/64")


def test_what_1_1_says_of_a_route_reaches_the_kernel() -> None:
    leases = Leases(
        ips=({"address": "10.0.0.2/24", "gateway": "10.0.0.1"},),
        routes=(
            {"dst": "10.9.0.0/16", "mtu": 1300, "advmss": 1200, "priority": 5, "table": 100, "scope": 0},
            {"dst": "10.8.0.0/16", "scope": 253},
        ),
    )
    assert leases.kernel_routes() == (
        Route("10.9.0.0/16", "10.0.0.1", mtu=1300, advmss=1200, priority=5, table=100, scope=0),
        Route("10.8.0.0/16", None, scope=253),
    )


GOLDEN = Path(__file__).with_name("results")
FULL = json.loads((GOLDEN / "1.1.0.json").read_text())
FULL_PREVIOUS: dict[str, Any] = {
    "cniVersion": "1.1.0",
    "interfaces": [
        {"name": "cbr0", "mac": "02:00:00:00:00:10", "mtu": 1400},
        {
            "name": "eth0",
            "mac": "02:00:00:00:00:11",
            "mtu": 1400,
            "sandbox": "/var/run/netns/x",
            "socketPath": "/run/x.sock",
            "pciID": "0000:01:00.0",
        },
    ],
    "ips": [
        {"address": "192.168.0.2/24", "gateway": "192.168.0.1", "interface": 1},
        {"address": "fd00:1::2/64", "interface": 1},
    ],
    "routes": [{"dst": "0.0.0.0/0", "gw": "192.168.0.1", "priority": 10}],
    "dns": {"nameservers": ["192.168.0.9"], "domain": "x", "search": ["y"], "options": ["ndots:1"]},
}
ROUTED_LEASES = Leases(
    ips=({"address": "10.0.0.2/24", "gateway": "10.0.0.1", "version": "4"}, {"address": "fd00::2/64"}),
    routes=({"dst": "10.1.0.0/16", "mtu": 1300, "advmss": 1200, "priority": 5, "table": 100, "scope": 253},),
)


@pytest.mark.parametrize("version", SUPPORTED_VERSIONS)
def test_each_version_gets_what_it_knows(version: str) -> None:
    for_a_program = {"name": "net2", "mac": "", "mtu": 0, "sandbox": "/var/run/netns/x", "pciID": "0000:3b:00.3"}
    made = result.build(version, FULL_PREVIOUS, [(NET1, ROUTED_LEASES), (for_a_program, Leases())])
    assert made == json.loads((GOLDEN / f"{version}.json").read_text())
    result.check_result(made)


@pytest.mark.parametrize("version", SUPPORTED_VERSIONS)
@pytest.mark.parametrize("other", SUPPORTED_VERSIONS)
def test_a_result_goes_into_another_version_and_loses_no_more_than_that_does_not_know(version: str, other: str) -> None:
    lesser = min(version, other)
    there = result.in_version(json.loads((GOLDEN / f"{version}.json").read_text()), other)
    wanted = result.in_version(json.loads((GOLDEN / f"{lesser}.json").read_text()), other)
    assert there == wanted


@pytest.mark.parametrize(
    ("document", "path"),
    [
        ({"cniVersion": 1}, "cniVersion"),
        ({"interfaces": {}}, "interfaces"),
        ({"interfaces": [{"name": "a"}, {"name": 5}]}, "interfaces[1].name"),
        ({"interfaces": [{"mac": []}]}, "interfaces[0].mac"),
        ({"interfaces": [{"mtu": "9000"}]}, "interfaces[0].mtu"),
        ({"interfaces": [{"pciID": 5}]}, "interfaces[0].pciID"),
        ({"ips": [{}]}, "ips[0].address"),
        ({"ips": [{"address": "10.0.0.1"}]}, "ips[0].address"),
        ({"ips": [{"address": "10.0.0.1/33"}]}, "ips[0].address"),
        ({"ips": [{"address": "10.0.0.1/255.255.255.0"}]}, "ips[0].address"),
        ({"ips": [{"address": "10.0.0.1/0.0.0.255"}]}, "ips[0].address"),
        ({"ips": [{"address": "fe80::1%eth0/64"}]}, "ips[0].address"),
        ({"ips": [{"address": "10.0.0.1/24", "gateway": "x"}]}, "ips[0].gateway"),
        ({"ips": [{"address": "10.0.0.1/24", "interface": "0"}]}, "ips[0].interface"),
        ({"ips": [{"address": "10.0.0.1/24", "interface": True}]}, "ips[0].interface"),
        ({"ips": [{"address": "10.0.0.1/24", "version": 4}]}, "ips[0].version"),
        ({"routes": [{"gw": "10.0.0.1"}]}, "routes[0].dst"),
        ({"routes": [{"dst": "default"}]}, "routes[0].dst"),
        ({"routes": [{"dst": "10.0.0.0/255.0.0.0"}]}, "routes[0].dst"),
        ({"routes": [{"dst": "10.0.0.0/8", "gw": 5}]}, "routes[0].gw"),
        ({"routes": [{"dst": "10.0.0.0/8", "mtu": -1}]}, "routes[0].mtu"),
        ({"routes": [{"dst": "10.0.0.0/8", "scope": 256}]}, "routes[0].scope"),
        ({"dns": []}, "dns"),
        ({"dns": {"nameservers": "10.0.0.9"}}, "dns.nameservers"),
        ({"dns": {"search": [5]}}, "dns.search"),
        ({"dns": {"domain": 5}}, "dns.domain"),
    ],
)
def test_what_no_result_has_is_refused_with_its_path(document: object, path: str) -> None:
    with pytest.raises(RequestInvalid) as caught:
        result.check_result(document, "prevResult")
    assert str(caught.value).startswith(f"prevResult.{path} must be ")


def test_what_go_writes_for_nothing_in_a_result_is_taken_for_nothing() -> None:
    """A plugin that names no family leaves "version" empty once libcni has written its result anew."""
    written = {"address": "10.0.0.2/24", "gateway": "", "interface": None, "version": ""}
    previous = {"cniVersion": "0.4.0", "ips": [written], "routes": [{"dst": "0.0.0.0/0", "gw": ""}], "dns": {}}
    result.check_result(previous, "prevResult")
    told = result.build("0.4.0", previous, [])
    assert [ip["version"] for ip in told["ips"]] == ["4"]


def test_what_is_no_object_is_refused() -> None:
    with pytest.raises(RequestInvalid, match="the result must be an object"):
        result.check_result([])
