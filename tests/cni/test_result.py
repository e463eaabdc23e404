"""CNI results in the shape of each version."""

from __future__ import annotations

from typing import Any

import pytest

from agent.hardware.host import Route
from cni import result
from cni.netconf import SUPPORTED_VERSIONS
from cni.result import Interface, Leases

NET1 = Interface("net1", "02:00:00:00:00:01", 9000, "/var/run/netns/x", "0000:3b:00.2")
NET2 = Interface("net2", "02:00:00:00:00:02", 1500, "/var/run/netns/x", "0000:3b:00.3")
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


def test_version_0_names_the_family_of_each_address() -> None:
    for version in ("0.3.1", "0.4.0"):
        made = result.build(version, None, [(NET1, LEASES)])
        assert made == {
            "cniVersion": version,
            "interfaces": [{"name": "net1", "mac": "02:00:00:00:00:01", "sandbox": "/var/run/netns/x"}],
            "ips": [
                {"interface": 0, "address": "10.0.0.2/24", "version": "4", "gateway": "10.0.0.1"},
                {"interface": 0, "address": "fd00::2/64", "version": "6"},
            ],
            "routes": [{"dst": "10.1.0.0/16"}, {"dst": "fd01::/64", "gw": "fd00::9"}],
            "dns": {"nameservers": ["10.0.0.9"]},
        }


def test_version_1_0_does_not() -> None:
    made = result.build("1.0.0", None, [(NET1, LEASES)])
    assert made["interfaces"] == [{"name": "net1", "mac": "02:00:00:00:00:01", "sandbox": "/var/run/netns/x"}]
    assert made["ips"] == [
        {"interface": 0, "address": "10.0.0.2/24", "gateway": "10.0.0.1"},
        {"interface": 0, "address": "fd00::2/64"},
    ]


def test_version_1_1_also_tells_mtu_and_device() -> None:
    made = result.build("1.1.0", None, [(NET1, Leases())])
    assert made["interfaces"] == [
        {
            "name": "net1",
            "mac": "02:00:00:00:00:01",
            "mtu": 9000,
            "sandbox": "/var/run/netns/x",
            "pciID": "0000:3b:00.2",
        }
    ]
    assert "ips" not in made
    assert "routes" not in made


@pytest.mark.parametrize("version", SUPPORTED_VERSIONS)
def test_what_came_before_stays_and_ours_follows_with_its_own_indices(version: str) -> None:
    made = result.build(version, PREVIOUS, [(NET1, LEASES), (NET2, Leases(ips=({"address": "10.0.1.2/24"},)))])
    assert made["cniVersion"] == version
    assert [i["name"] for i in made["interfaces"]] == ["cbr0", "eth0", "net1", "net2"]
    assert made["interfaces"][:2] == PREVIOUS["interfaces"]
    assert made["ips"][0] == PREVIOUS["ips"][0] | ({"version": "4"} if version.startswith("0.") else {})
    assert [(ip["interface"], ip["address"]) for ip in made["ips"]] == [
        (1, "192.168.0.2/24"),
        (2, "10.0.0.2/24"),
        (2, "fd00::2/64"),
        (3, "10.0.1.2/24"),
    ]
    assert [r["dst"] for r in made["routes"]] == ["0.0.0.0/0", "10.1.0.0/16", "fd01::/64"]


def test_the_resolver_of_the_pods_first_network_wins() -> None:
    assert result.build("1.0.0", PREVIOUS, [(NET1, LEASES)])["dns"] == {"nameservers": ["192.168.0.9"]}
    assert result.build("1.0.0", {**PREVIOUS, "dns": {}}, [(NET1, LEASES)])["dns"] == {"nameservers": ["10.0.0.9"]}


@pytest.mark.parametrize("key", ["interfaces", "ips", "routes", "dns"])
def test_a_previous_result_may_hold_null(key: str) -> None:
    made = result.build("1.0.0", {**PREVIOUS, key: None}, [(NET1, LEASES)])
    assert made["interfaces"][-1]["name"] == "net1"
    assert made["ips"][-1]["interface"] == len(made["interfaces"]) - 1


def test_other_keys_of_a_previous_result_are_kept_and_it_is_not_changed() -> None:
    before = {**PREVIOUS, "x": 1}
    assert result.build("1.0.0", before, [(NET1, LEASES)])["x"] == 1
    assert len(PREVIOUS["interfaces"]) == 2
    assert len(PREVIOUS["ips"]) == 1


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
