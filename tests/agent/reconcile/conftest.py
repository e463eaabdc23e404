from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.reconcile.scene import Scene
from tests.node import open_books


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with open_books(tmp_path) as books:
        yield Scene(books)
