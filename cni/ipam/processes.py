"""The processes that a program has started: found in /proc, counted, and ended together.

A process can leave its parent, its group and its session. What it keeps is the environment that it was started with
(proc_pid_environ(5)), unless it goes out of its way; so each program gets a mark there that nobody else has.

What a killed agent had started may still be at work. Each agent has a file of its own. A plugin inherits a locked
descriptor of it, and the lock lasts for as long as anybody has the descriptor (flock(2)): the plugin, not the agent.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "NODEFABRIC_PROGRAM"
END_SECONDS = 2.0
"""One that hangs in the kernel dies later."""
_PAUSE_SECONDS = 0.002
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MAX_READ = 256 << 10
PATTERN = "ipam-*.lock"
OWN = re.compile(r"ipam-[0-9a-f]{8}\.lock")
"""Every such file, and no other program's."""
ORPHAN_SECONDS = 130.0
"""Longer than a plugin may take: what still holds a file then is a daemon that it left behind."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Process:
    """One process, as /proc tells of it."""

    pid: int
    parent: int
    group: int
    started: int
    """In clock ticks since the boot: a number that is given anew has another one."""
    is_dead: bool
    """It waits for its parent to take note."""


class Tree:
    """A program that is our child, not waited for yet, and whatever comes from it."""

    def __init__(self, leader: int, mark: str) -> None:
        """`leader` leads a process group, and was started with `mark` in VARIABLE."""
        self._leader = leader
        self._mark = _entry(mark)
        self._known: dict[int, int] = {}
        """Number → start of those that were seen: one may be orphaned, and leave the group, afterwards."""

    def look(self) -> tuple[Process, ...]:
        """Find what lives of it now, and what is dead and nobody has taken note of. Without the leader, once that is
        dead."""
        waiting = {found.pid: found for pid in _numbers_since(self._leader) if (found := _read(pid)) is not None}
        mine: dict[int, Process] = {}
        families = {self._leader}
        while True:
            more = [p for p in waiting.values() if self._is_mine(p, families)]
            if not more:
                # Their environment is read last, and of few.
                more = [p for p in waiting.values() if self._mark in _environment(p.pid)]
            if not more:
                break
            for process in more:
                mine[process.pid] = waiting.pop(process.pid)
                families.add(process.pid)
        self._known = {p.pid: p.started for p in mine.values()}
        return tuple(p for p in mine.values() if not (p.is_dead and p.pid == self._leader))

    def _is_mine(self, process: Process, families: set[int]) -> bool:
        return (
            process.pid == self._leader
            or process.parent in families
            or process.group == self._leader
            or self._known.get(process.pid) == process.started
        )

    def end(self, seconds: float = END_SECONDS) -> int:
        """Kill all of it. Returns how many processes besides the leader were alive.

        A group is killed in one step, in which nothing of it can fork (kernel/fork.c, copy_process). Those that have
        left it are looked for until there are none.
        """
        killed: set[int] = set()
        deadline = time.monotonic() + seconds
        while True:
            found = self.look()
            alive = {p.pid for p in found if not p.is_dead}
            if alive:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._leader, signal.SIGKILL)  # not waited for yet, so the number is still its own
            for process in found:
                _reap(process, self._leader) if process.is_dead else _kill(process.pid)
            killed |= alive - {self._leader}
            if not alive or time.monotonic() > deadline:
                return len(killed)
            time.sleep(_PAUSE_SECONDS)


class Orphans:
    """The plugins of this agent, and of those before it."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Note the files that earlier agents left in the folder. Their number is that of killed agents."""
        self._own = folder / PATTERN.replace("*", secrets.token_hex(4))
        self.mark = self._own.stem
        """How the marks of this agent's plugins begin, see VARIABLE."""
        self._clock = clock
        self._since = clock()
        try:
            self._earlier = sorted(folder.glob(PATTERN))
        except OSError as error:
            log.warning("plugins of a killed agent go unseen: %s", error)
            self._earlier = []

    @contextmanager
    def plugin(self) -> Iterator[tuple[int, ...]]:
        """Yield the descriptors that a plugin must inherit, while it runs."""
        try:
            descriptor = os.open(self._own, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:  # a full disk; an address is worth more than the mark
            log.warning("%s cannot be made, so a plugin that outlives the agent goes unseen: %s", self._own, error)
            yield ()
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            yield (descriptor,)
        finally:
            os.close(descriptor)

    def end_earlier(self) -> None:
        """Kill the plugins of earlier agents: nobody bounds any more what they take. Takes a bounded time."""
        for path in self._earlier:
            if not _released(path) and (killed := end_marked(f"{path.stem}:")):
                log.warning("%d processes of IPAM plugins have outlived their agent, and were killed", killed)

    def may_live(self) -> bool:
        """Tell whether a plugin of an earlier agent may be at work. Once none is, none ever will be."""
        if self._earlier and self._clock() - self._since > ORPHAN_SECONDS:
            log.warning("%s is still held, by a daemon presumably; it counts no more", self._earlier[0])
            self._earlier = []
        self._earlier = [path for path in self._earlier if not _released(path)]
        return bool(self._earlier)

    def close(self) -> None:
        """Take the own file away, unless a plugin is at work: the next agent must see that."""
        _released(self._own)


def memory(processes: Iterable[Process]) -> int:
    """Return how many bytes these have to themselves. What is read from files the kernel can take back."""
    return sum(_own_pages(process.pid) for process in processes if not process.is_dead) * _PAGE


def end_marked(mark: str, seconds: float = END_SECONDS) -> int:
    """Kill every process whose mark begins so: of a program that has outlived who started it. Returns how many."""
    killed: set[int] = set()
    beginning = _entry(mark)[:-1]
    deadline = time.monotonic() + seconds
    while alive := {pid for pid in _numbers() if beginning in _environment(pid)}:
        for pid in alive:
            _kill(pid)
        killed |= alive
        if time.monotonic() > deadline:
            break
        time.sleep(_PAUSE_SECONDS)
    return len(killed)


def _entry(mark: str) -> bytes:
    return f"\0{VARIABLE}={mark}\0".encode()


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _reap(process: Process, leader: int) -> None:
    """Take note of a dead one that was handed to us: this process may be the first of a container."""
    if process.parent == os.getpid() and process.pid != leader:
        with suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)


def _numbers() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _numbers_since(first: int) -> list[int]:
    """List those of processes that were started after a living one. Of a host's hundreds these are few."""
    found = _numbers()
    last = int(Path("/proc/loadavg").read_bytes().split()[4])  # that was given last here (proc_loadavg(5))
    if last >= first:
        return [pid for pid in found if first <= pid <= last]
    return [pid for pid in found if pid >= first or pid <= last]  # they have begun anew


def _read(pid: int) -> Process | None:
    """Read /proc/PID/stat. None if there is none any more."""
    content = _content(pid, "stat")
    words = content[content.rfind(b")") + 2 :].split()  # the name before may hold anything
    if len(words) < 20:
        return None
    return Process(pid, int(words[1]), int(words[2]), int(words[19]), words[0] in (b"Z", b"X"))


def _environment(pid: int) -> bytes:
    """Read what a process was started with, each entry between zeros. Nothing of one that is dead, or not ours."""
    return b"\0" + _content(pid, "environ")


def _own_pages(pid: int) -> int:
    words = _content(pid, "statm").split()
    return max(0, int(words[1]) - int(words[2])) if len(words) > 2 else 0


def _content(pid: int, name: str) -> bytes:
    try:
        descriptor = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, _MAX_READ)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def _released(path: Path) -> bool:
    """Tell whether nobody holds a file any more, and remove it then."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    except OSError as error:
        log.warning("%s stays: %s", path, error)
    finally:
        os.close(descriptor)
    return True
