from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose name leaves room for socket names: a socket's path has at most 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="nf-"))
    yield path
    shutil.rmtree(path)
