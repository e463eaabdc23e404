"""A CNI server on a real socket, and ways to knock at it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from cni.attachment import Attachments
from cni.call import Call
from cni.protocol import Request
from cni.server import CniServer
from tests import frames

ENV = {
    "CNI_CONTAINERID": "c1",
    "CNI_IFNAME": "net1",
    "CNI_NETNS": "/proc/self/ns/net",
    "CNI_PATH": "/opt/cni/bin",
    "CNI_ARGS": "IgnoreUnknown=1;K8S_POD_NAMESPACE=ns;K8S_POD_NAME=pod;K8S_POD_UID=uid",
}
CONF = {"cniVersion": "1.0.0", "name": "rails", "type": "nodefabric"}
NEWEST = {**CONF, "cniVersion": "1.1.0"}


class Scripted(Attachments):
    """Notes the calls and answers as told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Call]] = []
        self.netns_inodes: list[int | None] = []
        self.does: Callable[[Call], Mapping[str, Any]] = lambda call: {"cniVersion": "1.0.0"}

    def _note(self, command: str, call: Call) -> Mapping[str, Any]:
        self.calls.append((command, call))
        self.netns_inodes.append(None if call.netns is None else os.fstat(call.netns).st_ino)
        return self.does(call)

    def add(self, call: Call) -> Mapping[str, Any]:
        return self._note("ADD", call)

    def delete(self, call: Call) -> None:
        self._note("DEL", call)

    def check(self, call: Call) -> None:
        self._note("CHECK", call)

    def collect(self, call: Call) -> None:
        self._note("GC", call)

    def status(self, call: Call) -> None:
        self._note("STATUS", call)


class Door:
    """A server and ways to knock at it."""

    def __init__(self, path: Path, receive_seconds: float = 20.0) -> None:
        self.path = path
        self.attachments = Scripted()
        self.condition: str | None = None
        self.observed: list[str] = []
        self.server = CniServer(
            path,
            self.attachments,
            condition=lambda: self.condition,
            observe=self._observe,
            receive_seconds=receive_seconds,
        )

    @contextmanager
    def _observe(self, command: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.observed.append(f"{command} {getattr(error, 'reason', 'unexpected')}")
            raise
        self.observed.append(command)

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(10)
            connection.connect(str(self.path))
        except OSError:
            connection.close()
            raise
        return connection

    def knock(self, frame: bytes, *descriptors: int) -> bytes:
        """Send bytes and return all that comes back."""
        with self.connect() as connection:
            socket.send_fds(connection, [frame], list(descriptors))
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            return read_all(connection)

    def ask(self, command: str, conf: object = CONF, *, netns: bool = True, **env: str) -> tuple[int, Any]:
        """Make a CNI call and return its exit status and the JSON it prints."""
        stdin = conf if isinstance(conf, bytes) else json.dumps(conf).encode()
        frame = frames.encode_request(Request({**ENV, "CNI_COMMAND": command, **env}, stdin))
        with ExitStack() as stack:
            files = [stack.enter_context(open("/proc/self/ns/net")).fileno()] if netns else []
            answer = frames.decode_answer(self.knock(frame, *files))
        return answer.exit, json.loads(answer.stdout) if answer.stdout else None


def read_all(connection: socket.socket) -> bytes:
    received = b""
    with suppress(ConnectionResetError):
        while more := connection.recv(65536):
            received += more
    return received
