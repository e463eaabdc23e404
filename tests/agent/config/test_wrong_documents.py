"""What is said about wrong documents of every kind: configurations, CNI configurations, and parameters of claims."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.config import Config, Dra, Resource, parse
from agent.errors import ClaimInvalid, ConfigError, RequestInvalid
from cni import netconf
from deviceplugin.dra.allocated_claim import Opaque, Result
from deviceplugin.dra.parameters import settings_of
from tests.cni.networks import network

CASES: list[dict[str, Any]] = yaml.load(Path(__file__).with_name("wrong_documents.yaml").read_text(), yaml.CSafeLoader)
RESOURCES = {
    "rdma/vf": Resource("rdma/vf", "vf", offer="dra", network="rails"),
    "rdma/plain": Resource("rdma/plain", "vf", offer="dra"),
    "rdma/nic": Resource("rdma/nic", "nic", offer="dra"),
    "rdma/hca": Resource("rdma/hca", "hca", offer="dra"),
}
NETWORKS = (
    network({"name": "rails", "mtu": 4200, "vlan": 7, "ipam": {"type": "host-local", "ranges": []}}),
    network({"name": "child", "mode": "macvlan"}),
)


def split(text: str) -> list[str]:
    """Part the messages of one error."""
    return re.split(r"; (?!known are|there are|templates)", text)


def messages(case: dict[str, Any]) -> list[str]:
    """Return what is said about a document."""
    if "configuration" in case:
        with pytest.raises(ConfigError) as refused:
            parse(case["configuration"], "test.yaml")
        return list(refused.value.problems)
    if "cni" in case:
        with pytest.raises(RequestInvalid) as invalid:
            netconf.parse(case["cni"].encode(), case.get("args", {}))
        return split(str(invalid.value))
    said = [
        Opaque(each["parameters"], tuple(each.get("requests", ())), from_class=each["by"] == "class")
        for each in case["claim"]
    ]
    asked = [each.split() for each in case["results"]]
    devices = [
        (Result(request, "nodefabric.io", "node-1", f"vf-{i}"), RESOURCES[name])
        for i, (request, name) in enumerate(asked)
    ]
    dra = Dra(claim_may=tuple(case["claimMay"])) if "claimMay" in case else Dra()
    with pytest.raises(ClaimInvalid) as wrong:
        settings_of(said, devices, Config(tuple(RESOURCES.values()), NETWORKS, dra=dra))
    return split(str(wrong.value))


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_wrong_document_is_refused_with_all_that_is_wrong_in_it(number: int) -> None:
    case = CASES[number]
    assert messages(case) == case["says"]
