"""Running the computer's own programs, with errors that say which one said what."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from rig.errors import RigError, TimedOut
from rig.progress import Deadline


class ProgramFailed(RigError):
    """A program ended with a status other than 0. `words` is what it printed."""

    def __init__(self, argv: Sequence[str], status: int, words: str) -> None:
        self.words = words
        tail = "\n".join(words.strip().splitlines()[-8:])
        super().__init__(f"{' '.join(argv)[:200]} ended with status {status}:\n{tail}")


def run(
    argv: Sequence[str | Path],
    deadline: Deadline,
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> str:
    """Run a program to its end and return what it printed on stdout.

    Raises ProgramFailed, or TimedOut when it is not done by the deadline.
    """
    words = [str(a) for a in argv]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            text=True,
            errors="replace",
            cwd=cwd,
            env={**os.environ, "LC_ALL": "C.UTF-8", **(env or {})},
            timeout=deadline.left(),
        )
    except subprocess.TimeoutExpired as error:
        raise TimedOut(f"{words[0]} was not done after {error.timeout:.0f} s") from error
    except FileNotFoundError as error:
        raise RigError(f"the program {words[0]} is missing") from error
    if done.returncode:
        raise ProgramFailed(words, done.returncode, done.stdout + done.stderr)
    return done.stdout
