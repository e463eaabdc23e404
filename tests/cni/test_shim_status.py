"""STATUS: answered at once, and an agent that restarts does not take the node out of service."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from cni import protocol
from tests.cni.relay import Agent, Relay, hang_up, serve
from tests.cni.small_disk import disk
from tests.waiting import until


def mark(relay: Relay) -> Path:
    return relay.socket.with_name("cni.sock.ready")


def be_ready(relay: Relay) -> None:
    """Let the relay see an agent that is ready. STATUS has a second, which a busy machine may need more of."""
    agent = Agent()
    with serve(relay.socket, agent, agent.answering(b"")):
        until(lambda: relay.run("STATUS").status == 0)


def test_without_an_agent_the_plugin_is_not_available(relay: Relay) -> None:
    error = relay.run("STATUS").error
    assert error["code"] == protocol.PLUGIN_NOT_AVAILABLE
    assert error["details"] == f"{relay.socket}: No such file or directory"


def test_an_agent_that_was_ready_just_now_may_restart(relay: Relay) -> None:
    be_ready(relay)
    for _ in range(3):
        assert relay.run("STATUS").status == 0
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(relay.socket))
        assert relay.run("STATUS").status == 0
    assert relay.run("ADD", wait="0").status == 1


def test_an_agent_that_is_away_for_long_is_not_available(relay: Relay) -> None:
    be_ready(relay)
    gone = time.time() - 61
    os.utime(mark(relay), (gone, gone))
    assert relay.run("STATUS").error["code"] == protocol.PLUGIN_NOT_AVAILABLE


def test_a_clock_that_was_set_back_makes_no_agent_available(relay: Relay) -> None:
    be_ready(relay)
    ahead = time.time() + 3600
    os.utime(mark(relay), (ahead, ahead))
    assert relay.run("STATUS").error["code"] == protocol.PLUGIN_NOT_AVAILABLE


def test_an_agent_that_said_it_is_not_ready_is_believed_when_it_is_gone(relay: Relay) -> None:
    be_ready(relay)
    agent = Agent()
    with serve(relay.socket, agent, agent.answering(b'{"code":50}', 1)):
        assert relay.run("STATUS", wait="20").status == 1
    assert relay.run("STATUS").error["code"] == protocol.PLUGIN_NOT_AVAILABLE


def test_an_agent_that_is_slow_for_a_moment_stays_available(relay: Relay) -> None:
    be_ready(relay)
    done = threading.Event()

    def fall_silent(connection: socket.socket) -> None:
        done.wait(60)

    with serve(relay.socket, Agent(), fall_silent):
        assert relay.run("STATUS", wait="0.2").status == 0
        done.set()
    with serve(relay.socket, Agent(), hang_up):
        assert relay.run("STATUS").status == 0


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_nothing_but_a_file_of_our_own_tells_that_an_agent_was_ready(relay: Relay, kind: str) -> None:
    target = relay.folder / "target"
    if kind == "link":
        target.write_text("")
        mark(relay).symlink_to(target)
    elif kind == "folder":
        mark(relay).mkdir()
    else:
        os.mkfifo(mark(relay))
    assert relay.run("STATUS").error["code"] == protocol.PLUGIN_NOT_AVAILABLE
    be_ready(relay)
    assert relay.run("STATUS").error["code"] == protocol.PLUGIN_NOT_AVAILABLE


def test_a_folder_where_nothing_can_be_remembered_changes_no_answer(relay: Relay) -> None:
    with disk(relay.folder / "run", "nr_inodes=2"):  # the folder's, and the socket's
        path = relay.folder / "run/cni.sock"
        agent = Agent()
        with serve(path, agent, agent.answering(b"")):
            assert relay.run("STATUS", wait="20", NODEFABRIC_CNI_SOCKET=str(path)).status == 0
        (relay.folder / "run/filler").write_text("")
        assert relay.run("STATUS", NODEFABRIC_CNI_SOCKET=str(path)).error["code"] == protocol.PLUGIN_NOT_AVAILABLE


def test_a_socket_path_of_full_length_can_be_remembered(relay: Relay) -> None:
    folder = relay.folder / ("x" * (107 - len(str(relay.folder)) - len("//cni.sock")))
    folder.mkdir()
    agent, path = Agent(), folder / "cni.sock"
    assert len(str(path)) == 107
    with serve(path, agent, agent.answering(b"")):
        assert relay.run("STATUS", wait="20", NODEFABRIC_CNI_SOCKET=str(path)).status == 0
    assert relay.run("STATUS", NODEFABRIC_CNI_SOCKET=str(path)).status == 0
