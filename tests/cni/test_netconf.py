"""Network configurations: what is read from them, and what is said about one that is wrong."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.errors import RequestInvalid
from agent.model.allocation import VfSettings
from cni import netconf
from tests.cni.networks import network

FULL = {
    "cniVersion": "1.1.0",
    "name": "rails",
    "type": "nodefabric",
    "mode": "vf",
    "deviceID": "0000:3B:00.2",
    "vlan": 100,
    "vlanQoS": 3,
    "vlanProto": "802.1Q",
    "mac": "02:00:00:00:00:AA",
    "min_tx_rate": 10,
    "max_tx_rate": 100,
    "spoofchk": "off",
    "trust": "on",
    "link_state": "enable",
    "mtu": 9000,
    "ipam": {"type": "host-local", "subnet": "10.0.0.0/24"},
    "prevResult": {"interfaces": [{"name": "eth0"}], "ips": [{"address": "10.0.0.2/24"}], "routes": [], "dns": {}},
    "capabilities": {"mac": True},
    "args": {"cni": {}},
    "dns": {},
    "disableCheck": True,
    "cniVersions": ["1.0.0", "1.1.0"],
    "logLevel": "debug",
    "logFile": "/x",
    "cni.dev/attachments": [],
}


def read(document: Any, **cni_args: str) -> netconf.NetConf:
    return netconf.parse(json.dumps(document).encode(), cni_args)


CAN_BE_EMPTY = ("cniVersion", "name", "type", "deviceID", "pciBusID", "mac", "vlanProto", "spoofchk", "trust")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, None) for key in FULL if key != "cni.dev/attachments"),
        *((key, "") for key in (*CAN_BE_EMPTY, "link_state")),
    ],
)
def test_null_and_an_empty_text_mean_that_the_key_is_absent(key: str, value: object) -> None:
    """Go writes null for an empty list or map, and several runtimes do."""
    assert read({key: value}) == read({})


def test_the_device_may_have_any_of_three_names() -> None:
    first, second, third = "0000:3b:00.2", "0000:3b:00.3", "0000:3b:00.4"
    everywhere = {"deviceID": first, "pciBusID": second, "runtimeConfig": {"deviceID": third}}
    assert read(everywhere).device == first
    assert read(everywhere | {"deviceID": None}).device == second
    assert read({"runtimeConfig": {"deviceID": third, "other": 1}}).device == third


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("100,200-210", "100,200-210"),
        ([100, "200-210"], "100,200-210"),
        ([{"minID": 205, "maxID": 210}, {"id": 100}, "200 - 204"], "100,200-210"),
        (["100,201", 200], "100,200-201"),
        (100, "100"),
        ([{"id": 0}, "100-110"], "0,100-110"),
        ("1-4094", "1-4094"),
        ("", None),
        (None, None),
    ],
)
def test_a_trunk_is_one_text_however_it_is_written(value: object, expected: str | None) -> None:
    assert read({"trunk": value, "vlan": 0}).settings == VfSettings(vlan=0, trunk=expected)
    assert read({"type": "sriov", "trunk": value}).settings.is_empty  # which that plugin does not know


@pytest.mark.parametrize(
    "item",
    [
        *(-1, 4095, True, None, "-1", "", "210-200", []),
        *({}, {"id": -1}, {"id": "5"}, {"minID": 5}, {"minID": 6, "maxID": 5}, {"id": 5, "minID": 5, "maxID": 6}),
    ],
)
def test_a_wrong_entry_of_a_trunk_is_refused_with_its_place(item: object) -> None:
    with pytest.raises(RequestInvalid) as caught:
        read({"trunk": [100, item]})
    assert str(caught.value).startswith("trunk[1] must be a VLAN ID from 0 to 4094, a range such as ")


def test_the_mac_of_the_pod_goes_before_that_of_the_network() -> None:
    runtime, args, network = "02:00:00:00:00:01", "02:00:00:00:00:02", "02:00:00:00:00:03"
    assert read({"mac": network, "runtimeConfig": {"mac": runtime}}, MAC=args).mac == runtime
    assert read({"mac": network}, MAC=args.upper()).mac == args
    assert read({"mac": network}).mac == network


@pytest.mark.parametrize("mac", ["x", "01:00:00:00:00:01", "00:00:00:00:00:00"])
def test_a_wrong_mac_in_cni_args_is_refused(mac: str) -> None:
    with pytest.raises(RequestInvalid, match="CNI_ARGS MAC must be a unicast MAC address"):
        read({}, MAC=mac)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"\xff", b'{"a": }', b"[" * 100_000, b'{"mtu": ' + b"9" * 5000 + b"}", b"[]", b"5", b'"x"']
)
def test_what_is_no_json_object_is_refused(text: bytes) -> None:
    with pytest.raises(RequestInvalid, match="the network configuration"):
        netconf.parse(text)


def test_the_attachments_to_keep_are_read_under_both_their_names() -> None:
    """The specification of GC and what runtimes made of it say it differently, and libcni says both."""
    one, other = ([{"containerID": name, "ifname": "net1"}] for name in ("c1", "c2"))
    assert read({"cni.dev/attachments": one}).valid_attachments == (("c1", "net1"),)
    for key in ("cni.dev/attachments", "cni.dev/valid-attachments"):  # libcni writes a nil slice where no pod is left
        assert (read({key: None}).valid_attachments, read({key: []}).valid_attachments) == ((), ())
    assert read({}).valid_attachments is None
    assert read({"cni.dev/valid-attachments": one, "cni.dev/attachments": one}).valid_attachments == (("c1", "net1"),)
    assert read({"cni.dev/valid-attachments": one, "cni.dev/attachments": other}).valid_attachments == (
        *(("c1", "net1"), ("c2", "net1")),
    )
    with pytest.raises(RequestInvalid, match=r"^cni\.dev/attachments\[0\] must hold containerID and ifname, is 5"):
        read({"cni.dev/attachments": [5]})


def test_a_network_of_the_agents_configuration_decides_how_an_interface_is_set_up() -> None:
    call = read({"cniVersion": "1.0.0", "name": "chain", "prevResult": {"interfaces": []}, "mtu": 1400, "trust": "on"})
    conf = netconf.with_network(call, network({"mode": "vf", "mtu": 9000, "vlan": 7, "ipam": {"type": "static"}}))
    assert (conf.cni_version, conf.name, conf.prev_result) == ("1.0.0", "chain", {"interfaces": []})
    assert (conf.mtu, conf.settings, conf.ipam) == (9000, VfSettings(vlan=7), {"type": "static"})


def test_the_ipam_plugin_is_told_all_that_is_not_the_plugins_own() -> None:
    asked = {"runtimeConfig": {"ips": ["10.0.0.5/24"], "mac": "02:00:00:00:00:01"}, "args": {"cni": {"ips": []}}}
    known = {"name": "rails", "ipam": {"type": "static"}, "prevResult": {}, "cni.dev/attachments": []}
    assert read(known | asked | {"vlan": 5}).for_ipam == {**asked, "vlan": 5}
    assert read(known | {"runtimeConfig": None}).for_ipam == {}
    foreign = {"type": "sriov", "Name": "rails", "IPAM": {"type": "x"}, "PrevResult": {}, "Kubernetes": {"a": 1}}
    assert read(foreign).for_ipam == {"Kubernetes": {"a": 1}}
    assert read(asked).for_ipam == {}


KINDS = ("nodefabric", "sriov", "ib-sriov", "rdma", "ipoib")
NAMES = [
    *FULL,
    *("pciBusID", "runtimeConfig", "cni.dev/valid-attachments", "interfaces", "ips", "x", "master", "guid", "pkey"),
    *("rdma", "vfio", "functionReset", "altNames", "macvlanMode", "cni", "infinibandGUID", "CNIDeviceInfoFile"),
    *("rdmaIsolation", "ibKubernetesEnabled", "vfioPciMode", "debug", "mellanox.infiniband.app", "address", "dst"),
]
KEYS = st.sampled_from([*NAMES, *map(str.upper, NAMES)]) | st.text(max_size=4)
WORDS = ["on", "off", "1.0.0", "host-local", "dhcp", "0000:3b:00.2", "02:00:00:00:00:01", 100, "802.1ad", "0x8001"]
WORDS += ["ipoib", "macvlan", "nic", "vf", "eth0", "02:00:00:00:00:00:00:01", "/run/x", "10.0.0.1/24", *KINDS]
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from(WORDS)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=15,
)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(KEYS, VALUES, max_size=6),
    st.sampled_from(KINDS),
    st.dictionaries(st.just("MAC"), st.text(max_size=20)),
)
def test_whatever_is_configured_only_a_request_error_is_raised(
    document: dict[str, object], kind: str, cni_args: dict[str, str]
) -> None:
    with suppress(RequestInvalid):
        conf = read({"type": kind, **document}, **cni_args)
        json.dumps([conf.ipam, conf.for_ipam, conf.prev_result, list(conf.altnames)])


def test_what_came_before_is_each_calls_own_and_all_else_is_read_once() -> None:
    def call(name: str) -> netconf.NetConf:
        before = {"cniVersion": "1.0.0", "interfaces": [{"name": name}]}
        document = {"cniVersion": "1.0.0", "name": "once", "type": "nodefabric", "vlan": 7, "prevResult": before}
        return netconf.parse(json.dumps(document).encode())

    first, second = call("eth0"), call("eth1")
    assert [c.prev_result and c.prev_result["interfaces"] for c in (first, second)] == [
        [{"name": "eth0"}],
        [{"name": "eth1"}],
    ]
    assert first.settings is second.settings
    assert replace(first, prev_result=None) == replace(second, prev_result=None)


@pytest.mark.parametrize(
    "more", [{f"k{i}": 1 for i in range(20000)}, {"cni.dev/valid-attachments": [1] * 20000}], ids=["keys", "entries"]
)
def test_a_configuration_with_thousands_of_mistakes_is_refused_in_few_words(more: dict[str, Any]) -> None:
    with pytest.raises(RequestInvalid) as refused:
        netconf.parse(json.dumps({"name": "n", "type": "nodefabric", **more}).encode())
    assert "and perhaps more" in str(refused.value)
    assert len(str(refused.value)) < 32_768


@pytest.mark.parametrize("kind", ["nodefabric", "sriov", "ib-sriov", "rdma"])
def test_what_another_plugin_of_the_chain_takes_as_debug_is_its_own(kind: str) -> None:
    netconf.parse(json.dumps({"name": "n", "type": kind, "args": {"cni": {"debug": "1"}}}).encode())


# --------------------------------------------------------- as they are found on clusters, one file each

FILES = sorted(Path(__file__).with_name("netconfs").glob("*.json"))
EMPTY = asdict(netconf.from_document({}))


def told(value: Any) -> Any:
    """Write a value as JSON holds it."""
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_configuration_is_read_as_it_is_meant(file: Path) -> None:
    case = json.loads(file.read_text())
    conf = asdict(netconf.parse(json.dumps(case["netconf"]).encode(), case.get("cni_args")))
    settings = {key: value for key, value in conf.pop("settings").items() if value is not None}
    differing = {key: value for key, value in conf.items() if value != EMPTY[key]}
    if settings:
        differing["settings"] = settings
    assert told(differing) == {key: v for key, v in case["expected"].items() if v != told(EMPTY.get(key))}
