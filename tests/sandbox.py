"""Namespaces of the test run's own: no test can reach the machine's network, processes' mounts or links.

`seal` runs once, before any thread exists. An ordinary user becomes root of a user namespace on the
way. `network` then gives one test a network namespace of its own: setns(2) and unshare(2) change the
calling thread alone, and every thread and process that a test starts inherits from its main thread.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CLONE_FS = 0x00000200
CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
MNT_DETACH = 2
OWN_NETNS = "/proc/thread-self/ns/net"
OWN_MOUNTS = "/proc/thread-self/ns/mnt"


def seal() -> None:
    """Move this process into fresh network and mount namespaces. Raises OSError where that is forbidden."""
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        _call("unshare", CLONE_NEWNS | CLONE_NEWNET)
    else:
        _call("unshare", CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    _call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    _raise_loopback()


@contextmanager
def network() -> Iterator[None]:
    """Put the calling thread into a network namespace that has nothing but a loopback interface.

    Namespaces that are mounted meanwhile, of pods and of the fabric between them, end with it: pods that nobody looks
    at any more would go on talking, and take the processor from all tests that follow.
    """
    before, mounted = os.open(OWN_NETNS, os.O_RDONLY | os.O_CLOEXEC), _namespaces_mounted()
    try:
        _call("unshare", CLONE_NEWNET)
        _raise_loopback()
        yield
    finally:
        for place in _namespaces_mounted() - mounted:
            _call("umount2", place.encode(), MNT_DETACH)
        _call("setns", before, CLONE_NEWNET)
        os.close(before)


def _namespaces_mounted() -> set[str]:
    """List where namespaces are mounted (proc(5), mountinfo)."""
    lines = Path("/proc/thread-self/mountinfo").read_text().splitlines()
    return {line.split()[4] for line in lines if " - nsfs " in line}


@contextmanager
def mounts() -> Iterator[None]:
    """Put the calling thread into a copy of its mount namespace; what is mounted there ends with it."""
    folder = os.getcwd()
    before = os.open(OWN_MOUNTS, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("unshare", CLONE_NEWNS)
        yield
    finally:
        # Threads started meanwhile share this one's root folder, which setns(2) forbids.
        _call("unshare", CLONE_FS)
        _call("setns", before, CLONE_NEWNS)
        os.close(before)
        os.chdir(folder)  # setns(2) went to /


def _raise_loopback() -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def _call(name: str, *arguments: int | bytes | None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
