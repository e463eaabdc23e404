"""A seccomp filter that the agent puts upon itself: system calls that its capabilities allow and its work never needs.

CAP_SYS_ADMIN is had for setns(2) alone, but lets a process mount, rename the machine and a lot more, and container
runtimes allow each of these calls to whoever has it. With this filter a mount is refused though the capability is
there, also to the IPAM plugins that the agent starts. It comes on top of the runtime's own profile; the strictest
answer counts. hack/make-seccomp writes the same into daemonset/seccomp.json, for clusters that install profiles on
their nodes.

Layout: include/uapi/linux/filter.h, seccomp.h. Numbers: arch/x86/entry/syscalls/syscall_64.tbl, scripts/syscall.tbl.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from agent.errors import HardwareError
from agent.hardware.netns import CLONE_NEWNET
from agent.hardware.tcx import BPF_PROG_DETACH, BPF_PROG_GET_FD_BY_ID, BPF_PROG_QUERY

_WORD = 0xFFFFFFFF
NAMESPACES = 0x7E020000
"""The flags of clone(2) that make namespaces. (A namespace of time is made by other calls only.)"""
BPF_COMMANDS = (BPF_PROG_QUERY, BPF_PROG_GET_FD_BY_ID, BPF_PROG_DETACH)
"""What agent/hardware/tcx.py calls: ask for programs of an interface, and detach them. Loading one is not among it."""


class Numbers(NamedTuple):
    """One system call, by architecture; None where it has none."""

    x86_64: int | None
    aarch64: int | None


REFUSED: Mapping[str, Numbers] = MappingProxyType(
    {
        # Mounts and namespaces.
        "mount": Numbers(165, 40),
        "umount2": Numbers(166, 39),
        "pivot_root": Numbers(155, 41),
        "chroot": Numbers(161, 51),
        "open_tree": Numbers(428, 428),
        "move_mount": Numbers(429, 429),
        "fsopen": Numbers(430, 430),
        "fsconfig": Numbers(431, 431),
        "fsmount": Numbers(432, 432),
        "fspick": Numbers(433, 433),
        "mount_setattr": Numbers(442, 442),
        "open_tree_attr": Numbers(467, 467),
        "unshare": Numbers(272, 97),
        # Other processes.
        "ptrace": Numbers(101, 117),
        "process_vm_readv": Numbers(310, 270),
        "process_vm_writev": Numbers(311, 271),
        "pidfd_getfd": Numbers(438, 438),
        "kcmp": Numbers(312, 272),
        # The kernel, and its keys.
        "perf_event_open": Numbers(298, 241),
        "userfaultfd": Numbers(323, 282),
        "io_uring_setup": Numbers(425, 425),
        "init_module": Numbers(175, 105),
        "finit_module": Numbers(313, 273),
        "delete_module": Numbers(176, 106),
        "kexec_load": Numbers(246, 104),
        "kexec_file_load": Numbers(320, 294),
        "keyctl": Numbers(250, 219),
        "add_key": Numbers(248, 217),
        "request_key": Numbers(249, 218),
        "syslog": Numbers(103, 116),
        # Files behind mounts.
        "open_by_handle_at": Numbers(304, 265),
        "fanotify_init": Numbers(300, 262),
        "quotactl": Numbers(179, 60),
        "quotactl_fd": Numbers(443, 443),
        "lookup_dcookie": Numbers(212, 18),
        # The machine as a whole.
        "reboot": Numbers(169, 142),
        "swapon": Numbers(167, 224),
        "swapoff": Numbers(168, 225),
        "acct": Numbers(163, 89),
        "sethostname": Numbers(170, 161),
        "setdomainname": Numbers(171, 162),
        "settimeofday": Numbers(164, 170),
        "clock_settime": Numbers(227, 112),
        "vhangup": Numbers(153, 58),
        "iopl": Numbers(172, None),
        "ioperm": Numbers(173, None),
    }
)
"""Answered with EPERM, as by a process without the capability."""


class Limit(NamedTuple):
    """A system call that is allowed with some arguments only."""

    numbers: Numbers
    argument: int = 0
    """Which argument decides, by the lower half: all of these are ints, and the kernel looks at no more either."""
    mask: int = _WORD
    values: tuple[int, ...] = ()
    """What the masked argument may be; with none the call is refused."""
    error: int = errno.EPERM


LIMITED: Mapping[str, Limit] = MappingProxyType(
    {
        "clone": Limit(Numbers(56, 220), mask=NAMESPACES, values=(0,)),
        # Its flags are in memory, where no filter sees them. libc takes clone(2) where it finds none.
        "clone3": Limit(Numbers(435, 435), error=errno.ENOSYS),
        "setns": Limit(Numbers(308, 268), argument=1, values=(CLONE_NEWNET,)),
        "bpf": Limit(Numbers(321, 280), values=BPF_COMMANDS),
    }
)

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000
"""Set in the numbers of x86_64's second set of calls."""
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_LOAD, _AND, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_INSTRUCTION = struct.Struct("=HBBI")
_SECCOMP = Numbers(317, 277)
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_SET_MODE_FILTER = 1
_SECCOMP_FILTER_FLAG_TSYNC = 1


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def program(machine: str) -> bytes:
    """Assemble the filter for a machine, as `platform.machine` calls it: 8 bytes an instruction. Pure.

    Raises HardwareError for a machine that it does not know.
    """
    if machine not in _AUDIT_ARCH:
        raise HardwareError(f"no seccomp filter for {machine}: there are some for {', '.join(_AUDIT_ARCH)}")

    refuse, allow = _step(_RETURN, _ERRNO | errno.EPERM), _step(_RETURN, _ALLOW)
    # Programs of another instruction set have other numbers.
    steps = [_step(_LOAD, _ARCHITECTURE_AT), _step(_IF_EQUAL, _AUDIT_ARCH[machine], yes=1), refuse]
    steps += [_step(_LOAD, _NUMBER_AT)]
    if machine == "x86_64":
        steps += [_step(_IF_AT_LEAST, _X32_BIT, no=1), refuse]
    for numbers in REFUSED.values():
        if (number := getattr(numbers, machine)) is not None:
            steps += [_step(_IF_EQUAL, number, no=1), refuse]
    for limit in LIMITED.values():
        rest = [_step(_LOAD, _ARGUMENTS_AT + 8 * limit.argument), _step(_AND, limit.mask)]
        for value in limit.values:
            rest += [_step(_IF_EQUAL, value, no=1), allow]
        rest.append(_step(_RETURN, _ERRNO | limit.error))
        steps += [_step(_IF_EQUAL, getattr(limit.numbers, machine), no=len(rest)), *rest]
    return b"".join((*steps, allow))


def _step(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """Write an instruction; `yes` and `no` say how many a comparison skips."""
    return _INSTRUCTION.pack(code, yes, no, value)


def confine() -> None:
    """Put the filter upon all threads of this process, and all that it starts. It cannot be taken off.

    Raises HardwareError where the kernel or the machine has none.
    """
    machine = platform.machine()
    steps = program(machine)
    libc = ctypes.CDLL(None, use_errno=True)
    # Without it a filter needs CAP_SYS_ADMIN in the process's user namespace; and it keeps setuid programs from more.
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise HardwareError(f"no seccomp filter: {os.strerror(ctypes.get_errno())}")
    made = _Program(len(steps) // _INSTRUCTION.size, steps)
    number = getattr(_SECCOMP, machine)
    result = libc.syscall(number, _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC, ctypes.byref(made))
    if result != 0:
        why = os.strerror(ctypes.get_errno()) if result < 0 else f"thread {result} has another one"
        raise HardwareError(f"no seccomp filter: {why}")
