"""Run a program to its end, with bounds on its time and its output, and leave nothing of it behind."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

MAX_OUTPUT = 1 << 20
MAX_COMPLAINT = 64 << 10
"""Of stderr more is read and thrown away."""
REAP_SECONDS = 2.0
"""A killed program that hangs in the kernel is waited for on a thread of its own after that."""
_CHUNK = 65536


class OutOfTime(Exception):
    """The program did not end in time, and was killed with its children."""


class TooMuchOutput(Exception):
    """The program wrote more than MAX_OUTPUT, and was killed with its children."""


@dataclass(frozen=True, slots=True)
class Finished:
    status: int
    stdout: bytes
    stderr: bytes


def run(program: Path, stdin: bytes, env: Mapping[str, str], seconds: float, inherited: Iterable[int] = ()) -> Finished:
    """Run a program. Raises OutOfTime, TooMuchOutput, and OSError if it cannot be started.

    Its end decides, not that of its pipes: a daemon that it leaves behind may hold them open. It is the
    leader of a process group, so that a kill reaches its children, which may hold a lease's lock.
    """
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [str(program)], stdin=pipe, stdout=pipe, stderr=pipe, env=env, process_group=0, pass_fds=tuple(inherited)
    )
    try:
        stdout, stderr = _exchange(process, stdin, time.monotonic() + seconds)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
        raise
    finally:
        for stream in (process.stdin, process.stdout, process.stderr):
            _close(stream)
        _reap(process)
    return Finished(process.returncode, stdout, stderr)


def _exchange(process: subprocess.Popen[bytes], stdin: bytes, deadline: float) -> tuple[bytes, bytes]:
    """Feed and read until the program has ended."""
    with ExitStack() as stack:
        pipes = _Pipes(process, stdin, stack)
        while not pipes.ended:
            left = deadline - time.monotonic()
            if left <= 0:
                raise OutOfTime
            pipes.serve(left)
        pipes.drain()
    return bytes(pipes.stdout), bytes(pipes.stderr[:MAX_COMPLAINT])


class _Pipes:
    """A program's pipes, and word of its end. What they hold is closed by `stack`."""

    def __init__(self, process: subprocess.Popen[bytes], stdin: bytes, stack: ExitStack) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.ended = False
        self.stdout, self.stderr = bytearray(), bytearray()
        self._rest = memoryview(stdin)
        self._stdin = process.stdin
        self._outputs = {
            process.stdout.fileno(): (self.stdout, MAX_OUTPUT),
            process.stderr.fileno(): (self.stderr, MAX_COMPLAINT),
        }
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._end = os.pidfd_open(process.pid)
        stack.callback(os.close, self._end)
        self._selector.register(self._end, selectors.EVENT_READ)
        os.set_blocking(process.stdin.fileno(), False)
        self._selector.register(process.stdin, selectors.EVENT_WRITE)
        for descriptor in self._outputs:
            os.set_blocking(descriptor, False)
            self._selector.register(descriptor, selectors.EVENT_READ)

    def serve(self, seconds: float) -> None:
        """Wait for the program to read, to write or to end, and go along with it. Raises TooMuchOutput."""
        for key, _ in self._selector.select(seconds):
            if key.fd == self._end:
                self.ended = True
            elif key.fd not in self._outputs:
                self._feed()
            elif not _read(key.fd, *self._outputs[key.fd]):
                self._selector.unregister(key.fd)
        self._check()

    def drain(self) -> None:
        """Read what an ended program has left in its pipes. Raises TooMuchOutput."""
        for descriptor, (found, limit) in self._outputs.items():
            while len(found) <= limit and _read(descriptor, found, limit, waits=False):
                pass
        self._check()

    def _check(self) -> None:
        if len(self.stdout) > MAX_OUTPUT:
            raise TooMuchOutput

    def _feed(self) -> None:
        self._rest = _feed(self._stdin.fileno(), self._rest)
        if not self._rest:
            self._selector.unregister(self._stdin)
            _close(self._stdin)


def _read(descriptor: int, found: bytearray, limit: int, *, waits: bool = True) -> bool:
    """Read once. False at the end, or, without `waits`, where there is nothing now."""
    try:
        chunk = os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return waits
    if len(found) <= limit:
        found += chunk
    return bool(chunk)


def _feed(descriptor: int, rest: memoryview) -> memoryview:
    try:
        return rest[os.write(descriptor, rest) :] if rest else rest
    except BlockingIOError:
        return rest
    except BrokenPipeError:  # it does not care for its input
        return rest[:0]


def _close(stream: object) -> None:
    try:
        stream.close()  # type: ignore[attr-defined]
    except BrokenPipeError:
        return


def _reap(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(REAP_SECONDS)
    except subprocess.TimeoutExpired:
        threading.Thread(target=process.wait, name="reap", daemon=True).start()
