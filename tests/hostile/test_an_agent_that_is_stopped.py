"""An agent that hangs: it is stopped, or takes no connection. Runtimes get an answer within some seconds."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cni import protocol, spool
from tests import frames
from tests.cni.door import ENV
from tests.cni.relay import OWN_NETNS, Agent, Outcome, Relay, finish, serve
from tests.waiting import until

ROOT = Path(__file__).parents[2]
Begin = Callable[..., "Call"]
PROMISED_SECONDS = 10.0
MOST_SECONDS = PROMISED_SECONDS + 8.0
"""The machine may be busy. Without the promise a DEL takes 20 s and an ADD 230 s."""
CONF_TEXT = b'{"cniVersion": "1.0.0", "name": "%s", "type": "nodefabric", "vlan": 7}'
SERVER = f"""
import sys, time
from pathlib import Path
from tests.cni.door import Door

door = Door(Path(sys.argv[1]))

def work(call):
    command = next(command for command, each in door.attachments.calls if each is call)
    print(f"{{command}} {{call.container_id}}\\n", end="", flush=True)  # in one write: other threads print, too
    if command == "ADD" and call.conf.name == "slow":
        time.sleep({PROMISED_SECONDS + 3})
    return {{"cniVersion": "1.0.0"}}

door.attachments.does = work
door.server.start()
print("ready", flush=True)
time.sleep(600)
"""


class Server:
    """The agent's CNI server in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def said(self, line: str) -> bool:
        return line in self._log.read_text().splitlines()


@pytest.fixture
def relay(short_folder: Path) -> Relay:
    """The relay as it is installed."""
    subprocess.run([ROOT / "hack/build-shim", "native"], check=True)
    return Relay(ROOT / "build/shim/native/nodefabric-cni", short_folder)


@pytest.fixture
def server(relay: Relay) -> Iterator[Server]:
    """A server at the relay's socket, which works longer than the promise on an ADD of the network `slow`."""
    log = relay.folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-c", SERVER, relay.socket], cwd=ROOT, stdout=output)
    server = Server(process, log)
    try:
        until(lambda: server.said("ready"))
        yield server
    finally:
        process.kill()
        process.wait()


class Call:
    """One call of a runtime, which has begun."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.began = time.monotonic()
        self.process = process

    def ended(self) -> tuple[Outcome, float]:
        """Wait for the end, and tell how long the call took."""
        stdout, _ = self.process.communicate(timeout=MOST_SECONDS - (time.monotonic() - self.began))
        return Outcome(self.process.returncode, stdout), time.monotonic() - self.began


@pytest.fixture
def call(relay: Relay) -> Iterator[Begin]:
    """Begin calls. They are ended with the test."""
    with contextlib.ExitStack() as stack:

        def begin(command: str, container: str, network: str = "rails", size: int = 0) -> Call:
            pod = {**ENV, "CNI_NETNS": OWN_NETNS, "CNI_CONTAINERID": container}
            process = stack.enter_context(relay.start(command, wait="", **pod))
            stack.callback(process.kill)
            assert process.stdin is not None
            process.stdin.write(CONF_TEXT % network.encode() + b" " * size)
            process.stdin.close()
            process.stdin = None
            return Call(process)

        yield begin


def replay(relay: Relay) -> int:
    """Carry out what lies on disk, as the agent does each minute."""

    def forward(request: protocol.Request) -> protocol.Answer:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(relay.socket))
            connection.sendall(frames.encode_request(protocol.Request(request.env, request.stdin)))
            answer = b""
            while more := connection.recv(1 << 16):
                answer += more
        return frames.decode_answer(answer.lstrip(protocol.BEAT))

    return spool.replay(relay.spool, forward)


def test_calls_end_soon_while_the_agent_is_stopped_and_a_del_is_carried_out_later(
    call: Begin, relay: Relay, server: Server
) -> None:
    server.stop()
    calls = {
        "add": call("ADD", "c1"),
        "an add larger than the socket's buffer": call("ADD", "c2", size=900_000),
        "del": call("DEL", "c3"),
        "check": call("CHECK", "c4"),
    }
    outcomes = {name: begun.ended()[0] for name, begun in calls.items()}
    assert (outcomes.pop("del").status, len(relay.spooled())) == (0, 1)
    for name, outcome in outcomes.items():
        assert outcome.error["code"] == protocol.TRY_AGAIN_LATER, name
        assert "hang" in outcome.error["details"], name
    server.go_on()
    until(lambda: server.said("DEL c3"))
    assert finish(relay.start("DEL", wait="", **ENV)).status == 0
    assert not server.said("ADD c1")
    assert not server.said("ADD c2")
    assert replay(relay) == 1  # once more, which must be harmless
    assert relay.spooled() == []


def test_a_call_ends_soon_when_the_agent_is_stopped_while_it_works_on_it(
    call: Begin, relay: Relay, server: Server
) -> None:
    slow = call("ADD", "c1", "slow")
    until(lambda: server.said("ADD c1"))
    time.sleep(2.0)
    server.stop()
    outcome, _ = slow.ended()
    assert outcome.error["code"] == protocol.TRY_AGAIN_LATER
    server.go_on()
    assert finish(relay.start("DEL", wait="", **ENV)).status == 0


def test_a_request_that_is_worked_on_may_take_its_time(call: Begin, relay: Relay, server: Server) -> None:
    """A relay of an earlier version knows no signs, and gets nothing but the answer."""
    begun = call("ADD", "c1", "slow")
    env = {**ENV, "CNI_COMMAND": "ADD", "CNI_CONTAINERID": "c2"}
    with socket.socket(socket.AF_UNIX) as earlier, Path(OWN_NETNS).open() as netns:
        earlier.settimeout(60)
        earlier.connect(str(relay.socket))
        frame = frames.encode_request(protocol.Request(env, CONF_TEXT % b"slow"))
        socket.send_fds(earlier, [frame], [netns.fileno()])
        outcome, seconds = begun.ended()
        assert (outcome.status, json.loads(outcome.stdout)) == (0, {"cniVersion": "1.0.0"})
        assert seconds > PROMISED_SECONDS
        received = b""
        while more := earlier.recv(1 << 16):
            received += more
    assert frames.decode_answer(received).exit == 0


def test_a_queue_that_nobody_empties_is_not_waited_for_long(call: Begin, relay: Relay) -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(relay.socket))
        listener.listen(0)
        stack.enter_context(socket.socket(socket.AF_UNIX)).connect(str(relay.socket))
        add, delete = call("ADD", "c1"), call("DEL", "c2")
        assert add.ended()[0].error["code"] == protocol.TRY_AGAIN_LATER
        assert delete.ended()[0].status == 0
    assert len(relay.spooled()) == 1


def test_an_agent_of_an_earlier_version_which_gives_no_sign_is_waited_for(call: Begin, relay: Relay) -> None:
    """The relay is installed before its agent runs, and the former agent may serve for a while."""
    agent = Agent()

    def answer_late(connection: socket.socket) -> None:
        agent.requests.append(protocol.receive_request(connection))
        time.sleep(PROMISED_SECONDS + 2)
        connection.sendall(protocol.encode_answer(protocol.Answer(0, b"late")))

    with serve(relay.socket, agent, answer_late):
        relay.socket.chmod(0o600)
        assert call("ADD", "c1").ended()[0].stdout == b"late"
