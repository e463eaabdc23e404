"""The built relay, run as a runtime runs it, and an agent that misbehaves as told."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cni import protocol

OWN_NETNS = "/proc/self/ns/net"
Behaviour = Callable[[socket.socket], None]


@dataclass(frozen=True)
class Outcome:
    status: int
    stdout: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The CNI error object that was printed; it must be the whole output, and the status 1."""
        assert self.status == 1, self
        error = json.loads(self.stdout.decode())
        assert set(error) == {"cniVersion", "code", "msg", "details"}
        return dict(error)


@dataclass(frozen=True)
class Relay:
    """A relay program with a socket and a spool of its own under `folder`."""

    program: Path
    folder: Path

    @property
    def socket(self) -> Path:
        return self.folder / "cni.sock"

    @property
    def spool(self) -> Path:
        return self.folder / "var/spool"

    def spooled(self) -> list[Path]:
        """Everything in the spool, in the order of names."""
        return sorted(self.spool.iterdir()) if self.spool.exists() else []

    def environment(self, command: str, wait: str, more: Mapping[str, str]) -> dict[str, str]:
        return {
            "CNI_COMMAND": command,
            "NODEFABRIC_CNI_SOCKET": str(self.socket),
            "NODEFABRIC_CNI_SPOOL": str(self.spool),
            "NODEFABRIC_CNI_WAIT": wait,
            # A leak is no fault of a process that ends at once; all else is.
            "ASAN_OPTIONS": "exitcode=99:detect_leaks=0",
            "UBSAN_OPTIONS": "halt_on_error=1:exitcode=99",
            **more,
        }

    def start(self, command: str, *, wait: str = "20", **more: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [self.program],
            env=self.environment(command, wait, more),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, command: str, stdin: bytes = b"{}", /, *, wait: str = "20", **more: str) -> Outcome:
        return finish(self.start(command, wait=wait, **more), stdin)


def finish(process: subprocess.Popen[bytes], stdin: bytes = b"{}") -> Outcome:
    """Give a started relay its input and wait for it. It must have nothing to say on standard error."""
    stdout, stderr = process.communicate(stdin, timeout=60)
    assert stderr == b"", stderr.decode()
    return Outcome(process.returncode, stdout)


class Agent:
    """What a stand-in agent was asked. The descriptors it got are open until the end."""

    def __init__(self) -> None:
        self.requests: list[protocol.Request] = []
        self.connections = 0

    def answering(self, stdout: bytes = b"answer", exit_status: int = 0) -> Behaviour:
        """Read the request, then answer."""
        return self.sending(protocol.encode_answer(protocol.Answer(exit_status, stdout)))

    def sending(self, answer: bytes) -> Behaviour:
        """Read the request, then send these bytes and hang up."""

        def behave(connection: socket.socket) -> None:
            self.requests.append(protocol.receive_request(connection))
            with contextlib.suppress(OSError):
                connection.sendall(answer)

        return behave


def hang_up(connection: socket.socket) -> None:
    """Close the connection without a word."""


@contextlib.contextmanager
def serve(path: Path, agent: Agent, *behaviours: Behaviour) -> Iterator[Agent]:
    """Listen, and treat each connection by the next behaviour; the last one is for all that follow."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(8)

    def work() -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                if stopping.is_set():
                    return
                behave = behaviours[min(agent.connections, len(behaviours) - 1)]
                agent.connections += 1
                with contextlib.suppress(OSError, protocol.FrameInvalid):  # the relay's patience was over first
                    behave(connection)

    stopping = threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield agent
    finally:
        stopping.set()
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(str(path))
        thread.join()
        listener.close()
        path.unlink()
        for request in agent.requests:
            if request.netns is not None:
                os.close(request.netns)
