"""What scripts show of commands that take long, and what becomes of these."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.waiting import until

PROGRESS = Path(__file__).parents[2] / "hack/progress"


def script(text: str) -> list[str]:
    """Make a command of a script that reads hack/progress. Ctrl-C ends it, though it may not end who runs the tests."""
    return ["env", "--default-signal=INT", "sh", "-euc", f". {PROGRESS}\n{text}"]


def run(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.run(script(text), env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("failing", ["sh -c 'echo why; exit 7'", "step"])
def test_the_output_of_what_fails_is_shown_and_ends_the_script(failing: str, tmp_path: Path) -> None:
    """A function of a script that ends at errors ends at its first one, too."""
    done = run(f"step() {{ (echo why; exit 7); echo on; }}; progress 'a step' {failing}; echo after", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (7, "a step  failed\n", "why\n")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_ends_the_command_too(tmp_path: Path) -> None:
    """Else what was begun goes on alone, and a second try runs into it."""
    mark = tmp_path / "pid"
    text = f"step() {{ sh -c 'echo $$ >{mark}; exec sleep 300'; }}; progress 'a step' step"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(script(text), env=environment, stdout=subprocess.PIPE, start_new_session=True) as running:
        until(lambda: mark.exists() and mark.read_text().endswith("\n"))
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does at Ctrl-C
        assert running.wait() != 0
    until(lambda: not Path(f"/proc/{int(mark.read_text())}").exists())
    until(lambda: list(tmp_path.iterdir()) == [mark])
