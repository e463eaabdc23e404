"""Networks that are templates over the device: what they come to, and what is refused when they are loaded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent.config import parse
from agent.config.networks import network_of_keys
from agent.config.template import Place
from agent.errors import RequestInvalid

PLACE = Place(rail=3, pf="ens4f0np0", numa=1, vf=7, adapter="0000:4b:00.0")
RAILS: dict[str, Any] = {
    "name": "rails",
    "ifName": "rail{rail}",
    "vlan": "{rail+100}",
    "routing": "source",
    "gateway": "10.{rail}.0.1",
    "routes": [{"dst": "10.0.0.0/8", "gw": "10.{rail}.0.1", "table": "{rail*10+200}"}],
    "altNames": ["{pf}-{vf}"],
    "ipam": {
        "type": "host-local",
        "ranges": [[{"subnet": "10.{rail}.0.0/16", "rangeStart": "10.{rail}.1.0"}], [{"subnet": "fd00:{rail}::/64"}]],
    },
}


def document(keys: dict[str, Any], resource: dict[str, Any] | None = None, **more: Any) -> str:
    of_vfs = {"name": "rdma/vf", "kind": "vf", "network": "rails", **(resource or {})}
    return json.dumps({"networks": [{"name": "rails", **keys}], "resources": [of_vfs], **more})


def test_a_network_is_made_for_the_place_of_a_device() -> None:
    network = network_of_keys(RAILS)
    assert network.words == {"rail", "pf", "vf"}
    made = network.at(PLACE)
    assert (made.name, made.ifname, made.words) == ("rails", "rail3", frozenset())
    assert made.setup.settings.vlan == 103
    assert made.setup.altnames == ("ens4f0np0-7",)
    assert made.setup.ipam == {
        "type": "host-local",
        "ranges": [[{"subnet": "10.3.0.0/16", "rangeStart": "10.3.1.0"}], [{"subnet": "fd00:3::/64"}]],
    }
    assert made.setup.routing.gateways == ("10.3.0.1",)
    assert made.setup.routing.routes == ({"dst": "10.0.0.0/8", "gw": "10.3.0.1", "table": 230},)
    assert made.setup.for_ipam["altNames"] == ["ens4f0np0-7"]


def test_a_network_without_templates_is_itself_anywhere() -> None:
    network = network_of_keys({"ifName": "fabric", "mtu": 9000})
    assert network.at(PLACE) is network
    assert network.ifname == "fabric"


def test_a_whole_adapter_joins_what_a_template_comes_to_as_such() -> None:
    assert network_of_keys({"altNames": ["rail{rail}"]}).for_devices("nic").at(PLACE).setup.mode == "nic"
    assert network_of_keys({"mode": "vf", "altNames": ["rail{rail}"]}).for_devices("nic").at(PLACE).setup.mode == "vf"


def test_a_device_that_has_not_what_is_asked_for_is_refused_by_name() -> None:
    with pytest.raises(RequestInvalid, match=r"rail of a device of adapter 0000:4b:00.0, which has none: list .*rails"):
        network_of_keys(RAILS).at(Place(pf="x", vf=1, adapter="0000:4b:00.0"))


def test_secrets_are_no_templates() -> None:
    keys = {"ipam": {"type": "ours", "password": "{rail}{what}", "net": "{rail}"}}
    assert network_of_keys(keys).at(PLACE).setup.ipam == {"type": "ours", "password": "{rail}{what}", "net": 3}


def test_a_pf_has_the_network_that_the_resource_names_for_it() -> None:
    mapping = {"ens4f0np0": "rails", "0000:5D:00.0": "other"}
    networks = [{"name": "rails", "mtu": 9000}, {"name": "other", "mtu": 4200}]
    text = document({}, {"network": mapping}, networks=networks)
    network = parse(text, "x").joined["rdma/vf"]
    assert network is not None
    assert network.at(PLACE).setup.mtu == 9000
    assert network.at(Place(pf="y", adapter="0000:5d:00.0")).setup.mtu == 4200
    with pytest.raises(
        RequestInvalid, match=r"no network is named for the adapter y: .* names ens4f0np0, 0000:5d:00.0"
    ):
        network.at(Place(pf="y", adapter="0000:1b:00.0"))
