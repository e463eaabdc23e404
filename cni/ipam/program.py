"""Run a program with bounds on what it may take, and leave no process of it behind.

Where the agent runs nothing else bounds it: a container's control groups are read-only, and RLIMIT_NPROC does not count
for root (setrlimit(2)). Where the container's memory runs out the kernel ends the agent too (memory.oom.group, which
kubelet sets). So the agent looks at a program while it runs. A process may leave its parent, group and session, but it
keeps the environment that it was started with (proc_pid_environ(5)): each program has a mark there.
"""

from __future__ import annotations

import fcntl
import os
import resource
import secrets
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cni.call_limits import NoTurn, NotWanted, always, wait_for

VARIABLE = "NODEFABRIC_PROGRAM"
MAX_OUTPUT = 1 << 20
"""Of stdout and stderr, each. A program that writes more is told so by the kernel."""
MAX_PROCESSES = 32
"""At once. An IPAM plugin is one, or a script that runs some."""
MAX_MEMORY = 192 << 20
"""Of all processes of a program, and not counting what the kernel can read again from files."""
MAX_DATA = 512 << 20
"""Of each process alone, by the kernel, between two looks: RLIMIT_DATA. A Go program reserves 64 MiB at a time."""
LOOK_SECONDS, LOOK_SECONDS_LATER, LOOKS_OF_LIFE = 0.02, 0.2, 20
"""The first look, which most programs are too quick for, and the longest time until the next: between them, as long as
what part of its life so far gives so many looks."""
END_SECONDS = 2.0
"""A killed program that hangs in the kernel is waited for on a thread of its own after that."""
AGENT_BYTES = 112 << 20
"""What the agent itself takes on a large node (README, Figures), and some."""
EXPECTED_BYTES = 48 << 20
"""Of a program that has just begun: those that talk to the API server take 45 MB."""
YOUNG_SECONDS = 2.0
"""Later it is counted as what it takes, so that two that wait for an API server that is away leave room for another
network's: as many hang at once for addresses (`cni.ipam.leases`)."""
NO_LIMIT = 1 << 60
_PAUSE_SECONDS = 0.002
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MAX_ENVIRONMENT = 256 << 10


class OutOfBounds(Exception):
    """The program took more time or room than it may, which the text says, and was killed with its children."""


def _allows(memory: int) -> bool:
    return memory <= MAX_MEMORY


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a program may take, beside its time."""

    owner: str = ""
    """Whose program it is, for `end_all`."""
    allows: Callable[[int], bool] = _allows
    """Returns whether it may take so many bytes of memory now."""
    is_wanted: Callable[[], bool] = always
    """Returns whether anybody waits for it."""


@dataclass(frozen=True, slots=True)
class Finished:
    status: int
    stdout: bytes
    stderr: bytes
    left: int
    """How many processes it had left behind, which were killed."""


def run(program: Path, stdin: bytes, env: Mapping[str, str], seconds: float, bounds: Bounds | None = None) -> Finished:
    """Run a program. Raises OutOfBounds, NotWanted, and OSError if it cannot be started.

    Its end decides, not that of its output: what it leaves behind may hold that open, and is killed then.

    It reads and writes files in memory, so nobody need read while it runs, and no other process can hold it up.
    """
    bounds = bounds or Bounds()
    mark = f"{bounds.owner}:{secrets.token_hex(8)}"
    with ExitStack() as stack:
        given = stack.enter_context(os.fdopen(os.memfd_create("stdin"), "r+b", buffering=0))
        given.write(stdin)
        given.seek(0)
        outputs = _output(), _output()
        for output in outputs:
            stack.callback(os.close, output)
        process = subprocess.Popen(
            [str(program)],
            stdin=given,
            stdout=outputs[0],
            stderr=outputs[1],
            env={**env, VARIABLE: mark},
            process_group=0,
        )
        family = _Family(process.pid, mark)
        try:
            _limit(process.pid)
            _wait(process.pid, seconds, lambda: _look(family, bounds))
        finally:
            left = _end(process, family)
        return Finished(process.returncode, _written(outputs[0]), _written(outputs[1]), left)


def end_all(owner: str) -> int:
    """Kill what still runs of an owner's programs, in a bounded time. Returns how many processes it were."""
    killed: set[int] = set()
    deadline = time.monotonic() + END_SECONDS
    while (alive := _marked(f"{owner}:")) and time.monotonic() < deadline:
        killed |= alive
        for pid in alive:
            _send_kill(os.kill, pid)
        time.sleep(_PAUSE_SECONDS)
    return len(killed)


class Room:
    """The memory of all programs together. Safe for many threads."""

    def __init__(self, total: int = NO_LIMIT, clock: Callable[[], float] = time.monotonic) -> None:
        """`total` is in bytes."""
        self._total = total
        self._clock = clock
        self._changed = threading.Condition()
        self._counted: dict[object, int] = {}

    @classmethod
    def of_container(cls, root: Path = Path("/")) -> Room:
        """Make room for what the control group's limit leaves beside the agent: for one program in any case."""
        return cls(max(memory_limit(root) - AGENT_BYTES, EXPECTED_BYTES))

    @contextmanager
    def place(self, seconds: float, is_wanted: Callable[[], bool] = always) -> Iterator[Callable[[int], bool]]:
        """Wait for room for a program, and keep it. Yields its `Bounds.allows`. Raises NoTurn, and NotWanted."""
        key = object()
        with self._changed:
            if not wait_for(self._changed, self._has_room, seconds, is_wanted):
                raise NoTurn("the IPAM plugins at work leave no memory for another: raise the agent's limit")
            self._counted[key] = EXPECTED_BYTES
        began = self._clock()

        def allows(taken: int) -> bool:
            with self._changed:
                is_young = self._clock() - began < YOUNG_SECONDS
                self._counted[key] = max(taken, EXPECTED_BYTES) if is_young else taken
                self._changed.notify_all()
                return taken <= MAX_MEMORY and (taken <= EXPECTED_BYTES or self._sum() <= self._total)

        try:
            yield allows
        finally:
            with self._changed:
                del self._counted[key]
                self._changed.notify_all()

    def _has_room(self) -> bool:
        return not self._counted or self._sum() + EXPECTED_BYTES <= self._total

    def _sum(self) -> int:
        return sum(self._counted.values())


def memory_limit(root: Path = Path("/")) -> int:
    """Return the memory limit of this process's control group in bytes, or NO_LIMIT.

    A container sees its own group at the top, where /proc may name it as the host does. With cgroup v1 the kernel ends
    programs before the agent, whatever the limit is.
    """
    top, groups = root / "sys/fs/cgroup", _read(root / "proc/self/cgroup").splitlines()
    own = [top / line.removeprefix("0::/") for line in groups if line.startswith("0::/")]
    texts = [_read(folder / "memory.max").strip() for folder in (*own, top)]
    return min((int(text) for text in texts if text.isdecimal()), default=NO_LIMIT)


def _output() -> int:
    """Make a file that a program writes into, and that cannot grow: beyond its size nothing is written (EPERM)."""
    made = os.memfd_create("output", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(made, MAX_OUTPUT)
    fcntl.fcntl(made, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return made


def _written(output: int) -> bytes:
    written = os.lseek(output, 0, os.SEEK_HOLE)  # in whole pages: all of it would take milliseconds
    return os.pread(output, written, 0).rstrip(b"\0")


def _limit(pid: int) -> None:
    """Bound what a process and its children take, and have them go first where memory runs out all the same."""
    with suppress(OSError, ValueError):  # it may have ended
        resource.prlimit(pid, resource.RLIMIT_DATA, (MAX_DATA, MAX_DATA))
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")


def _wait(pid: int, seconds: float, look: Callable[[], None]) -> None:
    """Wait until a program has ended, and look at it now and then."""
    now = began = time.monotonic()
    with open(os.pidfd_open(pid), "rb", buffering=0) as ended:
        end = select.poll()
        end.register(ended, select.POLLIN)
        while True:
            pause = min(max(LOOK_SECONDS, (now - began) / LOOKS_OF_LIFE), LOOK_SECONDS_LATER)
            if end.poll(min(pause, began + seconds - now) * 1000):
                return
            if (now := time.monotonic()) >= began + seconds:
                raise OutOfBounds(f"did not end within {seconds:g} s")
            look()


def _look(family: _Family, bounds: Bounds) -> None:
    if not bounds.is_wanted():
        raise NotWanted("the program was ended, since nobody waits for it any more")
    found = family.alive()
    if len(found) > MAX_PROCESSES:
        raise OutOfBounds(f"ran {len(found)} processes at once, and {MAX_PROCESSES} are allowed")
    taken = sum(map(_own_bytes, found))
    if not bounds.allows(taken):
        raise OutOfBounds(f"took {taken >> 20} MiB of memory, more than there is for it")


def _end(process: subprocess.Popen[bytes], family: _Family) -> int:
    """Kill a program with all that it has started, and reap them. Returns how many beside itself were alive.

    A group is killed in one step, in which none of it can fork (kernel/fork.c, copy_process).
    """
    others: set[int] = set()
    deadline = time.monotonic() + END_SECONDS
    while True:
        alive = family.alive()
        others |= alive - {process.pid}
        if process.returncode is None:  # not reaped yet, so the number is still its own
            _send_kill(os.killpg, process.pid)
        for pid in alive:
            _send_kill(os.kill, pid)
        _reap(process, others)
        if process.returncode is not None and not alive:
            return len(others)
        if time.monotonic() > deadline:
            threading.Thread(target=process.wait, name="reap", daemon=True).start()
            return len(others)
        time.sleep(_PAUSE_SECONDS)


def _reap(process: subprocess.Popen[bytes], others: set[int]) -> None:
    """Take note of the dead. Those whose parent has ended are ours where the agent is the container's first process."""
    process.poll()
    for one in (-process.pid, *others):
        with suppress(ChildProcessError):
            while os.waitpid(one, os.WNOHANG)[0]:
                pass


def _send_kill(send: Callable[[int, int], None], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        send(number, signal.SIGKILL)


class _Family:
    """A program's processes: by its mark, by its group, and below these, with another environment perhaps."""

    def __init__(self, leader: int, mark: str) -> None:
        self._leader, self._mark = leader, mark
        self._began = _started(_stat(leader))
        self._seen: dict[int, bytes] = {}
        """When each was started: a number may be another's later."""

    def alive(self) -> set[int]:
        every = {pid: words for pid in _numbers() if (words := _stat(pid))}
        stats = {pid: words for pid, words in every.items() if words[_STATE] not in (b"Z", b"X")}
        # To read all environments of a host takes longer than most programs.
        found = _marked(self._mark, {pid for pid, words in every.items() if _started(words) < self._began})
        for pid, words in stats.items():
            if int(words[_GROUP]) == self._leader or self._seen.get(pid) == words[_STARTED]:
                found.add(pid)
        while more := {pid for pid, words in stats.items() if int(words[_PARENT]) in found} - found:
            found |= more
        self._seen = {pid: stats[pid][_STARTED] for pid in found & stats.keys()}
        return found


_STATE, _PARENT, _GROUP, _STARTED = 0, 1, 2, 19
"""Fields of /proc/PID/stat behind the name, which may hold spaces and brackets (proc_pid_stat(5))."""


def _stat(pid: int) -> list[bytes]:
    words = _content(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return words if len(words) > _STARTED else []


def _started(words: Sequence[bytes]) -> int:
    """Return when a process was started, in ticks since the boot; 0 if that is not known."""
    return int(words[_STARTED]) if words else 0


def _numbers() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _marked(beginning: str, passed_over: Collection[int] = ()) -> set[int]:
    """Find the processes whose mark begins so. One that is dead has no environment."""
    entry = f"\0{VARIABLE}={beginning}".encode()
    numbers = (pid for pid in _numbers() if pid not in passed_over)
    return {pid for pid in numbers if entry in b"\0" + _content(f"/proc/{pid}/environ")}


def _own_bytes(pid: int) -> int:
    words = _content(f"/proc/{pid}/statm").split()
    return max(0, int(words[1]) - int(words[2])) * _PAGE if len(words) > 2 else 0


def _content(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, _MAX_ENVIRONMENT)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def _read(path: Path) -> str:
    return _content(str(path)).decode()
