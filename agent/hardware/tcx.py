"""tcx programs of an interface, through bpf(2): rtnetlink does not show them, and a move does not end them.

Since Linux 6.6; on older kernels there are none. Layout: include/uapi/linux/bpf.h, union bpf_attr.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import struct
from collections.abc import Callable

BPF_PROG_DETACH, BPF_PROG_GET_FD_BY_ID, BPF_PROG_QUERY = 9, 13, 16
BPF_TCX_INGRESS, BPF_TCX_EGRESS = 46, 47
MAX_PROGRAMS = 64
"""BPF_MPROG_MAX: so many can be attached on each side."""
_SYSCALLS = {"x86_64": 321, "aarch64": 280}
_ATTRIBUTES_BYTES = 128
_NONE_HERE = (errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP)
"""Of kernels that know no tcx or no bpf at all, and of agents that may not ask."""


def programs(ifindex: int) -> tuple[int, ...]:
    """List the IDs of the programs on an interface of the host, on the way in and on the way out."""
    return tuple(found for side in (BPF_TCX_INGRESS, BPF_TCX_EGRESS) for found in _query(ifindex, side))


def detach(ifindex: int, spared: tuple[int, ...] = ()) -> None:
    """Detach all programs but those spared. Raises OSError, EBUSY or EPERM for one that a bpf_link holds."""
    for side in (BPF_TCX_INGRESS, BPF_TCX_EGRESS):
        for program in _query(ifindex, side):
            if program in spared:
                continue
            descriptor, _ = _bpf(BPF_PROG_GET_FD_BY_ID, struct.pack("=I", program))
            try:
                _bpf(BPF_PROG_DETACH, struct.pack("=IIII", ifindex, descriptor, side, 0))
            finally:
                os.close(descriptor)


def _query(ifindex: int, side: int) -> tuple[int, ...]:
    ids = (ctypes.c_uint32 * MAX_PROGRAMS)()
    try:
        _, answer = _bpf(
            BPF_PROG_QUERY, struct.pack("=IIIIQI", ifindex, side, 0, 0, ctypes.addressof(ids), MAX_PROGRAMS)
        )
    except OSError as error:
        if error.errno in _NONE_HERE:
            return ()
        raise
    (count,) = struct.unpack_from("=I", answer, 24)
    return tuple(ids[:count])


@functools.cache
def _entrance() -> tuple[Callable[..., int], int]:
    number = _SYSCALLS.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    return ctypes.CDLL(None, use_errno=True).syscall, number


def _bpf(command: int, attributes: bytes) -> tuple[int, bytes]:
    syscall, number = _entrance()
    union = ctypes.create_string_buffer(attributes, _ATTRIBUTES_BYTES)
    result = syscall(number, command, union, _ATTRIBUTES_BYTES)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result), union.raw
