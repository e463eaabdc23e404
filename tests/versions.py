"""The files that earlier versions left, unpacked: see tests/agent/ledger/versions/README.md."""

from __future__ import annotations

import tarfile
from pathlib import Path

FOLDER = Path(__file__).parent / "agent/ledger/versions"
FIRST, EARLY, WITH_PODS = "75949a5", "3d3979d", "08c9993"
BEFORE_HOLDS = "8e204f4"


def unpack(version: str, folder: Path) -> Path:
    """Put what a version left into a folder, and return that."""
    with tarfile.open(FOLDER / f"{version}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder
