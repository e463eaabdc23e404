"""What public documents say of the modelled nodes: each has such a file, which fits it, and wrong files are refused."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.errors import ConfigError
from agent.hardware import recorded
from agent.hardware.sysfs.scan import scan
from agent.model.device import Snapshot
from hack import node_pairs

GOOD: dict[str, Any] = {
    "pairs": {"0000:05:00.0": ["0000:03:00.0"]},
    "sources": [{"title": "A guide", "url": "https://example.com/guide"}],
    "says": "GPU and NIC are below one switch.",
}


def snapshot_of(name: str) -> Snapshot:
    node = recorded.load(recorded.find(name))
    with tempfile.TemporaryDirectory() as folder:
        recorded.unpack(node, Path(folder))
        return replace(scan(Path(folder)), gpus=node.gpus)


@pytest.mark.parametrize("name", recorded.names())
def test_every_model_says_what_documents_tell_of_it_and_the_pairs_are_on_it(name: str) -> None:
    pairs = node_pairs.load(node_pairs.beside(recorded.find(name)))
    assert not pairs.nics or node_pairs.misfits(pairs, snapshot_of(name)) == []
    assert pairs.sources or not (pairs.nics or pairs.unknown)


def test_no_pairs_file_is_left_of_a_model_that_is_gone() -> None:
    folder = recorded.find("one-nic").parent
    assert {p.name.removesuffix(node_pairs.SUFFIX) for p in folder.glob("*.yaml")} == set(recorded.names())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"pairs": None}, "pairs: must be unknown, none, or NICs by GPU, is None"),
        ({"pairs": {}}, "pairs: must be unknown, none"),
        ({"pairs": {"gpu0": ["0000:03:00.0"]}}, "pairs.gpu0: must be a PCI address"),
        ({"pairs": {"0000:05:00.0": "0000:03:00.0"}}, "pairs.0000:05:00.0: must be a PCI address with a list"),
        ({"sources": None}, "sources: must be a list"),
        ({"sources": [{"title": "A guide", "url": "from a friend"}]}, "sources: must be a list"),
        ({"says": " "}, "says: must say"),
        ({"url": "https://example.com"}, "url: is not a known key"),
    ],
)
def test_what_is_wrong_in_a_pairs_file_is_named(change: dict[str, Any], problem: str) -> None:
    node_pairs.parse(GOOD, "good")
    with pytest.raises(ConfigError) as caught:
        node_pairs.parse(GOOD | change, "bad")
    assert [text for text in caught.value.problems if text.startswith(problem)], caught.value.problems


def test_pairs_that_the_node_does_not_have_are_listed() -> None:
    file = node_pairs.beside(recorded.find("gb300-4gpu"))
    document = yaml.safe_load(file.read_text())
    document["pairs"]["0000:03:00.0"] = document["pairs"].pop("0009:06:00.0")
    found = node_pairs.misfits(node_pairs.parse(document, "moved"), snapshot_of("gb300-4gpu"))
    assert found == ["0000:03:00.0 is no GPU of the node", "0009:06:00.0 has no NICs"]


def test_a_node_without_a_pairs_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mine\.pairs\.yaml: cannot be read: .*: write it"):
        node_pairs.load(node_pairs.beside(tmp_path / "mine.json"))
