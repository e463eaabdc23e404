"""Programs of the kernel, which a pod or an agent of the host puts on an interface."""

from __future__ import annotations

import ctypes
import errno
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

import pytest

from agent.hardware import netns as namespaces
from agent.hardware.host import TcxProgram
from agent.hardware.tcx import TcxPrograms

BPF_PROG_LOAD, BPF_PROG_ATTACH, BPF_LINK_CREATE, BPF_LINK_UPDATE = 5, 8, 28, 29
BPF_PROG_TYPE_SCHED_CLS, BPF_PROG_TYPE_XDP, BPF_XDP = 3, 6, 37
RETURN_2 = bytes.fromhex("b700000002000000") + bytes.fromhex("9500000000000000")
XDP_FLAGS_SKB_MODE = 2
T = TypeVar("T")


def bpf(command: int, attributes: bytes) -> int:
    """Call bpf(2). Skips the test where the kernel forbids it, or knows no such programs (tcx: before Linux 6.6)."""
    try:
        return TcxPrograms().call(command, attributes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP):
            raise
        pytest.skip(f"bpf({command}) is refused here: {error}")


@contextmanager
def loaded(kind: int = BPF_PROG_TYPE_XDP) -> Iterator[int]:
    """Load a program that does nothing."""
    instructions, licence = ctypes.create_string_buffer(RETURN_2), ctypes.create_string_buffer(b"GPL")
    head = struct.pack("=IIQQ", kind, 2, ctypes.addressof(instructions), ctypes.addressof(licence))
    with open(bpf(BPF_PROG_LOAD, head), "rb") as file:
        yield file.fileno()


def attach(pod: Path | None, ifindex: int, program: int, where: int) -> None:
    """Attach a program to an interface of a namespace, or of the host, where it stays."""
    _in(pod, lambda: bpf(BPF_PROG_ATTACH, struct.pack("=IIII", ifindex, program, where, 0)))


def hold(pod: Path | None, ifindex: int, program: int, where: int) -> BinaryIO:
    """Attach a program through a bpf_link, which ends with the file that is returned."""
    attributes = struct.pack("=IIII", program, ifindex, where, XDP_FLAGS_SKB_MODE if where == BPF_XDP else 0)
    return open(_in(pod, lambda: bpf(BPF_LINK_CREATE, attributes)), "rb")


def attached(ifindex: int) -> tuple[TcxProgram, ...]:
    """List the tcx programs on an interface of the calling thread's namespace."""
    return TcxPrograms().attached(ifindex)


def exchange(held: BinaryIO, program: int) -> None:
    """Give a bpf_link another program."""
    bpf(BPF_LINK_UPDATE, struct.pack("=IIII", held.fileno(), program, 0, 0))


def _in(pod: Path | None, work: Callable[[], T]) -> T:
    if pod is None:
        return work()
    with open(pod) as netns:
        return namespaces.run_in(netns.fileno(), work)
