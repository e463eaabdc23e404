"""Ends a stream of the API server from another thread: its reader waits for a word that may come minutes later."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class Cutoff:
    """The end of one stream. `cut` may be called from any thread, at any time, and more than once."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._end: Callable[[], object] | None = None
        self.is_over = False

    def cut(self) -> None:
        """Let the reader come back at once; one that has not begun does not begin."""
        with self._guard:
            self.is_over = True
            if self._end is not None:
                with contextlib.suppress(OSError, RuntimeError, ValueError):  # it has ended by itself just now
                    self._end()

    @contextlib.contextmanager
    def ends(self, end: Callable[[], object]) -> Iterator[None]:
        """Have `end` called by `cut` while the block runs, and at once if that was before."""
        with self._guard:
            self._end = end
        if self.is_over:
            self.cut()
        try:
            yield
        finally:
            with self._guard:
                self._end = None
