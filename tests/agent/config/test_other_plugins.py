"""The configurations of other device plugins, decoded as Go does it."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.config import Config, Flags, SriovPool, parse
from agent.errors import ConfigError

SELECTORS = ["vendors", "pciAddresses", "acpiIndexes", "pfNames", "rootDevices", "linkTypes", "pKeys", "isRdma"]


def test_the_last_of_several_spellings_of_a_key_counts() -> None:
    text = '{"resourceList": [{"resourceName": "a", "selectors": {"isRdma": true, "IsRdma": false, "ISRDMA": true}}]}'
    (resource,) = parse(text, "config.json").resources
    assert resource.select.is_rdma


def test_the_prefix_comes_from_the_pool_or_else_from_the_flag() -> None:
    text = json.dumps({"resourceList": [{"resourceName": "a"}, {"resourceName": "b", "resourcePrefix": "x.example"}]})
    read = parse(text, "config.json", Flags(sriov_prefix="flag.example", use_cdi=True))
    assert [r.name for r in read.resources] == ["flag.example/a", "x.example/b"]
    assert [r.compat for r in read.resources] == [
        SriovPool("flag.example", use_cdi=True),
        SriovPool("x.example", use_cdi=True),
    ]


def test_the_interval_of_updates_is_that_of_rescans() -> None:
    pools = {"configList": [{"resourceName": "a", "rdmaHcaMax": 1, "devices": ["ib0"]}]}
    assert parse(json.dumps({"periodicUpdateInterval": 300, **pools}), "x").rescan_seconds == 300
    assert parse(json.dumps({"periodicUpdateInterval": 0, **pools}), "x").rescan_seconds == Config().rescan_seconds
    assert parse(json.dumps({"periodicUpdateInterval": 10**6, **pools}), "x").rescan_seconds == 3600


@pytest.mark.parametrize("key", ["config.json", "config.yaml", "node-7"])
def test_a_configmap_stands_for_what_it_holds(key: str) -> None:
    text = json.dumps({"kind": "ConfigMap", "data": {key: '{"mode": "hca"}'}})
    assert [r.name for r in parse(text, "x").resources] == ["rdma/hca"]


def test_tabs_and_a_byte_order_mark_are_no_hindrance() -> None:
    text = '\ufeff{\n\t"resourceList": [\n\t\t{"resourceName": "a"}\n\t]\n}'
    assert [r.name for r in parse(text.encode(), "x").resources] == ["intel.com/a"]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from([*SELECTORS, "vdpaType", "ddpProfiles"]), JSON_VALUES), JSON_VALUES)
def test_no_value_of_a_pool_does_more_than_be_refused(selectors: dict[str, Any], value: Any) -> None:
    named = {"resourceName": value, "additionalInfo": value}
    for pool in ({"resourceName": "a", "selectors": selectors}, named, value):
        for key in ("resourceList", "configList"):
            with suppress(ConfigError):
                assert parse(json.dumps({key: [pool]}), "x").source == "x"
