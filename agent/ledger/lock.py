"""One agent at a time works with the books."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from agent.errors import LedgerError, LedgerInUse

NAME = "agent.lock"


def claim(folder: Path) -> int:
    """Make the state folder this process's alone, until the descriptor is closed.

    A second agent would take what the first has half done for the remains of a crash, and undo it.
    Raises LedgerInUse, and LedgerError if the folder cannot be used.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LedgerInUse(f"{folder} is in use by another agent: stop it, or set another stateDir") from error
        except OSError as error:
            raise LedgerError(f"{folder} cannot be used: {error.strerror}: mount a writable folder there") from error
        stack.pop_all()
        return lock


def is_claimed(folder: Path) -> bool:
    """Tell whether an agent works with the books of this folder, without disturbing it."""
    try:
        lock = os.open(folder / NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
    return False
