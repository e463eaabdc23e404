from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.books import open_books
from tests.agent.reconcile.scene import Scene


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with open_books(tmp_path) as books:
        yield Scene(books)
