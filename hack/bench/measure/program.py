"""Programs timed from exec to exit, all of them in the same way."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Run:
    milliseconds: float
    """From before posix_spawn(3) to after wait4(2)."""
    began: float
    """When it was started, as time.perf_counter tells."""
    status: int
    output: bytes


class Program:
    """An executable. Its streams are files in memory, so that nothing but the program itself takes time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stdin = os.memfd_create("stdin")
        self._stdout = os.memfd_create("stdout")

    def close(self) -> None:
        """Let go of the streams."""
        os.close(self._stdin)
        os.close(self._stdout)

    def run(self, environment: Mapping[str, str], stdin: bytes) -> Run:
        """Run it once, in the calling thread's network namespace, and wait for its end."""
        for descriptor, content in ((self._stdin, stdin), (self._stdout, b"")):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, content, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
        actions = [(os.POSIX_SPAWN_DUP2, self._stdin, 0), (os.POSIX_SPAWN_DUP2, self._stdout, 1)]
        path, arguments = os.fspath(self.path), [self.path.name]
        began = time.perf_counter()
        pid = os.posix_spawn(path, arguments, environment, file_actions=actions)
        _, status, _ = os.wait4(pid, 0)
        ended = time.perf_counter()
        size = os.fstat(self._stdout).st_size
        output = os.pread(self._stdout, size, 0)
        return Run((ended - began) * 1000, began, os.waitstatus_to_exitcode(status), output)

    @contextmanager
    def waiting(self, environment: Mapping[str, str]) -> Iterator[None]:
        """Have it run meanwhile, waiting for its input, and kill it."""
        reading, writing = os.pipe()
        try:
            actions = [(os.POSIX_SPAWN_DUP2, reading, 0), (os.POSIX_SPAWN_DUP2, self._stdout, 1)]
            pid = os.posix_spawn(os.fspath(self.path), [self.path.name], environment, file_actions=actions)
            try:
                yield
            finally:
                os.kill(pid, signal.SIGKILL)
                os.wait4(pid, 0)
        finally:
            os.close(reading)
            os.close(writing)
