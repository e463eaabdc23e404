"""The long run as `make soak` begins it: a part runs by itself, and what it found is in the report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_a_run_in_which_nothing_was_tried_is_wrong(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.soak", "--report", str(tmp_path / "soak.json"), "--only", "crash"]
    done = subprocess.run([*command, "--scenario", "no such"], check=False, capture_output=True, text=True)
    found = json.loads((tmp_path / "soak.json").read_text())
    assert (done.returncode, found["crash_points"], found["unfinished"]) == (1, 0, [])
    assert found["problems"] == ["there is no fault point to try"]
    assert [path.name for path in tmp_path.iterdir()] == ["soak.json"]
