"""The examples with claims: the chart makes their classes, constraints name their requests, parameters are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cel_expr_python import cel

from agent import config
from agent.config import Config
from deviceplugin.dra.allocated_claim import Opaque, Result
from deviceplugin.dra.attributes import Attributes
from deviceplugin.dra.devices import DraDevice
from deviceplugin.dra.parameters import settings_of
from tests.daemonset.manifests import Document, Kube, documents
from tests.daemonset.test_examples import BY_PLUGIN, EXAMPLES, JOBS, pods
from tests.deviceplugin.dra.nodes import Offered, recorded_node

CONFIG = EXAMPLES / "config-dra.yaml"
GPU_CLASS = "gpu.nvidia.com"
BY_CLAIM = [path for path in JOBS if path not in BY_PLUGIN and path.name != "dra-unchanged.yaml"]
MOST_PREFERRED = 4
"""With more pairs of which one is preferred the scheduler may search for seconds."""


def templates(path: Path) -> dict[str, Document]:
    """Return the claims' specs by their templates' names."""
    found = (d for d in documents(path) if d["kind"] == "ResourceClaimTemplate")
    return {d["metadata"]["name"]: d["spec"]["spec"]["devices"] for d in found}


def asked(devices: Document) -> Iterator[tuple[str, Document]]:
    """List the names by which constraints and configurations may call requests, with what is asked for."""
    for request in devices["requests"]:
        if "exactly" in request:
            yield request["name"], request["exactly"]
        for either in request.get("firstAvailable", ()):
            yield f"{request['name']}/{either['name']}", either


@pytest.fixture(scope="module")
def classes(kube: Kube) -> dict[str, Document]:
    """The classes that the chart makes of the configuration, by name."""
    found = kube.template({"config": yaml.safe_load(CONFIG.read_text())})
    return {d["metadata"]["name"]: d["spec"] for d in found if d["kind"] == "DeviceClass"}


@pytest.fixture(scope="module")
def parsed() -> Config:
    return config.parse(CONFIG.read_text(), CONFIG.name)


@pytest.mark.parametrize("path", BY_CLAIM, ids=lambda p: p.name)
def test_what_is_preferred_comes_before_what_it_is_to_be_near_to(path: Path) -> None:
    """The scheduler keeps what it took first, if there is any way to go on."""
    for devices in templates(path).values():
        order = [request["name"] for request in devices["requests"]]
        preferring = [request["name"] for request in devices["requests"] if "firstAvailable" in request]
        assert len(preferring) <= MOST_PREFERRED
        for constraint in devices.get("constraints", ()):
            bases = [name.partition("/")[0] for name in constraint["requests"]]
            for name in set(bases) & set(preferring):
                assert order.index(name) == min(map(order.index, bases))


@pytest.mark.parametrize("path", BY_CLAIM, ids=lambda p: p.name)
def test_pods_have_the_claims_that_their_containers_name(path: Path) -> None:
    found = templates(path)
    for document in documents(path):
        for spec in pods(document):
            claims = {each["name"]: each["resourceClaimTemplateName"] for each in spec["resourceClaims"]}
            assert set(claims.values()) <= found.keys()
            named = [each["name"] for c in spec["containers"] for each in c.get("resources", {}).get("claims", ())]
            assert set(named) == claims.keys()


@pytest.mark.parametrize("path", BY_CLAIM, ids=lambda p: p.name)
def test_parameters_are_such_as_the_agent_takes(path: Path, classes: dict[str, Document], parsed: Config) -> None:
    resources = {spec["extendedResourceName"]: name for name, spec in classes.items()}
    for devices in templates(path).values():
        results = [
            (Result(name, parsed.dra.driver, "node", f"device-{i}"), resource)
            for i, (name, what) in enumerate(asked(devices))
            for resource in parsed.claimable
            if resources[resource.name] == what["deviceClassName"]
        ]
        assert results
        of_classes = [
            Opaque(each["opaque"]["parameters"], (result.request,), from_class=True)
            for result, resource in results
            for each in classes[resources[resource.name]].get("config", ())
        ]
        of_claim = [Opaque(each["opaque"]["parameters"], tuple(each["requests"])) for each in devices.get("config", ())]
        settings = settings_of([*of_classes, *of_claim], results, parsed)
        for (_, resource), setting in zip(results, settings, strict=True):
            assert bool(setting.network) is (resource.name == "rdma/vf")
    assert {each["opaque"]["driver"] for d in templates(path).values() for each in d.get("config", ())} <= {
        parsed.dra.driver
    }


@pytest.fixture(scope="module")
def devices(parsed: Config) -> tuple[DraDevice, ...]:
    """What the scheduler is told of a node with the configuration."""
    return Offered(recorded_node("h100-8gpu"), parsed.resources, parsed.dra).devices


def plain(attributes: Attributes, driver: str) -> dict[str, dict[str, Any]]:
    """Return attributes as expressions see them: by domain, then by name."""
    found: dict[str, dict[str, Any]] = {}
    for name, typed in attributes.items():
        domain, _, short = name.rpartition("/")
        (found.setdefault(domain or driver, {})[short],) = typed.values()
    return found


def test_a_class_selects_the_devices_of_its_resource_and_no_others(
    classes: dict[str, Document], devices: tuple[DraDevice, ...], parsed: Config
) -> None:
    env = cel.NewEnv(variables={"device": cel.Type.DYN})
    for spec in classes.values():
        (selector,) = spec["selectors"]
        expression = env.compile(selector["cel"]["expression"])
        selected = set()
        for device in devices:
            seen = {"driver": parsed.dra.driver, "attributes": plain(device.attributes, parsed.dra.driver)}
            if expression.eval(data={"device": seen}).plain_value() is True:
                selected.add(device.resource_name)
        assert selected == {spec["extendedResourceName"]}
        other = {"driver": GPU_CLASS, "attributes": {GPU_CLASS: {"uuid": "GPU-1"}}}
        assert expression.eval(data={"device": other}).plain_value() is False
