from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_described_nodes_are_the_committed_ones(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "hack/make-nodes", tmp_path], check=True, capture_output=True)
    made = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert set(made) == {p.name for p in (ROOT / "tests/nodes").glob("*.json")}
    for name, content in made.items():
        assert (ROOT / "tests/nodes" / name).read_bytes() == content, f"{name} differs: run hack/make-nodes"
