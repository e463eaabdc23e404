"""The filter that the agent puts upon itself: tried on a real kernel, and read instruction by instruction."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from agent.errors import HardwareError
from agent.hardware import seccomp
from agent.hardware.seccomp import LIMITED, NAMESPACES, REFUSED

REPOSITORY = Path(__file__).parents[3]
PROFILE = REPOSITORY / "daemonset/seccomp.json"
HEADERS = {"x86_64": "x86-linux-any", "aarch64": "aarch64-linux-any"}
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7, "i386": 0x40000003, "arm": 0x40000028}
ALLOW, EPERM, ENOSYS = 0x7FFF0000, 0x00050001, 0x00050026
NEWNET, NEWNS, NEWUSER, THREAD = 0x40000000, 0x00020000, 0x10000000, 0x003D0F00

CONFINED = """
import ctypes, errno, json, os, platform, subprocess, sys, threading
from agent.hardware import netns, seccomp, tcx

libc = ctypes.CDLL(None, use_errno=True)
def tried(result):
    return "done" if result >= 0 else errno.errorcode[ctypes.get_errno()]
def mount():
    return tried(libc.mount(b"none", b"/proc/sys/fs/binfmt_misc", b"tmpfs", 0, None))
def call(numbers, *arguments):
    number = numbers._asdict()[platform.machine()]
    return None if number is None else tried(libc.syscall(number, *arguments))
def of(command):
    try:
        tcx.TcxPrograms().call(command, b"")
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"

libc.unshare(0x00020000)
libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None)
found = {"before": mount()}
other = os.open(sys.argv[1], os.O_RDONLY)
go, ended, threads = threading.Event(), threading.Event(), []
def early():
    go.wait()
    threads.append(mount())
thread = threading.Thread(target=early)
thread.start()
seccomp.confine()
found["after"] = mount()
go.set()
thread.join()
found["other thread"] = threads[0]
if found["after"] == "EPERM":
    # Arguments that the kernel refuses otherwise, should the filter let one of them through.
    found["refused"] = {name: call(numbers, *[ctypes.c_long(-1)] * 6) for name, numbers in seccomp.REFUSED.items()}
    found["x32"] = tried(libc.syscall(0x40000000 | 39)) if platform.machine() == "x86_64" else "EPERM"
    found["setns"] = {str(kind): tried(libc.setns(other, kind)) for kind in (0, 0x00020000, 0x10000000)}
    found["clone"] = call(seccomp.LIMITED["clone"].numbers, ctypes.c_long(0x40000000 | 17), 0, 0, 0, 0)
    found["bpf"] = {str(command): of(command) for command in (0, 5, 16)}
    found["entered"] = netns.run_in(other, lambda: os.stat("/proc/thread-self/ns/net").st_ino)
    script = "import ctypes; print(ctypes.CDLL(None).mount(b'none', b'/proc', b'proc', 0, None))"
    found["child"] = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip()
    found["again"] = seccomp.confine()
print(json.dumps(found))
"""


@pytest.fixture
def other(own_network: None, tmp_path: Path) -> Path:
    """Where another network namespace is bound."""
    path = tmp_path / "netns"
    path.touch()
    subprocess.run(["unshare", f"--net={path}", "true"], check=True)
    return path


def test_with_the_capability_there_is_no_mount_and_a_network_namespace_can_be_entered(other: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CONFINED, other], capture_output=True, text=True, timeout=60, check=False, cwd=REPOSITORY
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["before"] == "done", "this process has not got the capability, so the test would show nothing"
    assert (found["after"], found["other thread"], found["child"]) == ("EPERM", "EPERM", "-1")
    assert {name: told for name, told in found["refused"].items() if told not in (None, "EPERM")} == {}
    assert len(found["refused"]) > 30
    assert (found["x32"], found["clone"]) == ("EPERM", "EPERM")
    assert set(found["setns"].values()) == {"EPERM"}
    assert (found["bpf"]["0"], found["bpf"]["5"]) == ("EPERM", "EPERM")  # a map, a program
    assert found["bpf"]["16"] != "EPERM"  # what is attached
    assert found["entered"] == os.stat(other).st_ino
    assert found["again"] is None


@cache
def assembled(machine: str) -> list[tuple[int, ...]]:
    return list(struct.iter_unpack("=HBBI", seccomp.program(machine)))


def run(machine: str, number: int, *arguments: int, of: str | None = None) -> int:
    """Do what the kernel does with the filter at a system call."""
    data = struct.pack("=iIQ6Q", number, ARCHITECTURES[of or machine], 0, *arguments, *[0] * (6 - len(arguments)))
    steps = assembled(machine)
    at, loaded = 0, 0
    while True:
        code, yes, no, value = steps[at]
        at += 1
        if code == 0x20:
            (loaded,) = struct.unpack_from("=I", data, value)
        elif code == 0x54:
            loaded &= value
        elif code == 0x06:
            return int(value)
        else:
            holds = {0x15: loaded == value, 0x35: loaded >= value}[code]
            at += yes if holds else no


def numbers_of(machine: str) -> dict[str, int]:
    """Read the numbers of system calls from the headers that zig brings along."""
    found = find_spec("ziglang")
    assert found is not None
    assert found.origin is not None
    header = Path(found.origin).parent / "lib/libc/include" / HEADERS[machine] / "asm/unistd_64.h"
    return {name: int(number) for name, number in re.findall(r"#define __NR_(\w+) (\d+)", header.read_text())}


@pytest.mark.parametrize("machine", HEADERS)
def test_the_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    real = numbers_of(machine)
    limited = {name: limit.numbers for name, limit in LIMITED.items()}
    for name, numbers in {**REFUSED, **limited, "seccomp": seccomp._SECCOMP}.items():
        assert numbers._asdict()[machine] == real.get(name), name


@pytest.mark.parametrize("machine", HEADERS)
def test_what_is_refused_and_what_is_not_on_each_machine(machine: str) -> None:
    real = numbers_of(machine)
    for name, number in real.items():
        if name in REFUSED:
            assert run(machine, number) == EPERM, name
        elif name not in LIMITED:
            assert run(machine, number, 5, 5) == ALLOW, name
    assert run(machine, real["clone3"]) == ENOSYS
    assert run(machine, real["clone"], THREAD) == ALLOW
    for bit in range(32):
        assert run(machine, real["clone"], THREAD | 1 << bit) == (EPERM if NAMESPACES >> bit & 1 else ALLOW)
    assert run(machine, real["setns"], 7, NEWNET) == ALLOW
    for kind in (0, NEWNS, NEWUSER, NEWNET | NEWNS):
        assert run(machine, real["setns"], 7, kind) == EPERM
    allowed = [command for command in range(64) if run(machine, real["bpf"], command) == ALLOW]
    assert allowed == sorted(seccomp.BPF_COMMANDS)
    for foreign in ARCHITECTURES.keys() - {machine}:
        assert run(machine, real["getpid"], of=foreign) == EPERM


def test_a_machine_that_is_not_known_is_said() -> None:
    with pytest.raises(HardwareError, match="no seccomp filter for riscv64: there are some for x86_64, aarch64"):
        seccomp.program("riscv64")


def test_the_profile_for_nodes_is_made_from_the_filter() -> None:
    """It allows nothing by itself, and none of what the filter refuses or limits but as the filter does."""
    subprocess.run([REPOSITORY / "hack/make-seccomp", "--check"], check=True)
    profile = json.loads(PROFILE.read_text())
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    rules = [(name, rule) for rule in profile["syscalls"] for name in rule["names"]]
    assert not {name for name, _ in rules} & REFUSED.keys()
    assert all("args" in rule or rule["action"] != "SCMP_ACT_ALLOW" for name, rule in rules if name in LIMITED)
    assert LIMITED.keys() <= {name for name, _ in rules}
