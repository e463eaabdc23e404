"""Networks that are templates over the device: what they come to, and what is refused when they are loaded."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config import parse
from agent.config.networks import Network, network_of_keys
from agent.config.template import Place, filled, words_of
from agent.errors import RequestInvalid
from tests.agent.config.refused import problems_of

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


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner)))
def test_what_has_no_templates_stays_as_it_is(value: Any) -> None:
    if not isinstance(value, str) and "{" not in json.dumps(value):
        assert words_of(value) == frozenset()
        assert filled(value, PLACE) == value


def test_a_pf_has_the_network_that_the_resource_names_for_it() -> None:
    mapping = {"ens4f0np0": "rails", "0000:5D:00.0": "other"}
    networks = [{"name": "rails", "mtu": 9000}, {"name": "other", "mtu": 4200}]
    text = document({}, {"network": mapping}, networks=networks)
    network = parse(text, "x").network_of("rdma/vf")
    assert network is not None
    assert network.at(PLACE).setup.mtu == 9000
    assert network.at(Place(pf="y", adapter="0000:5d:00.0")).setup.mtu == 4200
    with pytest.raises(
        RequestInvalid, match=r"no network is named for the adapter y: .* names ens4f0np0, 0000:5d:00.0"
    ):
        network.at(Place(pf="y", adapter="0000:1b:00.0"))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"ifName": "{gpu}"},
            "networks[0].ifName: has {gpu}, which stands for nothing; known are {rail}, {plane}, {pf}",
        ),
        ({"altNames": ["{pf+1}"]}, "networks[0].altNames[0]: counts with {pf}, which is a name"),
        (
            {"ifName": "rail{rail-1}"},
            "networks[0].ifName: has {rail-1}, which is not understood: take {rail}, {rail+100}",
        ),
        ({"altNames": ["{pf }"]}, "networks[0].altNames[0]: has {pf }, which is not understood: take {pf}"),
        ({"ifName": "v{vf"}, "networks[0].ifName: has {vf, which is not understood: take {vf}, {vf+100}, {vf*32} or"),
        ({"ifName": "eth{rail}"}, "networks[0].ifName: must not be eth0, which is the pod's own interface"),
        (
            {"ifName": "a-longer-name-{rail}x"},
            "networks[0].ifName: must be an interface name of at most 15 characters, is",
        ),
        (
            {"ifName": "of-many-rails{rail*50}"},
            "networks[0]: for rail 2: ifName must be an interface name of at most 15",
        ),
        ({"vlan": "{rail*1000}"}, "networks[0]: for rail 5: vlan must be a whole number from 0 to 4094, is 5000"),
        (
            {"ipam": {"type": "host-local", "subnet": "10.{rail}.0.0/14"}},
            "networks[0].ipam.subnet: for rail 1: cannot be used: 10.1.0.0/14 has host bits set",
        ),
        (
            {"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.0.{rail*64}.0/24"}]]}},
            "networks[0].ipam.ranges[0][0].subnet: for rail 4: cannot be used: '10.0.256.0/24' does not appear",
        ),
        (
            {"ipam": {"type": "host-local", "subnet": "10.{rail}.0.0/16", "gateway": "10.0.0.1"}, "ifName": "r{rail}"},
            None,  # a gateway that is no template is the user's own
        ),
        (
            {"ipam": {"type": "host-local", "subnet": "10.{rail}.0.0/16", "gateway": "10.{rail+1}.0.1"}},
            "networks[0].ipam.gateway: for rail 0: 10.1.0.1 is not in 10.0.0.0/16",
        ),
        (
            {"ipam": {"type": "whereabouts", "range": "10.0.{rail*16}.0/19"}},
            "networks[0].ipam.range: 10.0.0.0/19 for rail 0 and 10.0.16.0/19 for rail 1 overlap",
        ),
        (
            {"ipam": {"type": "whereabouts", "range": "10.0.{rail}.5-10.0.{rail+1}.9/16"}},
            "networks[0].ipam.range: 10.0.0.5-10.0.1.9 for rail 0 and 10.0.1.5-10.0.2.9 for rail 1 overlap",
        ),
        ({"ipam": {"type": "whereabouts", "range": "10.0.{rail}.5-10.0.{rail}.9/16"}}, None),
        ({"ipam": {"type": "host-local", "subnet": "10.{numa}.0.0/16"}}, None),
        ({"ipam": {"type": "host-local", "subnet": "10.0.0.0/16", "rangeStart": "10.0.{rail}.1"}}, "overlap"),
        (
            {"ipam": {"type": "x", "range": "fd00:{rail}::/64", "routes": [{"dst": "10.{rail+250}.0.0/16"}]}},
            "networks[0].ipam.routes[0].dst: for rail 6: cannot be used",
        ),
    ],
)
def test_what_no_rail_could_use_is_refused_with_its_path(keys: dict[str, Any], expected: str | None) -> None:
    if expected is None:
        parse(document(keys), "x")
        return
    (problem,) = problems_of(document(keys))
    assert expected in problem


@pytest.mark.parametrize(
    ("keys", "path"),
    [
        ("vlan: {rail+100}", "networks[0].vlan: is {rail+100} without quotes"),
        ("ipam: {type: x, range: {rail}}", "networks[0].ipam.range: is {rail} without quotes"),
        ("altNames: [{pf-1}]", "networks[0].altNames[0]: is {pf-1} without quotes"),
        ("gateway: {rail}.0.0.1", "is not YAML: "),
        ("ifName: r{rail}", "is not YAML: "),
    ],
)
def test_a_template_without_quotes_is_told_by_what_helps(keys: str, path: str) -> None:
    (problem,) = problems_of(f"networks:\n  - {{name: rails, {keys}}}\n")
    assert problem.startswith(path)
    assert problem.endswith(": put the text in quotes: YAML reads { as the start of a mapping")


def test_other_faults_of_a_file_with_templates_say_nothing_of_quotes() -> None:
    (problem,) = problems_of('networks:\n  - {name: rails, ifName: "r{rail}" vlan: 7}\n')
    assert "is not YAML" in problem
    assert "quotes" not in problem


@pytest.mark.parametrize(
    ("subnet", "rails", "problem"),
    [
        ("10.0.{rail*64}.0/18", list("abcd"), None),
        ("10.{rail}.{plane*128}.0/17", [], None),
        ("10.{rail}.{plane*128}.0/17", [["a", "b"], ["c"]], None),
        (
            "10.{rail}.{plane*128}.0/17",
            [["a"], ["b", "c", "d"]],
            "for rail 1, plane 2: cannot be used: '10.1.256.0/17'",
        ),
        ("10.{rail}.{plane}.0/20", [], "for rail 0, plane 1: cannot be used: 10.0.1.0/20 has host bits set"),
    ],
)
def test_a_list_of_rails_says_how_many_there_may_be_and_planes_of_each(
    subnet: str, rails: list[Any], problem: str | None
) -> None:
    text = document({"ipam": {"type": "host-local", "subnet": subnet}}, topology={"rails": rails})
    if problem is None:
        parse(text, "x")
    else:
        assert [problem in found for found in problems_of(text)] == [True]


def test_what_a_kind_of_device_has_not_is_refused_where_the_resource_names_it() -> None:
    keys = {"altNames": ["v{vf}"]}
    (problem,) = problems_of(document(keys, {"kind": "nic", "network": {"ens1": "rails"}}))
    assert problem.startswith("resources[0].network.ens1: 'rails' asks for {vf}, and a device of kind nic is no VF")


def test_a_bond_stands_on_no_single_rail() -> None:
    (problem,) = problems_of(document({"bond": "active-backup", "ifName": "rail{rail}"}))
    assert problem == (
        "resources[0].network: 'rails' has bond: active-backup, which joins VFs of different PFs, so {rail} would say"
        " two things"
    )


@pytest.mark.parametrize("value", ["[rails]", "{}", "{a b: rails}", "{ens1: 7}", "Rails"])
def test_a_resource_names_networks_and_nothing_else(value: str) -> None:
    (problem,) = problems_of(f"resources: [{{name: a/b, kind: vf, network: {value}}}]")
    assert problem.startswith("resources[0].network: must be the name of a network, or a mapping of PFs")


def test_a_network_that_is_not_there_is_told_where_the_mapping_names_it() -> None:
    (problem,) = problems_of(document({}, {"network": {"ens1": "rails", "ens2": "gone"}}))
    assert problem == "resources[0].network.ens2: 'gone' is not among the networks"


def test_networks_of_one_value_are_the_same() -> None:
    assert network_of_keys(RAILS) == network_of_keys(RAILS)
    assert network_of_keys(RAILS).at(PLACE) != Network("rails")
