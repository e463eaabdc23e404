"""What public documents say of the modelled nodes: each has such a file, which fits it."""

from __future__ import annotations

import pytest

from agent.hardware import recorded
from hack import node_pairs
from tests.node import recorded_node


@pytest.mark.parametrize("name", recorded.names())
def test_every_model_says_what_documents_tell_of_it_and_the_pairs_are_on_it(name: str) -> None:
    pairs = node_pairs.load(node_pairs.beside(recorded.find(name)))
    assert not pairs.nics or node_pairs.misfits(pairs, recorded_node(name)) == []
    assert pairs.sources or not (pairs.nics or pairs.unknown)


def test_no_pairs_file_is_left_of_a_model_that_is_gone() -> None:
    folder = recorded.find("one-nic").parent
    assert {p.name.removesuffix(node_pairs.SUFFIX) for p in folder.glob("*.yaml")} == set(recorded.names())
