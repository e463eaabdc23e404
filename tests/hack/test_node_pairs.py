"""What public documents say of the modelled nodes: each has such a file, which fits it."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from agent.hardware import recorded
from agent.hardware.sysfs.scan import scan
from agent.model.device import Snapshot
from hack import node_pairs


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
