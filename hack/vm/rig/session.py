"""From an empty cache to a command's exit status: `prepare` once, then `Prepared.run`."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rig import initramfs, kernel, machine, programs, release, snapshot, tools
from rig.errors import GuestFailed, Impossible, RigError
from rig.guest import Control, Guest, Monitor, Output
from rig.progress import Deadline, say, step

BASE_MODULES = ("9pnet_virtio", "9p", "overlay")
"""What the guest needs to reach this computer's files."""
DEFAULT_MODULES = (
    *("igb", "igbvf", "veth", "bridge", "macvlan", "ipvlan", "8021q", "dummy"),
    *("rdma_rxe", "rdma_ucm", "ib_uverbs", "ib_umad", "vfio-pci"),
)
PASSED_VARIABLES = ("PATH", "LANG", "LC_ALL", "CI", "VIRTUAL_ENV", "PYTHONPATH")
CACHE_VARIABLE = "NODEFABRIC_VM_CACHE"
_DISK_MIB_TO_FETCH, _DISK_MIB_TO_SAVE = 700, 300
_MEMORY_MIB_OF_QEMU = 400


def default_cache(env: Mapping[str, str]) -> Path:
    """Tell where kernels and snapshots are kept between runs."""
    if CACHE_VARIABLE in env:
        return Path(env[CACHE_VARIABLE])
    return Path(env.get("XDG_CACHE_HOME") or Path(env.get("HOME", "/root")) / ".cache") / "nodefabric" / "vm"


@dataclass(frozen=True)
class Order:
    """What machine is wanted."""

    cache: Path
    shape: machine.Shape = field(default_factory=machine.Shape)
    suite: str | None = None
    """Debian suite of the kernel; None for the one the rig was measured on."""
    modules: tuple[str, ...] = DEFAULT_MODULES
    snapshot: bool = False
    shares: tuple[Path, ...] = ()
    """Folders the guest may write to. Their number is part of the machine, their paths are not."""


@dataclass(frozen=True)
class Command:
    """What is run in the guest, as root."""

    argv: Sequence[str]
    cwd: Path
    env: Mapping[str, str]


@dataclass(frozen=True)
class Prepared:
    """A machine that can be started at once."""

    order: Order
    kernel: kernel.Kernel
    initramfs: Path
    snapshot: Path | None

    def run(self, command: Command, deadline: Deadline) -> int:
        """Run the command in a fresh guest, its output on our stdout, and return its status.

        Raises GuestFailed when the guest ends without a status, TimedOut at the deadline.
        """
        with snapshot.scratch() as folder:
            run = Path(folder)
            self._write_control_share(run / "share", command)
            argv = machine.arguments(
                self.order.shape, self.kernel, self.initramfs, str(run), [str(s) for s in self.order.shares]
            )
            argv += ["-incoming", "defer"] if self.snapshot else []
            with Guest(argv, run, deadline, verbose=self.order.shape.verbose) as guest:
                return self._converse(guest, deadline)

    def _converse(self, guest: Guest, deadline: Deadline) -> int:
        monitor, output, control = Monitor(guest), Output(guest), Control(guest)
        with step("booting the guest", quiet_seconds=2):
            if self.snapshot:
                snapshot.load(monitor, self.snapshot, deadline)
            else:
                control.wait("READY")
        ready = time.monotonic()
        control.send(f"GO {int(time.time())}")
        status = _until_status(monitor, control)
        output.drain()
        if not status or not status[0].isdecimal():
            raise GuestFailed(f"the guest gave no number as status but {status}")
        first = f"{output.first - guest.started:.1f} s" if output.first else "never"
        say(
            f"guest ready after {ready - guest.started:.1f} s, first output {first}, "
            f"ended after {time.monotonic() - guest.started:.1f} s with status {status[0]}"
        )
        return int(status[0])

    def _write_control_share(self, share: Path, command: Command) -> None:
        (share / "modules").write_text(f"{self.kernel.version} {self.kernel.modules}\n")
        (share / "shares").write_text("".join(f"share{i} {d}\n" for i, d in enumerate(self.order.shares)))
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in command.env.items())
        cwd = shlex.quote(str(command.cwd))
        (share / "command").write_text(f"{exports}cd {cwd} || exit 1\nexec {shlex.join(command.argv)}\n")

    def without_snapshot(self, deadline: Deadline) -> Prepared:
        """Throw the snapshot away and make it anew, if there is one: it may be the culprit."""
        if self.snapshot is None:
            return self
        self.snapshot.unlink(missing_ok=True)
        return prepare(self.order, deadline)


def _until_status(monitor: Monitor, control: Control) -> list[str]:
    """Do what the command asks of the machine until it has ended; return the words after STATUS."""
    while True:
        word, *rest = control.read() or [""]
        if word == "STATUS":
            return rest
        if word == "LINK" and len(rest) == 2:  # the cable of an adapter, such as pf0, pulled or plugged
            monitor.call("set_link", name=rest[0], up=rest[1] == "on")


def prepare(order: Order, deadline: Deadline) -> Prepared:
    """Fetch and build what the machine needs, unless the cache has it.

    Raises Impossible when this computer cannot run it at all, RigError for what the caller can put right.
    """
    system = release.parse(_os_release())
    if platform.machine() != "x86_64":
        # The guest runs this computer's own programs, and igb is only worth emulating on the PC machine.
        raise Impossible(f"this computer is {platform.machine()}, and the guest is made for x86_64")
    _check_memory(order.shape)
    try:
        order.cache.mkdir(parents=True, exist_ok=True)
        with _locked(order.cache, deadline):
            return _prepare(order, system, deadline)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Impossible(f"the disk of the cache {order.cache} is full; {_remedy()}") from error
        raise RigError(f"the cache {order.cache} cannot be used: {error}; set {CACHE_VARIABLE} to a folder") from error


def _prepare(order: Order, system: release.Release, deadline: Deadline) -> Prepared:
    cache = order.cache.resolve()
    suite = order.suite or system.kernel_suite
    if not (cache / f"kernel-{suite}").exists():
        _check_disk(cache, _DISK_MIB_TO_FETCH)
    tools.ensure(system, cache, deadline)
    booted = kernel.unpacked(cache, suite, deadline)
    image = initramfs.build(cache, booted, [*BASE_MODULES, *order.modules])
    saved = _saved(order, cache, booted, image, deadline) if order.snapshot else None
    return Prepared(order, booted, image, saved)


def _saved(order: Order, cache: Path, booted: kernel.Kernel, image: Path, deadline: Deadline) -> Path:
    # A saved device keeps its share's number, not its folder.
    placeholders = ["SHARE"] * len(order.shares)
    identity = machine.arguments(order.shape, booted, image, "RUN", placeholders)
    saved = snapshot.path(cache, [programs.run([tools.QEMU, "--version"], deadline), *identity])
    if saved.exists():
        os.utime(saved)
        return saved
    _check_disk(cache, _DISK_MIB_TO_SAVE)
    with step("booting once to save a snapshot"), snapshot.scratch() as folder:
        argv = machine.arguments(order.shape, booted, image, folder, [folder] * len(order.shares))
        snapshot.make(argv, Path(folder), saved, order.shape.cpus, deadline, verbose=order.shape.verbose)
    return saved


@contextmanager
def _locked(cache: Path, deadline: Deadline) -> Iterator[None]:
    """Keep two runs from filling the same cache at once; wait for the other one, saying so."""
    with (cache / "lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _wait_for_lock(lock.fileno(), cache, deadline)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _wait_for_lock(lock: int, cache: Path, deadline: Deadline) -> None:
    holder = (cache / "lock").read_text() or "?"
    with step(f"waiting for another run (process {holder}) that fills the cache {cache}"):
        while True:
            if deadline.at - time.monotonic() <= 0.2:
                raise RigError(
                    f"process {holder} still holds {cache}/lock after {deadline.seconds:.0f} s; is it stuck?"
                )
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.1)


def _os_release() -> str:
    try:
        return Path("/etc/os-release").read_text()
    except OSError as error:
        raise Impossible(
            f"/etc/os-release cannot be read ({error.strerror}), so the distribution is unknown"
        ) from error


def _check_memory(shape: machine.Shape) -> None:
    needed = shape.memory_mib + _MEMORY_MIB_OF_QEMU
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) >> 10
    if available < needed:
        raise Impossible(f"{needed} MB of memory are needed, {available} MB are available")


def _check_disk(cache: Path, needed_mib: int) -> None:
    free = shutil.disk_usage(cache).free >> 20
    if free < needed_mib:
        raise Impossible(f"the cache {cache} needs {needed_mib} MB of disk, {free} MB are free; {_remedy()}")


def _remedy() -> str:
    return f"make room or set {CACHE_VARIABLE} to another folder"
