"""Work that a thread of its own does, and whose end is awaited for a bounded time.

A write to sysfs that hangs in the kernel cannot be ended. Who waits for it must be able to go on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class Beside(threading.Thread):
    """One piece of work. Ends with the process, whatever it waits for."""

    def __init__(self, what: str, work: Callable[[], None]) -> None:
        """`what` is for the log, where nobody waits any more for what `work` raises."""
        super().__init__(name="beside", daemon=True)
        self._what = what
        self._work = work
        self._error: BaseException | None = None
        self._guard = threading.Lock()
        self._is_over = self._is_late = False

    def run(self) -> None:
        """Do the work."""
        error: BaseException | None = None
        try:
            self._work()
        except BaseException as caught:
            error = caught
        with self._guard:
            self._error, self._is_over = error, True
            is_late = self._is_late
        if is_late and error is None:
            log.warning("%s is done at last", self._what)
        elif is_late:
            log.error("%s has failed at last: %s", self._what, error)

    def is_over(self, seconds: float) -> bool:
        """Wait so long for the end. Raises what the work has raised."""
        self.join(seconds)
        with self._guard:
            self._is_late = not self._is_over
        if self._error is not None:
            raise self._error
        return not self._is_late
