"""Saved boots: the guest's memory from just before it mounts this computer's files.

QEMU refuses to save a guest with a mounted 9p share, so a boot is saved at READY, the moment in `guest-init`
when all is done that does not need those files.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rig.errors import GuestFailed
from rig.guest import Control, Guest, Monitor
from rig.progress import Deadline

KEEP = 4
_MAPPED_RAM = [{"capability": "mapped-ram", "state": True}]


def path(cache: Path, identity: Sequence[str]) -> Path:
    """Name the snapshot of a machine: QEMU's version and arguments, with placeholders for what may differ."""
    return cache / f"snapshot-{hashlib.sha256(chr(0).join(identity).encode()).hexdigest()[:12]}"


def make(argv: Sequence[str], run: Path, snapshot: Path, cpus: int, deadline: Deadline, *, verbose: bool) -> None:
    """Boot the machine to READY and save it. Raises GuestFailed or TimedOut."""
    new = snapshot.with_suffix(".new")
    try:
        with Guest(argv, run, deadline, verbose=verbose) as guest:
            # Both stay connected until all is saved: a restored guest would take a lost connection for the end.
            monitor, control = Monitor(guest), Control(guest)
            control.wait("READY")
            _rest(monitor, cpus)
            monitor.call("migrate-set-capabilities", capabilities=_MAPPED_RAM)
            monitor.call("migrate", uri=f"file:{new}")
            _wait_migrated(monitor, deadline, "saving")
        new.rename(snapshot)
    finally:
        new.unlink(missing_ok=True)
    prune(snapshot.parent)


def load(monitor: Monitor, snapshot: Path, deadline: Deadline) -> None:
    """Put a machine that was started with `-incoming defer` into the saved state and let it go on."""
    monitor.call("migrate-set-capabilities", capabilities=_MAPPED_RAM)
    monitor.call("migrate-incoming", uri=f"file:{snapshot}")
    _wait_migrated(monitor, deadline, "restoring")
    monitor.call("cont")


def prune(cache: Path) -> None:
    """Keep the snapshots used last: each set of options has one, of some 110 MB."""
    snapshots = sorted(cache.glob("snapshot-????????????"), key=lambda p: p.stat().st_mtime, reverse=True)
    for old in snapshots[KEEP:]:
        old.unlink(missing_ok=True)


def scratch() -> tempfile.TemporaryDirectory[str]:
    """Make the folder of one machine's sockets, with a path short enough for a socket's address."""
    folder = tempfile.TemporaryDirectory(prefix="vmrun-")
    (Path(folder.name) / "share").mkdir()
    return folder


def _wait_migrated(monitor: Monitor, deadline: Deadline, what: str) -> None:
    while (state := monitor.call("query-migrate")).get("status") != "completed":
        if state.get("status") == "failed":
            raise GuestFailed(f"{what} the snapshot failed: {state.get('error-desc', state)}")
        deadline.left()
        time.sleep(0.02)


def _rest(monitor: Monitor, cpus: int) -> None:
    """Stop the machine when it is idle: one saved amid an interrupt was seen to hang on restore."""
    for _ in range(100):
        time.sleep(0.1)
        monitor.call("stop")
        if _idle(monitor, cpus):
            return
        monitor.call("cont")
    raise GuestFailed("the guest does not come to rest, so no snapshot can be made")


def _idle(monitor: Monitor, cpus: int) -> bool:
    """Tell whether each processor is halted with no interrupt pending or in service."""

    def ask(line: str) -> str:
        return str(monitor.call("human-monitor-command", **{"command-line": line}))

    halted = re.findall(r"HLT=(\d)", ask("info registers -a"))
    quiet = all(re.search(r"ISR\s+\(none\)\s+IRR\s+\(none\)", ask(f"info lapic {cpu}")) for cpu in range(cpus))
    return quiet and halted == ["1"] * cpus
