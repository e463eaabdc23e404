"""What devices are set up with, by class, claim and configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.config import Config, Dra, Resource, Select
from agent.config.networks import network_of_keys
from agent.config.sections import CLAIM_KEYS
from agent.config.template import Place
from agent.errors import ClaimInvalid
from deviceplugin.dra.allocated_claim import Opaque, Result
from deviceplugin.dra.parameters import Setting, settings_of
from tests.cni.networks import network
from tests.deviceplugin.dra.test_allocated_claim import JSON

VF = Resource("rdma/vf", "vf", Select(), offer="dra", network="rails")
PLAIN = Resource("rdma/plain", "vf", Select(), offer="dra")
NIC = Resource("rdma/nic", "nic", Select(), offer="dra")
HCA = Resource("rdma/hca", "hca", Select(), offer="dra")
NETWORKS = (
    network({"name": "rails", "mtu": 4200, "vlan": 7, "ipam": {"type": "host-local", "ranges": []}}),
    network({"name": "child", "mode": "macvlan"}),
)
CONFIG = Config(resources=(VF, PLAIN, NIC, HCA), networks=NETWORKS)


def of(request: str = "nic", device: str = "vf-0", admin: bool = False) -> Result:
    return Result(request, "nodefabric.io", "node-1", device, admin=admin)


def of_class(*requests: str, **keys: Any) -> Opaque:
    return Opaque({"apiVersion": "nodefabric.io/v1alpha1", "kind": "Network", **keys}, requests, from_class=True)


def of_claim(*requests: str, **keys: Any) -> Opaque:
    return Opaque({"apiVersion": "nodefabric.io/v1alpha1", "kind": "Network", **keys}, requests)


def settle(*configs: Opaque, resource: Resource = VF, config: Config = CONFIG) -> Setting:
    return settings_of(configs, [(of(), resource)], config)[0]


def problems(*configs: Opaque, resource: Resource = VF, config: Config = CONFIG) -> str:
    with pytest.raises(ClaimInvalid) as raised:
        settle(*configs, resource=resource, config=config)
    return str(raised.value)


def test_without_parameters_the_resources_own_network_holds_as_it_is_at_the_add() -> None:
    assert settle() == Setting()


def test_the_configured_network_is_extended_by_the_class_and_that_by_the_claim() -> None:
    found = settle(of_class(trust="on", mtu=9000), of_claim(mtu=1500))

    assert (found.network["vlan"], found.network["trust"], found.network["mtu"]) == (7, "on", 1500)


def test_a_class_may_name_another_network_of_the_configuration() -> None:
    assert settle(of_class(network="rails"), resource=PLAIN).network == {"name": "rails", **NETWORKS[0].keys}


def test_addresses_are_given_as_the_static_plugin_has_them_in_place_of_the_networks_own() -> None:
    routes = [{"dst": "198.51.100.0/24", "gw": "192.0.2.1"}]
    found = settle(of_class(addresses=["192.0.2.10/24"]), of_claim(routes=routes))

    assert found.network["ipam"] == {"type": "static", "addresses": [{"address": "192.0.2.10/24"}]}
    assert found.network["routes"] == [{"dst": "198.51.100.0/24", "gw": "192.0.2.1"}]


def test_what_a_claim_says_of_routing_holds_as_a_networks_own_words() -> None:
    said = {
        "routing": "source",
        "gateway": "none",
        "rules": [{"from": "192.0.2.0/24"}],
        "neighbours": [{"ip": "192.0.2.1", "mac": "02:00:00:00:00:01"}],
        "sysctls": {"accept_ra": 0},
    }
    found = settle(of_claim(**said))

    assert said.items() <= found.network.items()
    assert network_of_keys(found.network).setup.routing.by_source


def test_a_whole_adapter_joins_as_such() -> None:
    assert settle(of_claim(mtu=9000), resource=NIC).network == {"mtu": 9000, "mode": "nic"}


def test_a_shared_adapter_takes_a_network_of_a_mode_for_shares_only() -> None:
    assert settle(of_class(network="child"), resource=HCA).network == {"name": "child", "mode": "macvlan"}
    assert "takes the adapter from the others" in problems(of_class(network="rails"), resource=HCA)
    assert "neither the resource nor the parameters name a network" in problems(of_claim(mtu=1500), resource=HCA)


def test_a_device_that_is_only_looked_at_is_set_up_with_nothing() -> None:
    found = settings_of([of_claim(mtu=1500)], [(of(admin=True), VF)], CONFIG)

    assert found == (Setting(),)


def test_interfaces_are_numbered_when_the_whole_pod_is_known() -> None:
    two = [(of("nic", "vf-0"), VF), (of("nic", "vf-1"), VF), (of("other", "vf-2"), VF)]
    found = settings_of([of_claim("nic", ifName="rail%d"), of_claim("other", ifName="ctl")], two, CONFIG)

    assert [setting.ifname for setting in found] == ["rail%d", "rail%d", "ctl"]


def test_interfaces_may_be_called_by_their_rails_which_are_known_at_the_add() -> None:
    two = [(of("nic", "vf-0"), VF), (of("nic", "vf-1"), VF)]
    found = settings_of([of_class("nic", ifName="rail{rail}", vlan="{rail+100}")], two, CONFIG)

    assert [setting.ifname for setting in found] == ["rail{rail}", "rail{rail}"]
    assert network_of_keys(found[0].network).at(Place(rail=3)).setup.settings.vlan == 103
    assert "ifName must be an interface name of at most 15 characters" in problems(of_claim(ifName="rail/{rail}"))


def test_where_each_pf_has_a_network_parameters_must_name_the_one_that_they_are_about() -> None:
    by_pf = replace(VF, network={"ens1f0": "rails"})
    assert settle(of_claim(ifName="fast"), resource=by_pf) == Setting(ifname="fast")
    assert (
        "each of its PFs has a network of its own: mtu can be said beside network alone, as by a DeviceClass"
        in problems(of_claim(mtu=1500), resource=by_pf)
    )
    assert settle(of_class(network="rails", mtu=1500), resource=by_pf).network["mtu"] == 1500


@pytest.mark.parametrize("said", [{"ifName": "fast"}, {"addresses": ["192.0.2.10/24"]}, {"altNames": ["a", "b"]}])
def test_two_devices_get_neither_one_name_nor_one_address(said: Any) -> None:
    with pytest.raises(ClaimInvalid, match=f"{next(iter(said))}: .* is given 2 times: say it for one request"):
        settings_of([of_class(**said)], [(of("nic", "vf-0"), VF), (of("nic", "vf-1"), VF)], CONFIG)


@pytest.mark.parametrize("key", sorted(set(CLAIM_KEYS) - set(Dra().claim_may)))
def test_keys_that_could_join_any_network_are_for_classes_only(key: str) -> None:
    assert f"{key} may be said by a DeviceClass only" in problems(of_claim(**{key: "x"}))


def test_the_configuration_may_let_claims_say_more_or_nothing() -> None:
    free = Config(CONFIG.resources, NETWORKS, dra=Dra(claim_may=("vlan",)))

    assert settle(of_claim(vlan=9), config=free).network["vlan"] == 9
    assert "mtu may be said by a DeviceClass only" in problems(of_claim(mtu=1500), config=free)


def test_parameters_that_are_no_object_are_refused() -> None:
    assert "must be a JSON object" in problems(Opaque("x"))
    assert "must be a JSON object" in problems(Opaque({"ipam": [0] * 2000}))


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from((*CLAIM_KEYS, "apiVersion", "kind")) | st.text(max_size=6), JSON, max_size=4))
def test_garbage_in_parameters_gives_a_network_that_can_be_read_or_one_error(garbage: Mapping[str, Any]) -> None:
    with contextlib.suppress(ClaimInvalid):
        found = settle(of_class(**{key: value for key, value in garbage.items() if key != "requests"}))
        network_of_keys(found.network)
