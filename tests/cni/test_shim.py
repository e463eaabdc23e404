"""The relay: what it asks, how long it waits, what it prints."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cni import protocol
from tests import frames
from tests.cni.relay import OWN_NETNS, Agent, Behaviour, Relay, finish, hang_up, serve
from tests.waiting import until

POD = {"CNI_CONTAINERID": "c1", "CNI_IFNAME": "net1", "CNI_NETNS": OWN_NETNS, "CNI_ARGS": "K8S_POD_NAME=p"}
REQUEST_ROOM = protocol.MAX_REQUEST - len(b"CNI_COMMAND=STATUS\0NODEFABRIC_BEATS=1\0\0")


def test_the_agent_gets_the_request_and_the_runtime_the_answer(relay: Relay) -> None:
    agent = Agent()
    with serve(relay.socket, agent, agent.answering(b'{"cniVersion":"1.1.0"}')):
        outcome = relay.run("ADD", b'{"name":"n"}', CNI_PATH="/opt/cni/bin", SECRET="s", **POD)
        (request,) = agent.requests
    assert (outcome.status, outcome.stdout) == (0, b'{"cniVersion":"1.1.0"}')
    assert request.env == {"CNI_COMMAND": "ADD", "CNI_PATH": "/opt/cni/bin", "NODEFABRIC_BEATS": "1", **POD}
    assert request.stdin == b'{"name":"n"}'


@pytest.mark.parametrize("command", ["ADD", "CHECK", "DEL"])
@pytest.mark.parametrize("size", [2, 900_000])
def test_the_namespace_travels_as_a_descriptor(relay: Relay, command: str, size: int) -> None:
    agent = Agent()
    with serve(relay.socket, agent, agent.answering()):
        assert relay.run(command, b" " * size, **POD).status == 0
        (request,) = agent.requests
        assert request.netns is not None
        received, own = os.fstat(request.netns), os.stat(OWN_NETNS)
    assert (received.st_dev, received.st_ino) == (own.st_dev, own.st_ino)
    assert len(request.stdin) == size


def test_version_needs_no_agent_and_no_input(relay: Relay) -> None:
    process = relay.start("VERSION")
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(stdout) == {"cniVersion": "1.1.0", "supportedVersions": ["0.3.1", "0.4.0", "1.0.0", "1.1.0"]}


@pytest.mark.parametrize("command", ["ADD", "CHECK", "GC"])
def test_the_relay_waits_for_an_agent_that_starts(relay: Relay, command: str) -> None:
    agent = Agent()
    process = relay.start(command, **POD)
    time.sleep(0.2)
    with serve(relay.socket, agent, agent.answering()):
        assert finish(process).stdout == b"answer"


def reset(connection: socket.socket) -> None:
    """Close the connection with most of the request unread."""
    connection.recv(1)


@pytest.mark.parametrize(
    ("ends", "read"),
    [("hang up, take", 2), ("hang up, hang up, take, hang up", 2), ("reset, reset", 1)],
)
def test_an_agent_that_ends_before_it_answers_is_asked_again(relay: Relay, ends: str, read: int) -> None:
    """It has not died of a request that it has not read."""
    agent = Agent()
    known = {"hang up": hang_up, "reset": reset, "take": agent.sending(b"")}
    behaviours = [known[end] for end in ends.split(", ")]
    with serve(relay.socket, agent, *behaviours, agent.answering()):
        assert relay.run("ADD", b" " * 500_000, **POD).stdout == b"answer"
    assert (agent.connections, len(agent.requests)) == (len(behaviours) + 1, read)


def test_an_agent_that_hangs_up_again_and_again_means_try_again_later(relay: Relay) -> None:
    agent = Agent()
    with serve(relay.socket, agent, hang_up):
        assert relay.run("ADD", wait="1", **POD).error["code"] == protocol.TRY_AGAIN_LATER
    assert agent.connections > 2


@pytest.mark.parametrize("command", ["ADD", "CHECK", "GC", "DEL"])
def test_a_request_that_the_agent_dies_of_is_sent_no_third_time_and_a_del_is_kept(relay: Relay, command: str) -> None:
    agent = Agent()
    with serve(relay.socket, agent, agent.sending(b"")):
        outcome = relay.run(command, **POD)
    assert len(agent.requests) == 2
    if command == "DEL":
        assert (outcome.status, len(relay.spooled())) == (0, 1)
        return
    assert outcome.error["code"] == protocol.TRY_AGAIN_LATER
    assert outcome.error["details"] == f"{relay.socket}: it has taken this request twice, and ended without an answer"


@pytest.mark.parametrize("command", ["ADD", "STATUS"])
@pytest.mark.parametrize("beginning", [b"", b"NFC1", b"NFC1\0\0\0\x09\0half"])
def test_an_agent_that_falls_silent_is_not_waited_for_for_ever(relay: Relay, command: str, beginning: bytes) -> None:
    done = threading.Event()

    def fall_silent(connection: socket.socket) -> None:
        connection.sendall(beginning)
        done.wait(60)

    with serve(relay.socket, Agent(), fall_silent):
        error = relay.run(command, wait="0.3", **POD).error
        done.set()
    assert error["code"] == (protocol.PLUGIN_NOT_AVAILABLE if command == "STATUS" else protocol.TRY_AGAIN_LATER)
    assert "in time" in error["details"]


def test_an_answer_that_came_before_the_whole_request_was_read_is_printed(relay: Relay) -> None:
    def refuse(connection: socket.socket) -> None:
        connection.sendall(protocol.encode_answer(protocol.Answer(1, b"refused")))

    with serve(relay.socket, Agent(), refuse):
        outcome = relay.run("GC", b" " * 900_000)
    assert (outcome.status, outcome.stdout) == (1, b"refused")


@pytest.mark.parametrize(("size", "fits"), [(REQUEST_ROOM, True), (REQUEST_ROOM + 1, False), (3 << 20, False)])
def test_a_request_has_at_most_one_mebibyte(relay: Relay, size: int, fits: bool) -> None:
    agent = Agent()
    with serve(relay.socket, agent, agent.answering()):
        outcome = relay.run("STATUS", b" " * size, wait="20")
    if fits:
        assert len(agent.requests[0].stdin) == size
    else:
        assert outcome.error["code"] == protocol.INVALID_NETWORK_CONFIG
        assert agent.requests == []


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        *(("CNI_COMMAND", command, "CNI_COMMAND") for command in ("", "add", "ADDED", "\udcff")),
        *(
            ("NODEFABRIC_CNI_WAIT", wait, f"{wait}: ")
            for wait in ("soon", "-1", "1e3", "3601", "99999999999999999999", "1.5s", ".")
        ),
        ("CNI_ARGS", "x" * 65537, "CNI_ARGS: more than 64 KiB"),
        ("NODEFABRIC_CNI_SOCKET", "/" + "x" * 107, "107 bytes"),
    ],
)
def test_a_wrong_environment_is_refused(relay: Relay, name: str, value: str, told: str) -> None:
    error = relay.run("ADD", **{name: value}).error
    assert error["code"] == protocol.INVALID_ENVIRONMENT
    assert told in f"{error['msg']} {error['details']}"


def test_a_long_answer_reaches_a_runtime_that_reads_slowly(relay: Relay) -> None:
    agent, answer = Agent(), os.urandom(frames.MAX_ANSWER - 1)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with serve(relay.socket, agent, agent.answering(answer)):
        process = subprocess.Popen(
            [relay.program], env=relay.environment("GC", "20", {}), stdin=subprocess.DEVNULL, stdout=writer
        )
        os.close(writer)
        time.sleep(0.2)
        with os.fdopen(reader, "rb") as stream:
            assert stream.read() == answer
        assert process.wait(60) == 0


def test_a_runtime_that_no_longer_reads_makes_a_failure_not_a_signal(relay: Relay) -> None:
    agent = Agent()
    reader, writer = os.pipe()
    os.close(reader)
    with serve(relay.socket, agent, agent.answering()):
        environment = relay.environment("GC", "20", {})
        process = subprocess.Popen([relay.program], env=environment, stdin=subprocess.DEVNULL, stdout=writer)
        assert process.wait(60) == 1
    os.close(writer)


def test_the_installed_program_needs_nothing_of_the_host(relay_program: Callable[[str], Path]) -> None:
    command = ["readelf", "-lWd", str(relay_program("static"))]
    headers = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "INTERP" not in headers
    assert "(NEEDED)" not in headers


# -------------------------------------------------------------------------------- STATUS


def mark(relay: Relay) -> Path:
    return relay.socket.with_name("cni.sock.ready")


def be_ready(relay: Relay, before: float = 0, last: Behaviour | None = None) -> None:
    """Let the relay see an agent that is ready. STATUS has a second, which a busy machine may need more of."""
    agent = Agent()
    with serve(relay.socket, agent, agent.answering(b"")):
        until(lambda: relay.run("STATUS").status == 0)
    if before:
        os.utime(mark(relay), (time.time() - before, time.time() - before))
    if last is not None:
        with serve(relay.socket, Agent(), last):
            assert relay.run("STATUS", wait="20").status == 1


NOT_READY: dict[str, Callable[[Relay], object]] = {
    "none was ready": lambda relay: None,
    "long ago": lambda relay: be_ready(relay, before=61),
    "before the clock was set back": lambda relay: be_ready(relay, before=-3600),
    "it said so": lambda relay: be_ready(relay, last=Agent().answering(b'{"code":50}', 1)),
    "a link": lambda relay: mark(relay).symlink_to(relay.program),
    "a folder": lambda relay: mark(relay).mkdir(),
    "a pipe": lambda relay: os.mkfifo(mark(relay)),
}


@pytest.mark.parametrize("why", NOT_READY)
def test_without_an_agent_that_was_ready_just_now_the_plugin_is_not_available(relay: Relay, why: str) -> None:
    NOT_READY[why](relay)
    error = relay.run("STATUS").error
    assert error["code"] == protocol.PLUGIN_NOT_AVAILABLE
    assert error["details"] == f"{relay.socket}: No such file or directory"
    if why.startswith("a "):
        be_ready(relay)  # which leaves no mark where something else is
        assert relay.run("STATUS").error["code"] == protocol.PLUGIN_NOT_AVAILABLE


def test_an_agent_that_was_ready_just_now_may_restart(relay: Relay) -> None:
    be_ready(relay)
    for _ in range(3):
        assert relay.run("STATUS").status == 0
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(relay.socket))
        assert relay.run("STATUS").status == 0
    assert relay.run("ADD", wait="0").status == 1


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


def test_a_socket_path_of_full_length_can_be_remembered(relay: Relay) -> None:
    folder = relay.folder / ("x" * (107 - len(str(relay.folder)) - len("//cni.sock")))
    folder.mkdir()
    agent, path = Agent(), folder / "cni.sock"
    assert len(str(path)) == 107
    with serve(path, agent, agent.answering(b"")):
        assert relay.run("STATUS", wait="20", NODEFABRIC_CNI_SOCKET=str(path)).status == 0
    assert relay.run("STATUS", NODEFABRIC_CNI_SOCKET=str(path)).status == 0
