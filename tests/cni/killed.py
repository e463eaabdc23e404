"""A process killed before each of the steps it tells of, one after the other."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import NoReturn

Step = Callable[[str], None]


def kill_at_each_step(folder: Path, work: Callable[[Step], object], prepare: Callable[[Path], None]) -> Iterator[Path]:
    """Fork, and work in a fresh folder, once for each step that `work` names; give out what the killed one left.

    Ends when one comes through; there must have been steps.
    """
    for number in count():
        place = folder / f"step-{number}"
        place.mkdir()
        prepare(place)
        child = os.fork()
        if child == 0:
            _work_until(number, place, work)
        status = os.waitpid(child, 0)[1]
        if status == 0:
            assert number > 1
            return
        assert os.WIFSIGNALED(status), "the work failed: see what it printed"
        yield place


def _work_until(steps: int, place: Path, work: Callable[[Step], object]) -> NoReturn:
    left = steps

    def step(name: str) -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    try:
        os.chdir(place)
        work(step)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
