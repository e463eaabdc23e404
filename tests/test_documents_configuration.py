"""What docs/configuration.md shows is what the program prints."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent import config
from agent.__main__ import main
from agent.config import Select
from agent.config.resources import ENVIRONMENTS
from agent.edits.add_facts import GID_INDEXES, SOCKET_IFNAME
from agent.edits.build import build, helper_variables
from agent.model.device import Snapshot
from agent.offer.units import plain_offer
from tests.documents import blocks
from tests.node import node, pci

REPOSITORY = Path(__file__).parents[1]


@pytest.mark.parametrize(("document", "status"), [("configuration", 5), ("rails", 0)])
def test_the_example_comes_to_what_is_shown(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    document: str,
    status: int,
) -> None:
    text = (REPOSITORY / f"docs/{document}.md").read_text()
    example = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)[0]
    (shown,) = re.findall(r"```\n(config.yaml is sound\n.*?)```", text, re.DOTALL)
    (tmp_path / "config.yaml").write_text(example)
    monkeypatch.chdir(tmp_path)
    assert main(["check-config", "--node", "h100-8gpu", "config.yaml"]) == status
    lines_left_out = r"(?:.+\n)+"
    assert re.fullmatch(lines_left_out.join(map(re.escape, re.split(r" *…\n", shown))), capsys.readouterr().out)


@pytest.mark.parametrize("node_name", ["h100-8gpu", "mi300x-8gpu"])
def test_one_configuration_serves_nodes_with_gpus_of_either_vendor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], node_name: str
) -> None:
    (example,) = [text for text in blocks(REPOSITORY / "docs/late-binding.md", "yaml") if "isRdma: true" in text]
    (tmp_path / "config.yaml").write_text(example)
    assert main(["check-config", "--node", node_name, str(tmp_path / "config.yaml")]) == 0
    assert "network rails: 8 networks" in capsys.readouterr().out


def test_an_accelerator_brings_the_files_by_which_a_program_drives_it() -> None:
    (example,) = [text for text in blocks(REPOSITORY / "docs/late-binding.md", "yaml") if "accelerator" in text]
    (resource,) = config.parse(example, "docs/late-binding.md").resources
    ids: dict[str, Any] = {"pci_class": 0x120000, "vendor": 0x10EE, "driver": "vfio-pci", "iommu_group": 7}
    device = pci("0000:c1:00.0", ("pci0000:c0",), **ids)
    snapshot = Snapshot(devices=(device,))
    units = plain_offer([resource], snapshot).offered[resource.name]
    assert [unit.unit_id for unit in units] == ["0000:c1:00.0"]
    assert [node.path for node in build(resource, units, snapshot).devices] == ["/dev/vfio/vfio", "/dev/vfio/7"]
    bare = replace(device, driver="xocl", iommu_group=None)
    anyone = replace(resource, select=Select())
    units = plain_offer([anyone], Snapshot(devices=(bare,))).offered[anyone.name]
    assert build(anyone, units, Snapshot(devices=(bare,))).devices == ()


def test_the_variables_are_those_that_are_set() -> None:
    text = (REPOSITORY / "docs/libraries.md").read_text()
    rows = dict(
        re.findall(
            r"^\| `(\w+)`[^|]*\| (.*) \|$", text.partition("| word | when")[2].partition("\n\n")[0], re.MULTILINE
        )
    )
    assert set(rows) == set(ENVIRONMENTS)
    hca = next(d for d in node(rails=1).devices if d.rdma_devices).rdma_devices
    for word, cell in rows.items():
        names = [name for name, _ in helper_variables([word], hca)]
        late = [found[name] for found in (GID_INDEXES, SOCKET_IFNAME) for name in names if name in found]
        assert {*names, *late} == set(re.findall(r"`(\w+)=", cell))
