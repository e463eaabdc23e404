from __future__ import annotations

import pytest

from agent.ledger import Ledger
from tests.agent.reconcile.scene import Scene


@pytest.fixture
def scene(books: Ledger) -> Scene:
    return Scene(books)
