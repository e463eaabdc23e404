"""Network namespaces: entered on a thread of their own, and told from one another."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.errors import HardwareError
from agent.hardware import netns

HERE = "/proc/thread-self/ns/net"


@pytest.fixture
def other(own_network: None, tmp_path: Path) -> Iterator[int]:
    """Another network namespace, as an open descriptor."""
    path = tmp_path / "netns"
    path.touch()
    subprocess.run(["unshare", f"--net={path}", "true"], check=True)
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def inode() -> int:
    return os.stat(HERE).st_ino


def test_work_is_done_inside_and_the_caller_stays_outside(other: int) -> None:
    before = inode()
    assert netns.run_in(other, inode) == os.fstat(other).st_ino != before
    assert inode() == before


def test_what_the_work_raises_is_raised(other: int) -> None:
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        netns.run_in(other, fail)


def test_what_is_no_namespace_cannot_be_entered(own_network: None) -> None:
    with open("/dev/null") as file, pytest.raises(HardwareError, match=r"cannot enter the network namespace: Invalid"):
        netns.run_in(file.fileno(), inode)
    with pytest.raises(HardwareError, match="Bad file descriptor"):
        netns.run_in(10_000, inode)


def test_a_namespace_is_known_by_device_and_inode_and_not_by_its_path(other: int, tmp_path: Path) -> None:
    with open(HERE) as here:
        mine, others = netns.identity(here.fileno()), netns.identity(other)
    assert mine != others
    assert netns.is_at(others, str(tmp_path / "netns"))
    assert not netns.is_at(mine, str(tmp_path / "netns"))
    assert not netns.is_at(others, str(tmp_path / "missing"))
    assert not netns.is_at(others, "")
    assert str(others) == f"{others.device}:{others.inode}"


def test_a_process_of_the_host_is_hidden_from_a_container(own_network: None) -> None:
    """Docker names namespaces by processes, and a container has others under these numbers, or none."""
    script = "from agent.hardware import netns; print(netns.is_hidden(netns.own(), '/proc/4194305/ns/net'))"
    program = [sys.executable, "-c", script]
    apart = ["unshare", "--pid", "--fork", *program]
    assert subprocess.run(apart, check=True, capture_output=True, text=True).stdout == "True\n"
    if os.stat("/proc/self/ns/pid").st_ino == netns.FIRST_PID_NAMESPACE:
        assert subprocess.run(program, check=True, capture_output=True, text=True).stdout == "False\n"


def test_a_process_that_gets_no_thread_is_told_so_as_of_any_failure(other: int) -> None:
    former = threading.stack_size(1 << 46)  # more than there is, so no thread can be started
    try:
        with pytest.raises(HardwareError, match="cannot enter the network namespace: can't start new thread"):
            netns.run_in(other, inode)
    finally:
        threading.stack_size(former)
    assert netns.run_in(other, inode) == os.fstat(other).st_ino
