"""Folders of the machine that a container runtime cannot be told to leave alone, as the test's own.

containerd keeps its shims' sockets in /run/containerd, CNI and CDI have theirs in /run, and kubelet hands
devices over by their path in /dev. All of it is mounted in the mount namespace of the test only.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STANDARD = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}
RDMA_MAJOR = 231
"""What the kernel gives to /dev/infiniband: IB_UVERBS_MAJOR. No driver has it here, so nothing can open these."""


@contextmanager
def covered(folder: Path) -> Iterator[None]:
    """Mount an empty /run and a /dev of the standard devices, prepared in the folder, for as long as this lasts."""
    dev = folder / "dev"
    dev.mkdir()
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", dev)
    for name, numbers in _STANDARD.items():
        make_device(dev / name, numbers)
    for name, target in _LINKS.items():
        (dev / name).symlink_to(target)
    for name in ("pts", "shm", "infiniband"):
        (dev / name).mkdir()
    _mount("--bind", "/dev/pts", dev / "pts")
    _mount("-t", "tmpfs", "tmpfs", dev / "shm")
    _mount("--rbind", dev, "/dev")
    unmount_below(Path("/run"))  # a runtime looks such mounts up by their path, hidden ones too
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    try:
        yield
    finally:
        for place in ("/run", "/dev", dev):
            subprocess.run(["umount", "--recursive", "--lazy", place], check=True, capture_output=True)


def make_device(path: Path, numbers: tuple[int, int]) -> None:
    """Make a character device."""
    os.mknod(path, 0o020666, os.makedev(*numbers))


def make_rdma_device(path: str) -> None:
    """Make a device file for a simulated node's RDMA device."""
    make_device(Path(path), (RDMA_MAJOR, minor_of(Path(path).name)))


def minor_of(name: str) -> int:
    """Give each RDMA device file a number, as the kernel does: issm from 64, uverbs from 192, umad from 0."""
    kind = name.rstrip("0123456789")
    return {"umad": 0, "issm": 64, "uverbs": 192}.get(kind, 255) + int(name.removeprefix(kind) or 0)


def processes() -> set[int]:
    """List the other processes in this thread's mount namespace: all that was started since it was made."""
    own = os.readlink("/proc/thread-self/ns/mnt")
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                if os.readlink(entry / "ns/mnt") == own:
                    found.add(int(entry.name))
            except OSError:
                pass  # it has ended
    return found


def unmount_below(folder: Path) -> None:
    """Take away what a killed runtime left mounted, so that the folder can be removed."""
    places = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for place in reversed([place for place in places if place.startswith(f"{folder}/")]):
        subprocess.run(["umount", "--lazy", place], check=True, capture_output=True)


def _mount(*words: str | Path) -> None:
    subprocess.run(["mount", *words], check=True, capture_output=True, text=True)
