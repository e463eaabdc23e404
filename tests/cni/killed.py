"""A process killed before each of the changes it makes to files, one after the other."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

CHANGES = ("write", "fchmod", "fsync", "rename", "symlink", "link", "unlink")
"""Functions of `os`."""


def kill_at_each_step(folder: Path, work: Callable[[], object], prepare: Callable[[Path], None]) -> Iterator[Path]:
    """Fork, and work in a fresh folder, once for each change that `work` makes; give out what the killed one left.

    Ends when one comes through; there must have been changes.
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


def _work_until(steps: int, place: Path, work: Callable[[], object]) -> NoReturn:
    left = iter(range(steps))

    def killed_or(change: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **named: Any) -> Any:
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return change(*args, **named)

        return called

    try:
        os.chdir(place)
        for name in CHANGES:
            setattr(os, name, killed_or(getattr(os, name)))
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
