"""The way of a new user, and of one who comes from other components: what the guides tell to do is done here."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from agent import config
from agent.__main__ import _parser
from agent.process.startup import check
from tests.daemonset.manifests import (
    CHART,
    COMPONENTS,
    FOLDER,
    RELEASED,
    REPOSITORY,
    VERSION,
    Document,
    Kube,
    container,
    identity,
    named,
    overlay,
    pod,
)
from tests.deviceplugin.dra.nodes import recorded_node
from tests.documents import blocks, first_cells

INSTALL = REPOSITORY / "docs/install.md"
DRA = REPOSITORY / "docs/dra.md"
GUIDES = [INSTALL, DRA, *sorted((REPOSITORY / "docs/migrate").glob("*.md")), FOLDER / "examples/README.md"]
COMMANDS = [
    (path, line)
    for path in GUIDES
    for line in re.findall(r"^ {4,}((?:helm|nodefabric|kubectl) .+)$", path.read_text(), re.MULTILINE)
]


def block(path: Path, beginning: str) -> Document:
    (text,) = [text for text in blocks(path, "yaml") if text.lstrip().startswith(beginning)]
    document: Document = yaml.safe_load(text)
    return document


@pytest.mark.parametrize(("path", "line"), COMMANDS, ids=lambda v: v.stem if isinstance(v, Path) else v[:60])
def test_every_command_of_a_guide_is_understood(kube: Kube, path: Path, line: str, tmp_path: Path) -> None:
    words = shlex.split(line.partition("#")[0].partition(">")[0])
    if words[0] == "nodefabric":
        _parser().parse_args(words[1:])
    elif words[:2] == ["helm", "upgrade"]:
        options = [word for word in words[2:] if word not in ("--install", "--reuse-values")]
        for positional in ("nodefabric", f"oci://{RELEASED.rpartition('/')[0]}/charts/nodefabric"):
            options.remove(positional)
        if "--values" in options:
            at = options.index("--values")
            del options[at : at + 2]
        (tmp_path / "config.json").write_text('{"resourceList": []}')
        options = [word.replace("=config.json", f"={tmp_path}/config.json") for word in options]
        done = kube.run("helm", "template", "nodefabric", CHART, *options)
        assert done.returncode == 0, done.stderr
    else:
        done = kube.run(words[0], *words[1 : 3 if words[1] in ("-n", "rollout") else 2], "--help")
        assert done.returncode == 0, done.stderr


def test_the_values_of_the_guide_install_and_their_configuration_is_sound(kube: Kube) -> None:
    found = kube.template(block(INSTALL, "# values.yaml"))
    parsed = config.parse(named(found, "ConfigMap")["data"]["config.yaml"], "docs/install.md")
    check(parsed, recorded_node("h100-8gpu"))
    assert {c["name"] for c in pod(found)["containers"]} == {"agent", "cni-chain"}
    assert container(pod(found), "agent")["image"] == f"{RELEASED}:{VERSION}"


def test_the_overlay_of_the_guide_installs_what_its_values_do(kube: Kube, tmp_path: Path) -> None:
    told = block(INSTALL, "# OVERLAY/kustomization.yaml")
    components = [Path(component).name for component in told["components"]]
    values = block(INSTALL, "# values.yaml")
    folder = overlay(tmp_path / "overlay", *components, config_text=yaml.safe_dump(values["config"]))
    written = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert {key: written[key] for key in ("configMapGenerator",)} == {"configMapGenerator": told["configMapGenerator"]}
    assert told["images"][0].keys() == written["images"][0].keys()
    by_kustomize, by_helm = kube.kustomize(folder), kube.template({**values, "config": {"topology": {"publish": True}}})
    kinds = {"ConfigMap", "Namespace"}
    assert {identity(d) for d in by_kustomize if d["kind"] not in kinds} == {
        identity(d) for d in by_helm if d["kind"] not in kinds
    }


def test_the_table_of_components_has_all_of_them() -> None:
    listed = [name for cell in first_cells(INSTALL, "component") for name in re.findall(r"`([^`]+)`", cell)]
    assert sorted(listed) == COMPONENTS


def test_every_component_that_can_be_replaced_has_a_page_with_the_way_back() -> None:
    folder = REPOSITORY / "docs/migrate"
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", (folder / "README.md").read_text()))
    assert listed == {p.name for p in folder.glob("*.md")} - {"README.md"}
    assert len(listed - {"claims.md"}) == 10
    for name in listed:
        text = (folder / name).read_text()
        for part in ("**Delete**", "**Stays**", "## Change over", "**Back**"):
            assert part in text, (name, part)


@pytest.mark.parametrize("components", [(), ("chain",)], ids=["base", "chain"])
def test_the_patch_for_a_replaced_plugins_file_tells_the_agent_and_nobody_else(
    kube: Kube, components: tuple[str, ...], tmp_path: Path
) -> None:
    told = block(REPOSITORY / "docs/migrate/sriov-network-device-plugin.md", "patches:")
    folder = overlay(tmp_path / "overlay", *components)
    written = yaml.safe_load((folder / "kustomization.yaml").read_text())
    before = _arguments(kube.kustomize(folder))
    (folder / "kustomization.yaml").write_text(yaml.safe_dump({**written, **told}))
    after = _arguments(kube.kustomize(folder))
    assert after == {**before, "agent": [*before["agent"], "--sriov-config=/etc/nodefabric/sriov.json"]}
    assert _parser().parse_args(after["agent"]).sriov_config == Path("/etc/nodefabric/sriov.json")


def _arguments(documents: list[Document]) -> dict[str, list[str]]:
    return {c["name"]: c["args"] for c in pod(documents)["containers"]}


def test_metrics_and_settings_that_the_guides_name_exist() -> None:
    text = "".join(path.read_text() for path in (*GUIDES, REPOSITORY / "README.md"))
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for name in re.findall(r"`((?:podMonitor|prometheusRule|dashboard|admissionPolicy|nvidia)\.\w+)", text):
        section, _, key = name.partition(".")
        assert key in values[section], name
    schema = (REPOSITORY / "docs/config.schema.json").read_text()
    of_agent = json.loads(schema)["properties"]["cni"]["properties"]
    for name in re.findall(r"`cni\.([\w.]+)", text):
        assert name in {*values["cni"], *of_agent}, name
    for name in re.findall(r"`config\.((?!yaml)[\w.]+)", text):
        for key in name.split("."):
            assert f'"{key}"' in schema, name
