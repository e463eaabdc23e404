"""The rule about skipped tests, on a test run of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SKIPS = """
import pytest

def test_one():
    pytest.skip("no such device")

def test_two():
    pytest.skip("no such device")

@pytest.mark.xfail
def test_known():
    assert False
"""


def run_pytest(folder: Path, ci: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(SKIPS)
    (folder / "pytest.ini").write_text("[pytest]")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.skips", "-p", "no:cacheprovider", "--rootdir", folder, folder],
        env={**os.environ, "CI": ci, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_skip_is_told_once_for_each_reason_and_is_a_failure_in_ci(tmp_path: Path) -> None:
    run = run_pytest(tmp_path, "")
    assert run.returncode == 0
    assert run.stdout.count("NOT TESTED on this machine: 2 tests: no such device") == 1
    run = run_pytest(tmp_path, "true")
    assert run.returncode == 1
    assert "with CI=true nothing may be skipped: no such device" in run.stdout
    assert "2 failed, 1 xfailed" in run.stdout
