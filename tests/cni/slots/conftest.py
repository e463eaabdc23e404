from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cni.slots.binding import Rig, snapshot_with_rdma, stock_of
from tests.node import open_books


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with open_books(tmp_path) as books:
        yield Rig(tmp_path, books, stock_of(snapshot_with_rdma()))
