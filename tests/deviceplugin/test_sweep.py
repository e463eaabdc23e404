"""What the agent does at its start about sockets of earlier processes."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from deviceplugin.plugins import sweep


def left_behind(path: Path) -> Path:
    """Make a socket file that nobody listens on."""
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))
    return path


@pytest.fixture
def read_only(own_network: None, short_folder: Path) -> Iterator[Path]:
    """A folder that cannot be written, with a left socket in it. Mounts are the test run's own."""
    left_behind(short_folder / "nodefabric-a-1.sock")
    for options in (["--bind", str(short_folder), str(short_folder)], ["-o", "remount,bind,ro", str(short_folder)]):
        subprocess.run(["mount", *options], check=True)
    yield short_folder
    subprocess.run(["umount", str(short_folder)], check=True)


def test_a_process_that_takes_no_connections_does_not_hold_up_the_start(short_folder: Path) -> None:
    path = short_folder / "nodefabric-a-1.sock"
    with ExitStack() as stack:
        stuck = stack.enter_context(socket.socket(socket.AF_UNIX))
        stuck.bind(str(path))
        stuck.listen(0)
        waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
        waiting.connect(str(path))  # the queue is full now
        sweep(short_folder)
    assert path.exists()


def test_a_socket_that_cannot_be_removed_does_not_end_the_start(read_only: Path) -> None:
    sweep(read_only)
    assert (read_only / "nodefabric-a-1.sock").exists()
