"""The base and its components: kustomize installs what the chart does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agent.process.startup import check
from tests.daemonset.manifests import (
    COMPONENTS,
    FOLDER,
    RELEASED,
    SWITCHES,
    VERSION,
    Document,
    Kube,
    base_config,
    identity,
    named,
    overlay,
    pod,
)
from tests.deviceplugin.dra.nodes import recorded_node


def comparable(found: list[Document], *, config_map: str = "nodefabric") -> dict[str, Document]:
    """Return objects by name, without what the two ways say differently for the same end."""
    kept: dict[str, Document] = {}
    for document in found:
        if document["kind"] in ("Namespace", "ConfigMap"):  # helm does not own the one, the other has a hash
            continue
        text = json.dumps(document).replace(config_map, "nodefabric").replace("registry.example/nodefabric", RELEASED)
        kept[identity(document)] = json.loads(text)
        annotations = kept[identity(document)].get("spec", {}).get("template", {}).get("metadata", {})
        annotations.pop("annotations", None)
    return {key: in_order(value) for key, value in kept.items()}


def in_order(value: Any) -> Any:
    """Sort lists whose order means nothing: kustomize puts what a patch adds first."""
    if isinstance(value, dict):
        return {key: in_order(inner) for key, inner in value.items()}
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return sorted(map(in_order, value), key=lambda item: json.dumps(item, sort_keys=True))
    return value


@pytest.mark.parametrize("component", [None, *COMPONENTS], ids=str)
def test_kustomize_and_helm_install_the_same(kube: Kube, tmp_path: Path, component: str | None) -> None:
    by_kustomize = kube.kustomize(overlay(tmp_path / "overlay", *([component] if component else [])))
    by_helm = kube.template(SWITCHES[component] if component else {})
    hashed = named(by_kustomize, "ConfigMap")["metadata"]["name"]
    assert re.fullmatch(r"nodefabric-[a-z0-9]{10}", hashed)
    assert comparable(by_kustomize, config_map=hashed) == comparable(by_helm)


def test_all_components_go_together(kube: Kube, tmp_path: Path) -> None:
    spec = pod(kube.kustomize(overlay(tmp_path / "overlay", *COMPONENTS)))
    assert {c["name"] for c in spec["containers"]} == {"agent", "cni-chain"}
    assert spec["runtimeClassName"] == "nvidia"
    assert {c["image"] for c in (*spec["containers"], *spec["initContainers"])} == {
        f"registry.example/nodefabric:{VERSION}"
    }


@pytest.mark.parametrize("name", ["h100-8gpu", "flat-vm-4gpu", "efa", "ib-dual-port", "mi300x-8gpu", "one-nic"])
def test_the_configuration_of_the_base_is_accepted_on_every_kind_of_node(name: str) -> None:
    check(base_config(), recorded_node(name))


def test_removing_is_the_same_by_kustomize_and_helm(kube: Kube) -> None:
    assert comparable(kube.kustomize(FOLDER / "remove")) == comparable(kube.template({"remove": True}))
