"""Prometheus's own checks, and the names of metrics that are documented."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "daemonset/monitoring"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
PROMTOOL = CACHE / "nodefabric/promtool/promtool"


def promtool(*arguments: str | Path, folder: Path = MONITORING) -> str:
    """Run promtool, which hack/fetch-promtool puts into the user's cache."""
    if not PROMTOOL.exists():
        pytest.skip("no promtool: hack/fetch-promtool fetches it")
    done = subprocess.run([PROMTOOL, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def documented() -> set[str]:
    """List all names that docs/metrics.md has, with those that a histogram brings along."""
    found = set()
    for name, kind in re.findall(r"^\| `(\w+)` \| (\w+) \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE):
        found |= {f"{name}_{end}" for end in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    return found
