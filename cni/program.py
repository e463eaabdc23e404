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
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    rest = memoryview(stdin)
    read: dict[int, bytearray] = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    limits = {process.stdout.fileno(): MAX_OUTPUT, process.stderr.fileno(): MAX_COMPLAINT}
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        end = os.pidfd_open(process.pid)
        stack.callback(os.close, end)
        selector.register(end, selectors.EVENT_READ)
        os.set_blocking(process.stdin.fileno(), False)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        for descriptor in read:
            os.set_blocking(descriptor, False)
            selector.register(descriptor, selectors.EVENT_READ)
        ended = False
        while not ended:
            left = deadline - time.monotonic()
            if left <= 0:
                raise OutOfTime
            for key, _ in selector.select(left):
                if key.fd == end:
                    ended = True
                elif key.fd in read:
                    if not _read(key.fd, read[key.fd], limits[key.fd]):
                        selector.unregister(key.fd)
                else:
                    rest = _feed(key.fd, rest)
                    if not rest:
                        selector.unregister(process.stdin)
                        _close(process.stdin)
            if len(read[process.stdout.fileno()]) > MAX_OUTPUT:
                raise TooMuchOutput
        for descriptor, found in read.items():
            while len(found) <= limits[descriptor] and _read(descriptor, found, limits[descriptor], waits=False):
                pass
    if len(read[process.stdout.fileno()]) > MAX_OUTPUT:
        raise TooMuchOutput
    return bytes(read[process.stdout.fileno()]), bytes(read[process.stderr.fileno()][:MAX_COMPLAINT])


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
