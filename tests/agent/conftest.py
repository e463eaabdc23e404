"""Books, and recorded nodes, for all tests of the agent: laid out on disk once per run, and as snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.hardware import recorded
from agent.ledger import Ledger
from agent.model.device import Snapshot
from tests.node import open_books, recorded_node


@pytest.fixture(scope="session")
def node_root(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Give the folder of a modelled node. It is shared: do not change it."""
    made: dict[str, Path] = {}

    def root(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            recorded.unpack(recorded.load(recorded.find(name)), made[name])
        return made[name]

    return root


@pytest.fixture(scope="session")
def node_snapshot() -> Callable[[str], Snapshot]:
    """Give the snapshot of a modelled node, GPUs included."""
    return recorded_node


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Ledger]:
    """Open books in the test's folder."""
    with open_books(tmp_path) as books:
        yield books
