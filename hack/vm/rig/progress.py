"""What the user is told meanwhile, and how much time is left."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rig.errors import TimedOut

HEARTBEAT_SECONDS = 10.0


def say(text: str) -> None:
    """Print a line on stderr; stdout is the command's alone."""
    print(f"vmrun: {text}", file=sys.stderr, flush=True)


@contextmanager
def step(what: str, quiet_seconds: float = 0.0) -> Iterator[None]:
    """Say what is under way (after `quiet_seconds`), and every ten seconds that it still is."""
    began = time.monotonic()
    over = threading.Event()

    def tell() -> None:
        if over.wait(quiet_seconds):
            return
        say(f"{what} ...")
        while not over.wait(HEARTBEAT_SECONDS):
            say(f"still {what}, {time.monotonic() - began:.0f} s")

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


@dataclass(frozen=True)
class Deadline:
    """A moment by which all must be done."""

    at: float
    seconds: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + seconds, seconds)

    def left(self) -> float:
        """Tell the seconds that are left. Raises TimedOut when there are none."""
        left = self.at - time.monotonic()
        if left <= 0:
            raise TimedOut(f"timed out after {self.seconds:.0f} s")
        return left

    def sooner(self, seconds: float) -> Deadline:
        """Make a deadline `seconds` from now that is no later than this one."""
        return Deadline.after(min(seconds, self.left()))
