"""A disk of a few pages, or a read-only one, for a test."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def disk(folder: Path, options: str) -> Iterator[None]:
    """Mount a tmpfs with these options on a new folder. Skips the test where that may not be done."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "nodefabric-test", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted ({mounted.stderr.strip()})")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)
