"""What a configuration says of DRA: how resources are offered, and what does not go together with it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import yaml

from agent import config
from agent.config import Config, Dra
from agent.config.networks import FOREIGN, network_of_keys
from agent.config.sections import CLAIM_KEYS
from agent.errors import ConfigError, RequestInvalid

VF = {"name": "rdma/vf", "kind": "vf", "select": {"vendors": ["15b3"]}}
HCA = {"name": "rdma/hca", "kind": "hca"}


def read(*resources: dict[str, Any], **sections: Any) -> Config:
    return config.parse(yaml.safe_dump({"resources": list(resources), **sections}), "test.yaml")


def problems_of(*resources: dict[str, Any], **sections: Any) -> Sequence[str]:
    with pytest.raises(ConfigError) as caught:
        read(*resources, **sections)
    return caught.value.problems


def test_a_resource_is_offered_by_the_device_plugin_unless_it_says_otherwise() -> None:
    found = read(VF)
    assert found.resources[0].offer == "devicePlugin"
    assert (found.offers_dra, found.needs_api) == (False, False)
    assert found.claimable == ()


def test_a_resource_is_offered_one_way() -> None:
    found = read({**VF, "offer": "dra"}, HCA)
    vf, _ = found.resources
    assert found.claimable == (vf,)
    assert found.offers_dra
    assert found.needs_api


@pytest.mark.parametrize("kind", ["gpu", "accelerator"])
def test_what_brings_no_adapter_cannot_be_offered_by_claims(kind: str) -> None:
    [problem] = problems_of({"name": "x.org/y", "kind": kind, "offer": "dra"})
    assert problem == f"resources[0].offer: is for hca, vf, nic, not {kind}: a {kind} is offered by device plugins only"


def test_a_rail_cannot_be_offered_by_claims() -> None:
    [problem] = problems_of({"name": "x.org/rail", "kind": "rail", "offer": "dra"})
    assert problem.startswith("resources[0].offer: is for hca, vf, nic")


def test_an_hca_with_several_shares_is_bound_late_only_by_claims() -> None:
    assert read({**HCA, "binding": "late", "offer": "dra"}).resources[0].binding == "late"
    assert read({**HCA, "binding": "late", "shares": 1}).resources[0].has_slots
    assert problems_of({**HCA, "binding": "late"}) == (
        "resources[0].binding: late needs shares: 1 for an hca, or offer: dra; with more, kubelet chooses the share",
    )


def test_places_have_no_number_of_slots() -> None:
    assert problems_of({**VF, "binding": "late", "offer": "dra", "slots": 4}) == (
        "resources[0].slots: is for offer: devicePlugin; with dra each place has as many units as devices",
    )


def test_a_name_must_fit_an_attribute() -> None:
    long = "a.example/" + "x" * 55
    assert read({**VF, "name": long}).resources[0].name == long
    assert problems_of({**VF, "name": long, "offer": "dra"}) == (
        "resources[0].name: is longer than 64 characters, which DRA has no room for",
    )
    assert read({**VF, "name": long[:64], "offer": "dra"}).offers_dra


def test_variables_of_two_resources_with_claims_add_up() -> None:
    both = ({**VF, "environment": ["nccl"]}, {**HCA, "environment": ["nccl"]})
    [problem] = problems_of(*both)
    assert "nccl is set by resources[0]" in problem
    assert read(*({**each, "offer": "dra"} for each in both)).offers_dra


def test_the_defaults_are_those_of_the_contract() -> None:
    assert read(VF).dra == Dra(
        driver="nodefabric.io",
        aliases=("gpu.nvidia.com/uuid", "resource.kubernetes.io/pciBusID"),
        list_attributes=False,
        status=True,
        metadata=False,
        claim_may=(
            *("ifName", "mtu", "addresses"),
            *("routing", "gateway", "routes", "rules", "neighbours", "sysctls"),
        ),
        shares="capacity",
    )


def test_every_key_is_read() -> None:
    said = {
        "driver": "dra.example.com",
        "aliases": ["gpu.amd.com/numaNode", "dra.net/numaNode"],
        "listAttributes": True,
        "metadata": True,
        "claimMay": ["vlan", "ifName"],
        "shares": "devices",
    }
    assert read(dra=said).dra == Dra(
        driver="dra.example.com",
        aliases=("gpu.amd.com/numaNode", "dra.net/numaNode"),
        list_attributes=True,
        metadata=True,
        claim_may=("vlan", "ifName"),
        shares="devices",
    )


def test_an_empty_list_means_none() -> None:
    found = read(dra={"aliases": [], "claimMay": []}).dra
    assert (found.aliases, found.claim_may) == ((), ())


@pytest.mark.parametrize(
    "driver", ["", "Upper.io", "under_score.io", "a..b", "-a.io", "a-.io", ".io", "a/b", f"{'a' * 60}.com"]
)
def test_a_driver_is_a_domain_of_at_most_63_characters(driver: str) -> None:
    [problem] = problems_of(dra={"driver": driver})
    assert problem.startswith("dra.driver: must be a domain of at most 63 characters")


@pytest.mark.parametrize("driver", ["nodefabric.io", "a", "x1.y-2.z", f"{'a' * 59}.com"])
def test_a_domain_of_63_characters_is_a_driver(driver: str) -> None:
    assert read(dra={"driver": driver}).dra.driver == driver


@pytest.mark.parametrize(
    "alias",
    [
        "uuid",
        "gpu.nvidia.com/",
        "gpu.nvidia.com/uu-id",
        "gpu.nvidia.com/productName",
        "Gpu/uuid",
        f"{'a' * 64}/uuid",
        "a/b/uuid",
        "resource.kubernetes.io/numaNode",
        "resource.kubernetes.io/uuid",
    ],
)
def test_an_alias_is_an_attribute_of_another_driver_that_the_agent_knows_a_value_for(alias: str) -> None:
    [problem] = problems_of(dra={"aliases": [alias]})
    assert problem.startswith("dra.aliases[0]: must be an attribute of another driver")


def test_an_alias_in_the_own_domain_is_refused() -> None:
    [problem] = problems_of(dra={"driver": "a.io", "aliases": ["a.io/uuid"]})
    assert problem == "dra.aliases: a.io/uuid is in the driver's own domain, whose attributes are there anyway"


def test_a_claim_may_say_what_networks_can_say_and_nothing_else() -> None:
    [problem] = problems_of(dra={"claimMay": ["ifName", "deviceID"]})
    assert problem.startswith("dra.claimMay[1]: must be one of ifName, ")
    with pytest.raises(RequestInvalid) as refused:
        network_of_keys({"name": "a", "unknown": 1})
    [known] = re.findall("known are: (.*)", str(refused.value))
    of_no_claim = {
        "type",
        "cniVersion",
        "pf",
        "bond",
        "arpTargets",
        *FOREIGN,
    }  # what a resource joins is told before there is a claim
    keys_of_networks = set(known.split(", ")) - of_no_claim
    assert keys_of_networks - {"ifName"} == set(CLAIM_KEYS) - {"ifName"} - {"addresses", "network"}


def test_pods_are_evicted_for_known_reasons_of_devices_only() -> None:
    assert read(VF).health.evict == ()
    assert read(health={"evict": ["DeviceGone", "LinkDown"]}).health.evict == ("DeviceGone", "LinkDown")
    found = problems_of(health={"evict": ["Gone", "BooksUnwritable", "GpuLost"]})
    assert [problem.partition(":")[0] for problem in found] == [f"health.evict[{i}]" for i in range(3)]
