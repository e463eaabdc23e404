"""A program killed before each of the steps it tells of, one after the other."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PREAMBLE = """
import os, signal, sys
left = int(sys.argv[1])
def step(name):
    global left
    if left == 0:
        print(name, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
"""


def kill_at_each_step(folder: Path, script: str, prepare: Callable[[Path], None]) -> Iterator[Path]:
    """Run `script`, which calls `step`, in a fresh folder per step, and give out what the killed one left.

    Ends when a run comes through; there must have been steps.
    """
    number = 0
    while True:
        place = folder / f"step-{number}"
        place.mkdir()
        prepare(place)
        process = subprocess.run(
            [sys.executable, "-c", PREAMBLE + script, str(number)],
            cwd=place,
            env={"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        if process.returncode == 0:
            assert number > 1
            return
        assert process.returncode == -signal.SIGKILL, process.stderr
        yield place
        number += 1
