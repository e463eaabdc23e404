"""What the demo says where it cannot be played."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent.errors import AgentError
from deviceplugin.registration import socket_name
from hack.sim.demo import LONGEST_SOCKET, MAX_SOCKET_PATH, refuse_long


def demo(*options: str) -> subprocess.CompletedProcess[str]:
    """Run the demo in the test's own namespaces, with a relay that is not called."""
    command = [sys.executable, "-m", "hack.sim.demo", "--inside", "--relay", "/bin/true", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_folder_in_which_sockets_have_too_long_paths_is_refused_with_the_remedy() -> None:
    room = MAX_SOCKET_PATH - len(LONGEST_SOCKET) - 1
    refuse_long(Path("/" + "x" * (room - 1)))
    with pytest.raises(AgentError, match=r"too long a name by 3 bytes.*TMPDIR=/tmp"):
        refuse_long(Path("/" + "x" * (room + 2)))


def test_no_socket_of_the_demo_has_a_longer_name_than_it_reckons_with() -> None:
    assert len(socket_name("nvidia.com/gpu")) == len(os.path.basename(LONGEST_SOCKET))


def test_a_recorded_node_may_be_named_by_its_file(own_network: None) -> None:
    file = Path(__file__).parents[1] / "nodes/one-nic.json"
    played = demo("--node", str(file))
    assert played.stdout.startswith("A simulated node: one-nic\n")
    assert played.stderr.startswith("demo: one-nic is too small: ")
