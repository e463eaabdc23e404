"""Run a program to its end, with bounds on all that it may take, and leave nothing of it behind.

Neither limits nor control groups bound it where the agent runs: RLIMIT_NPROC does not count for root (setrlimit(2)),
the address space of a Go program says nothing of its memory, and a container's control groups are read-only. So it is
looked at while it runs.

Programs that run at once and the agent have one limit, that of the container. Where it is reached the kernel ends the
agent with them (memory.oom.group, which kubelet sets); so a program waits until there is room for it.
"""

from __future__ import annotations

import os
import resource
import secrets
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cni.ipam import processes
from cni.turns import NoPlace, NotWanted, always, wait_for

MAX_OUTPUT = 1 << 20
MAX_COMPLAINT = 64 << 10
"""Of stderr more is read and thrown away."""
MAX_PROCESSES = 32
"""At once. An IPAM plugin is one, or a script that runs some."""
MAX_MEMORY = 192 << 20
"""Of all processes of a program, and not counting what the kernel can read again from files."""
MAX_DATA = 512 << 20
"""Of each process alone, by the kernel, between two looks: RLIMIT_DATA. A Go program reserves 64 MiB at a time."""
LOOK_SECONDS, LOOK_SECONDS_LATER, LOOKS_OF_LIFE = 0.02, 0.2, 20
"""The first look, which most programs are too quick for, and the longest time until the next: between them, as long as
what part of its life so far gives so many looks."""
REAP_SECONDS = 2.0
"""A killed program that hangs in the kernel is waited for on a thread of its own after that."""
_CHUNK = 65536
AGENT_BYTES = 112 << 20
"""What the agent itself takes on a large node (README, Figures), and some."""
EXPECTED_BYTES = 48 << 20
"""Of a program that has just begun: those that talk to the API server take 45 MB."""
YOUNG_SECONDS = 2.0
"""Later it is counted as what it takes, so that two of these that wait for an API server that is away leave room for
another network's: those are as many as hang at once for addresses (`cni.ipam.leases`)."""
_UNLIMITED = 1 << 60


class OutOfTime(Exception):
    """The program did not end in time, and was killed with its children."""


class TooMuchOutput(Exception):
    """The program wrote more than MAX_OUTPUT, and was killed with its children."""


class OutOfBounds(Exception):
    """The program took more than it may, which the text says, and was killed with its children."""


def _allows(memory: int) -> bool:
    return memory <= MAX_MEMORY


@dataclass(frozen=True, slots=True)
class Around:
    """What a program has from who runs it."""

    descriptors: tuple[int, ...] = ()
    """What it keeps open for as long as it lives."""
    mark: str = ""
    """How the mark of its processes begins, see `processes`."""
    allows: Callable[[int], bool] = _allows
    """Tells whether it may take so many bytes of memory now."""
    is_wanted: Callable[[], bool] = always
    """Tells whether anybody waits for it."""


@dataclass(frozen=True, slots=True)
class Finished:
    status: int
    stdout: bytes
    stderr: bytes
    left: int = 0
    """How many processes it had left behind, which were killed."""


def run(program: Path, stdin: bytes, env: Mapping[str, str], seconds: float, around: Around | None = None) -> Finished:
    """Run a program. Raises OutOfTime, TooMuchOutput, OutOfBounds, NotWanted, and OSError if it cannot be started.

    Its end decides, not that of its pipes: what it leaves behind may hold them open, and is killed then. It is the
    leader of a process group, so that a kill reaches its children, which may hold a lease's lock.

    It writes into sockets. A pipe could be opened once more through /proc/self/fd, and be read for ever; a socket
    cannot be opened (ENXIO, open(2)). Its input is a pipe, since scripts read /dev/stdin.
    """
    around = around or Around()
    mark = f"{around.mark}:{secrets.token_hex(8)}"
    with ExitStack() as stack:
        outputs = [stack.enter_context(end) for end in socket.socketpair()]
        complaints = [stack.enter_context(end) for end in socket.socketpair()]
        process = subprocess.Popen(
            [str(program)],
            stdin=subprocess.PIPE,
            stdout=outputs[1].fileno(),
            stderr=complaints[1].fileno(),
            env={**env, processes.VARIABLE: mark},
            process_group=0,
            pass_fds=around.descriptors,
        )
        for ours, its in (outputs, complaints):
            its.close()
            ours.shutdown(socket.SHUT_WR)  # who reads from it is at the end
        family = processes.Tree(process.pid, mark)
        left = 0
        try:
            _limit(process.pid)
            streams = _Streams(process, (outputs[0], complaints[0]), stdin, stack)
            stdout, stderr = _exchange(streams, time.monotonic() + seconds, _Watch(family, around))
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
            raise
        finally:
            try:
                left = family.end()
            finally:
                _close(process.stdin)
                _reap(process)
        return Finished(process.returncode, stdout, stderr, left)


Clock = Callable[[], float]


class Room:
    """The memory there is, and who has it."""

    def __init__(self, total: int | None = None, clock: Clock = time.monotonic) -> None:
        """`total` is in bytes; None for no limit."""
        self._total = total
        self._clock = clock
        self._changed = threading.Condition()
        self._counted: dict[Place, int] = {}

    @classmethod
    def of_container(cls, root: Path = Path("/")) -> Room:
        """Make room for what the control group's limit leaves beside the agent: for one program in any case."""
        limit = memory_limit(root)
        return cls(None if limit is None else max(limit - AGENT_BYTES, EXPECTED_BYTES))

    @contextmanager
    def place(self, seconds: float, is_wanted: Callable[[], bool] = always) -> Iterator[Place]:
        """Wait until a program more has room, and keep that for it meanwhile. Raises NoPlace, and NotWanted."""
        with self._changed:
            if not wait_for(self._changed, self._has_room, seconds, is_wanted):
                raise NoPlace("the IPAM plugins at work leave no memory for another: raise the agent's limit")
            place = Place(self)
            self._counted[place] = EXPECTED_BYTES
        try:
            yield place
        finally:
            with self._changed:
                del self._counted[place]
                self._changed.notify_all()

    def _has_room(self) -> bool:
        return self._total is None or not self._counted or self._sum() + EXPECTED_BYTES <= self._total

    def _sum(self) -> int:
        return sum(self._counted.values())

    def count(self, place: Place, taken: int, age: float) -> bool:
        """Count a program as what it takes. Tell whether it may take that."""
        with self._changed:
            self._counted[place] = max(taken, EXPECTED_BYTES) if age < YOUNG_SECONDS else taken
            self._changed.notify_all()
            fits = self._total is None or taken <= EXPECTED_BYTES or self._sum() <= self._total
            return fits and taken <= MAX_MEMORY

    def now(self) -> float:
        """Return the time."""
        return self._clock()


class Place:
    """What is kept for one program."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._began = room.now()

    def allows(self, taken: int) -> bool:
        """Tell whether the program may take so many bytes now."""
        return self._room.count(self, taken, self._room.now() - self._began)


def memory_limit(root: Path = Path("/")) -> int | None:
    """Read the memory limit of this process's control group, in bytes; None for none (cgroups(7)).

    A container sees its own group at the top, where /proc may name it as the host does.
    """
    found = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            top = root / "sys/fs/cgroup" / controllers
            name = "memory.limit_in_bytes" if controllers else "memory.max"
            found += [*_lines(top / path.lstrip("/") / name), *_lines(top / name)]
    return min((int(text) for text in found if text.isdecimal() and int(text) < _UNLIMITED), default=None)


def _limit(pid: int) -> None:
    """Bound what a process and its children take, and have them go first where memory runs out all the same."""
    with suppress(OSError, ValueError):  # it may have ended
        resource.prlimit(pid, resource.RLIMIT_DATA, (MAX_DATA, MAX_DATA))
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")


def _exchange(streams: _Streams, deadline: float, watch: _Watch) -> tuple[bytes, bytes]:
    """Feed and read until the program has ended."""
    while not streams.ended:
        left = deadline - time.monotonic()
        if left <= 0:
            raise OutOfTime
        streams.serve(min(left, watch.look()))
    streams.drain()
    return bytes(streams.stdout), bytes(streams.stderr[:MAX_COMPLAINT])


class _Watch:
    """Looks at a program now and then."""

    def __init__(self, family: processes.Tree, around: Around) -> None:
        self._family = family
        self._around = around
        self._began = time.monotonic()
        self._due = self._began + LOOK_SECONDS

    def look(self) -> float:
        """Look if it is time. Returns in how many seconds it will be. Raises OutOfBounds, and NotWanted."""
        left = self._due - time.monotonic()
        if left > 0:
            return left
        if not self._around.is_wanted():
            raise NotWanted("the program was ended, since nobody waits for it any more")
        found = self._family.look()
        count = sum(not process.is_dead for process in found)
        if count > MAX_PROCESSES:
            raise OutOfBounds(f"ran {count} processes at once, and {MAX_PROCESSES} are allowed")
        taken = processes.memory(found)
        if not self._around.allows(taken):
            raise OutOfBounds(f"took {taken >> 20} MiB of memory, more than there is for it")
        now = time.monotonic()
        pause = min(max(LOOK_SECONDS, (now - self._began) / LOOKS_OF_LIFE), LOOK_SECONDS_LATER)
        self._due = now + pause
        return pause


class _Streams:
    """What a program reads and writes, and word of its end. What they hold is closed by `stack`."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        outputs: tuple[socket.socket, socket.socket],
        stdin: bytes,
        stack: ExitStack,
    ) -> None:
        assert process.stdin is not None
        self.ended = False
        self.stdout, self.stderr = bytearray(), bytearray()
        self._rest = memoryview(stdin)
        self._stdin = process.stdin
        self._outputs = {
            outputs[0].fileno(): (self.stdout, MAX_OUTPUT),
            outputs[1].fileno(): (self.stderr, MAX_COMPLAINT),
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
        """Read what an ended program has left to read. Raises TooMuchOutput."""
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


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
