"""What README.md and its like say of keys, commands, files and targets is so."""

from __future__ import annotations

import argparse
import re
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from agent import config
from agent.__main__ import _parser
from agent.config.networks import REPLACED
from agent.config.removed_keys import OF_OTHER_PLUGINS
from agent.errors import RequestInvalid
from agent.hardware import recorded
from agent.process.startup import check
from cni import netconf, protocol
from hack.sim.machine import SimulatedMachine
from tests.documents import blocks, first_cells, headings

REPOSITORY = Path(__file__).parents[1]
README, CONTRIBUTING, CNI = (REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "docs/cni.md"))
CHANGELOG, SECURITY = REPOSITORY / "CHANGELOG.md", REPOSITORY / "SECURITY.md"
DOCUMENTS = [README, CONTRIBUTING, CHANGELOG, SECURITY, *sorted((REPOSITORY / "docs").rglob("*.md"))]
DOCUMENTS += [REPOSITORY / "daemonset/examples/README.md", *sorted((REPOSITORY / "hack/bench").glob("*.md"))]
DOCUMENTS += [REPOSITORY / "hack/vm/README.md"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_every_link_leads_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        name, _, anchor = target.partition("#")
        if "://" in name:
            continue
        found = path.parent / name if name else path
        assert found.exists(), target
        assert not anchor or anchor in headings(found), target


@pytest.mark.parametrize("path", DOCUMENTS[:-1], ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_every_path_of_the_repository_that_is_named_is_there(path: Path) -> None:
    folders = "agent|cni|daemonset|deviceplugin|docs|hack|proto|requirements|tests"
    for name in re.findall(rf"`(?:PATH/)?((?:{folders})/[\w./*-]*)`", path.read_text()):
        assert list(REPOSITORY.glob(name.rstrip("/"))), name


@pytest.mark.parametrize("path", [README, CONTRIBUTING], ids=lambda p: p.name)
def test_every_make_target_that_is_named_is_there(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^    |`)make ([a-z-]+)", path.read_text(), re.MULTILINE)) <= targets


def test_the_readme_lists_all_commands() -> None:
    (commands,) = (action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
    named = [cell.strip("`").split()[1] for cell in first_cells(README, "command")]
    assert sorted(named) == sorted(commands.choices)


def test_the_example_configuration_is_accepted(tmp_path: Path) -> None:
    (example,) = [text for text in blocks(README, "yaml") if text.startswith("resources:\n")]
    SimulatedMachine.create(tmp_path / "node", recorded.load(recorded.find("h100-8gpu")), with_links=False)
    with closing(SimulatedMachine.open(tmp_path / "node")) as host:
        check(config.parse(example, "README.md"), host.scan())


def test_the_table_of_cni_keys_has_all_that_are_known_and_no_other() -> None:
    with pytest.raises(RequestInvalid, match="known are: ") as refused:
        netconf.from_document({"cniVersion": "1.0.0", "name": "n", "type": "nodefabric", "noSuchKey": 1})
    known = set(str(refused.value).partition("known are: ")[2].split(", "))
    cells = first_cells(CNI, "key of type `nodefabric`")
    named = {key for cell in cells for key in re.findall(r"`([^`]+)`", cell) if "." not in key}
    of_every_plugin = {"cniVersion", "name", "type", "args", "runtimeConfig", "prevResult"}
    assert named == known - of_every_plugin - {key for key in known if key.startswith("cni.dev/")}


def test_the_table_of_replaced_plugins_and_the_codes_are_those_of_the_program() -> None:
    assert tuple(cell.strip("`") for cell in first_cells(CNI, "type")) == REPLACED
    text = CNI.read_text()
    for code in (protocol.HARDWARE_FAILED, protocol.IPAM_FAILED, protocol.LEDGER_FAILED, protocol.CHECK_FAILED):
        assert re.search(rf"\b{code} ", text)


def test_each_key_of_sriov_network_device_plugins_file_that_is_known_has_its_row() -> None:
    cells = first_cells(REPOSITORY / "docs/migrate/sriov-network-device-plugin.md", "its key")
    known = {key for key, text in OF_OTHER_PLUGINS.items() if "sriov-network-device-plugin" in text}
    assert {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)} == known


def test_the_patch_that_replaces_plugins_fits_the_daemonset() -> None:
    (text,) = (text for text in blocks(CNI, "yaml") if text.lstrip().startswith("patches:"))
    (patch,) = yaml.safe_load(text)["patches"]
    (daemonset,) = yaml.safe_load_all((REPOSITORY / "daemonset/base/daemonset.yaml").read_text())
    arguments = daemonset["spec"]["template"]["spec"]["initContainers"][0]["args"]
    for step in yaml.safe_load(patch["patch"]):
        assert (step["op"], step["path"]) == ("add", "/spec/template/spec/initContainers/0/args/-")
        arguments.append(step["value"])
    options = _parser().parse_args(arguments)
    assert options.force
    assert set(options.replace) <= set(REPLACED)
    assert patch["target"]["name"] == daemonset["metadata"]["name"]
