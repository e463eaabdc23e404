"""Whatever plays a file or an answer of kubelet's or the API server's names where its shape comes from."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
OWN = ("agent", "demo", "demo_claims", "fabric", "machine", "pods", "rdma", "runtime", "stage")
"""Of `hack/sim`: they play hardware, the kernel or the runtime, or are our own."""
PLAYED = [
    *(path for path in (ROOT / "hack/sim").glob("*.py") if path.stem not in (*OWN, "uevents", "__init__")),
    *(ROOT / "hack/sim/dra").glob("*.py"),
    *(path for path in (ROOT / "hack/sim/cluster").glob("*.py") if path.stem != "__init__"),
    *(ROOT / "hack/sim/cluster/dra").glob("*.py"),
]


@pytest.mark.parametrize("path", sorted(PLAYED), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_stand_in_names_the_source_of_its_shapes(path: Path) -> None:
    said = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert "pkg/" in said or "staging/src/k8s.io" in said
