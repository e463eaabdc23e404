"""The relay in an environment that a runtime should not give it: streams, namespaces, signals, sockets."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from cni import protocol
from tests.cni.relay import OWN_NETNS, Agent, Outcome, Relay, finish, serve
from tests.cni.small_disk import disk

POD = {"CNI_CONTAINERID": "c1", "CNI_IFNAME": "net1"}


def make(path: Path, kind: str) -> str:
    """Put something where a namespace should be; returns its path."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "file":
        path.write_text("")
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    elif kind == "device":
        return "/dev/zero"
    elif kind == "link to itself":
        path.symlink_to(path)
    elif kind == "another namespace":
        return "/proc/self/ns/uts"
    return str(path)


NOT_NAMESPACES = {
    "missing": "No such file or directory",
    "pipe": "is no namespace (its mount may be gone)",
    "file": "is no namespace (its mount may be gone)",
    "folder": "is no namespace (its mount may be gone)",
    "device": "is no namespace (its mount may be gone)",
    "socket": "No such device or address",
    "link to itself": "",  # each C library has words of its own
    "another namespace": "is a namespace of another kind",
}


@pytest.mark.parametrize("command", ["ADD", "CHECK"])
@pytest.mark.parametrize(("kind", "why"), NOT_NAMESPACES.items(), ids=NOT_NAMESPACES)
def test_what_is_no_network_namespace_is_refused_at_once(relay: Relay, command: str, kind: str, why: str) -> None:
    path = make(relay.folder / "netns", kind)
    error = relay.run(command, CNI_NETNS=path).error
    assert error["code"] == protocol.INVALID_ENVIRONMENT
    assert error["details"].startswith(f"{path}: {why}")


@pytest.mark.parametrize("kind", [*NOT_NAMESPACES, ""])
def test_del_goes_to_the_agent_without_what_is_no_network_namespace(relay: Relay, kind: str) -> None:
    path = kind and make(relay.folder / "netns", kind)
    agent = Agent()
    with serve(relay.socket, agent, agent.answering(b"")):
        assert relay.run("DEL", **POD, CNI_NETNS=path).status == 0
    assert (agent.requests[0].netns, agent.requests[0].env["CNI_NETNS"]) == (None, path)


@pytest.mark.parametrize("command", ["ADD", "CHECK", "GC", "STATUS"])
def test_input_that_never_ends_is_not_waited_for_for_ever(relay: Relay, command: str) -> None:
    process = relay.start(command, wait="0.2", **POD, CNI_NETNS=OWN_NETNS)
    assert process.wait(60) == 1
    error = finish(process).error
    assert error["code"] == 5
    assert error["details"].startswith("standard input: ")


def test_input_without_end_is_read_up_to_a_limit(relay: Relay) -> None:
    with open("/dev/zero") as endless:
        environment = relay.environment("ADD", "20", POD)
        process = subprocess.run([relay.program], env=environment, stdin=endless, capture_output=True, check=False)
    assert Outcome(process.returncode, process.stdout).error["code"] == protocol.INVALID_NETWORK_CONFIG


@pytest.mark.parametrize("redirection", ["<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-", ">/dev/full"])
def test_streams_that_are_missing_or_full_harm_nobody(relay: Relay, redirection: str) -> None:
    """No descriptor of ours may take a stream's number: an answer printed there would go to the agent."""
    agent = Agent()
    with serve(relay.socket, agent, agent.answering(b"x", 5)):
        environment = relay.environment("ADD", "20", {**POD, "CNI_NETNS": OWN_NETNS})
        script = f'exec "$0" {redirection}'
        command = ["/bin/sh", "-c", script, str(relay.program)]
        status = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False
        ).returncode
        (request,) = agent.requests
        assert request.netns is not None
        assert os.fstat(request.netns).st_ino == os.stat(OWN_NETNS).st_ino
    assert status == (1 if "full" in redirection else 5)
    assert request.stdin == b""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_a_runtime_that_loses_patience_ends_the_relay(relay: Relay, number: signal.Signals) -> None:
    agent, arrived, done = Agent(), threading.Event(), threading.Event()

    def fall_silent(connection: socket.socket) -> None:
        agent.requests.append(protocol.receive_request(connection))
        arrived.set()
        done.wait(60)

    with serve(relay.socket, agent, fall_silent):
        process = relay.start("ADD", **POD, CNI_NETNS=OWN_NETNS)
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
        assert arrived.wait(60)
        process.send_signal(number)
        assert process.wait(60) == -number
        process.communicate()
        done.set()


@pytest.mark.parametrize("beginning", [b"N", b"NFC1", b"NFC1\0\0\0\x05\0{}"])
def test_an_add_that_may_have_been_done_is_not_sent_again(relay: Relay, beginning: bytes) -> None:
    """An answer had begun: the runtime hears of it, sends DEL, and decides itself."""
    agent = Agent()
    with serve(relay.socket, agent, agent.sending(beginning)):
        error = relay.run("ADD", **POD, CNI_NETNS=OWN_NETNS).error
    assert error["code"] == protocol.TRY_AGAIN_LATER
    assert agent.connections == 1


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("missing", "No such file or directory"),
        ("socket", "Connection refused"),
        *((kind, "") for kind in ("folder", "file", "link", "pipe")),
    ],
)
def test_without_a_socket_that_somebody_listens_on_the_agent_is_away(relay: Relay, kind: str, why: str) -> None:
    if kind == "link":
        relay.socket.symlink_to(relay.folder / "nowhere")
    else:
        make(relay.socket, kind)
    for command in ("ADD", "CHECK", "GC"):
        error = relay.run(command, wait="0.1", **POD, CNI_NETNS=OWN_NETNS).error
        assert error["code"] == protocol.TRY_AGAIN_LATER
        assert error["details"].startswith(f"{relay.socket}: {why}")


def test_a_run_folder_that_is_full_or_read_only_stops_nothing(relay: Relay) -> None:
    for options in ("size=4k,nr_inodes=2", "size=1m"):
        folder = relay.folder / options[:7]
        with disk(folder, options):
            path, agent = folder / "cni.sock", Agent()
            with serve(path, agent, agent.answering()):
                if options == "size=1m":
                    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
                for command in ("ADD", "DEL", "STATUS"):
                    more = {**POD, "CNI_NETNS": OWN_NETNS, "NODEFABRIC_CNI_SOCKET": str(path)}
                    assert relay.run(command, **more).stdout == b"answer"
                if options == "size=1m":
                    subprocess.run(["mount", "-o", "remount,rw", folder], check=True)


@pytest.mark.parametrize("start", [(), ("/usr/bin/env", "--block-signal=ALRM", "--ignore-signal=ALRM")])
def test_a_runtime_that_takes_no_output_does_not_keep_the_relay(relay: Relay, start: tuple[str, ...]) -> None:
    """Whatever signals it blocked or ignored: Go programs start their children with a clean mask, others may not."""
    agent = Agent()
    reader, writer = os.pipe()
    with serve(relay.socket, agent, agent.answering(b"x" * 1_000_000)):
        environment = relay.environment("GC", "1.9", {})
        command = [*start, str(relay.program)]
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=writer)
        assert process.wait(60) == -signal.SIGALRM
    os.close(reader)
    os.close(writer)


# -------------------------------------------------------------------------------- answers and environments that nobod


SEED = 20261121


@pytest.mark.parametrize("pieces", [(b"\0",), (b"\0" * 300, b"\0"), (b"\0\0N", b"FC1\0\0\0\x05\0do"), (b"",)])
def test_beats_before_the_answer_are_passed_over(sanitized_relay: Relay, pieces: tuple[bytes, ...]) -> None:
    whole = protocol.encode_answer(protocol.Answer(0, b"done"))

    def behave(connection: socket.socket) -> None:
        agent.requests.append(protocol.receive_request(connection))
        for piece in (*pieces, whole[len(b"".join(pieces).lstrip(protocol.BEAT)) :]):
            connection.sendall(piece)
            time.sleep(0.05)

    agent = Agent()
    with serve(sanitized_relay.socket, agent, behave):
        assert sanitized_relay.run("ADD", CNI_NETNS=OWN_NETNS).stdout == b"done"


def test_a_beat_inside_the_answer_is_a_part_of_it(sanitized_relay: Relay) -> None:
    whole = protocol.encode_answer(protocol.Answer(0, b"done"))
    agent = Agent()
    with serve(sanitized_relay.socket, agent, agent.sending(whole[:3] + protocol.BEAT + whole[3:])):
        assert "malformed" in sanitized_relay.run("ADD", CNI_NETNS=OWN_NETNS).error["details"]


def test_any_bytes_in_the_environment_make_a_json_error(sanitized_relay: Relay) -> None:
    chance = random.Random(SEED)
    for _ in range(100):
        path = bytes(chance.choices(range(1, 256), k=chance.choice((1, 7, 300, 30_000))))
        outcome = sanitized_relay.run("ADD", CNI_NETNS="/nowhere/" + os.fsdecode(path))
        assert outcome.error["code"] == protocol.INVALID_ENVIRONMENT
