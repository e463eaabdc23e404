"""tcx programs of an interface, through bpf(2): rtnetlink does not show them, and a move does not end them.

A program is attached by itself, and stays until it is detached; or through a bpf_link, and stays for as long as
somebody has that open or has pinned it. Only the unregistering of the interface ends either (kernel/bpf/tcx.c,
tcx_uninstall). Since Linux 6.6; on older kernels there are none. Layout: include/uapi/linux/bpf.h, union bpf_attr.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Collection

from agent.hardware.host import TcxProgram

BPF_PROG_DETACH, BPF_PROG_GET_FD_BY_ID, BPF_PROG_QUERY = 9, 13, 16
BPF_TCX_INGRESS, BPF_TCX_EGRESS = 46, 47
MAX_PROGRAMS = 64
"""BPF_MPROG_MAX: so many can be attached on each side."""
_SYSCALLS = {"x86_64": 321, "aarch64": 280}
_ATTRIBUTES_BYTES = 128
_QUERY = struct.Struct("=IIIIQIxxxxQQQQ")
_COUNT, _COUNT_AT = struct.Struct("=I"), 24
_NONE_HERE = (errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP)
"""Of kernels that know no tcx or no bpf at all, and of agents that may not ask."""


class TcxPrograms:
    """Asks and detaches. Any thread may."""

    def __init__(self) -> None:
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._number = _SYSCALLS.get(platform.machine())

    def attached(self, ifindex: int) -> tuple[TcxProgram, ...]:
        """List the programs on an interface of the host, on the way in and on the way out."""
        return tuple(found for _, found in self._all(ifindex))

    def detach(
        self, ifindex: int, programs: Collection[int] = (), links: Collection[int] = ()
    ) -> tuple[TcxProgram, ...]:
        """Detach all but these programs and those of these links. Return what stays because another link holds it."""
        held = []
        for side, found in self._all(ifindex):
            if found.program in programs or found.link in links:
                continue
            if found.link:
                held.append(found)
            else:
                self._detach(ifindex, side, found.program)
        return tuple(held)

    def _detach(self, ifindex: int, side: int, program: int) -> None:
        descriptor = self.call(BPF_PROG_GET_FD_BY_ID, struct.pack("=I", program))
        try:
            self.call(BPF_PROG_DETACH, struct.pack("=IIII", ifindex, descriptor, side, 0))
        finally:
            os.close(descriptor)

    def _all(self, ifindex: int) -> list[tuple[int, TcxProgram]]:
        found = []
        programs, links = (ctypes.c_uint32 * MAX_PROGRAMS)(), (ctypes.c_uint32 * MAX_PROGRAMS)()
        where = ctypes.addressof(programs), MAX_PROGRAMS, 0, ctypes.addressof(links)
        for side in (BPF_TCX_INGRESS, BPF_TCX_EGRESS):
            asked = ctypes.create_string_buffer(_QUERY.pack(ifindex, side, 0, 0, *where, 0, 0), _ATTRIBUTES_BYTES)
            try:
                self._call(BPF_PROG_QUERY, asked)
            except OSError as error:
                if error.errno in _NONE_HERE:
                    break
                raise
            (count,) = _COUNT.unpack_from(asked, _COUNT_AT)
            found += [(side, TcxProgram(*each)) for each in zip(programs[:count], links[:count], strict=True)]
        return found

    def call(self, command: int, attributes: bytes) -> int:
        """Call bpf(2). Raises OSError."""
        return self._call(command, ctypes.create_string_buffer(attributes, _ATTRIBUTES_BYTES))

    def _call(self, command: int, attributes: ctypes.Array[ctypes.c_char]) -> int:
        if self._number is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        result: int = self._syscall(self._number, command, attributes, _ATTRIBUTES_BYTES)
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result
