"""The frame that the relay and the agent exchange, and CNI's error codes.

One connection carries one request and one answer. All integers are big-endian.

    request   "NFC1"  u32 length  body            body = NAME=VALUE\\0 … NAME=VALUE\\0 \\0 stdin
    answer    "NFC1"  u32 length  u8 exit  body   body = what the relay prints on stdout

`length` counts what follows it. With the first byte of a request may come one descriptor
(SCM_RIGHTS): the open network namespace of CNI_NETNS. A spooled DEL is a file that holds one
request frame, without a descriptor.

A relay whose request has NODEFABRIC_BEATS in its environment asks for beats: zero bytes before the answer, one each
second, while the agent works on the request. An agent that gives them says so by the mode of its socket
(BEATING_MODE); from that one alone a relay expects them, and takes it for hung when none comes for 10 s. So either end
may be of a version that knows no beats.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

MAGIC = b"NFC1"
MAX_REQUEST = 1 << 20
_HEAD = struct.Struct(">4sI")
HEAD_SIZE = _HEAD.size
BEAT = b"\0"
BEATING_MODE = 0o700
"""Of the socket of an agent that gives beats: nobody executes a socket, and a relay sees it before it connects."""
RECEIVE_BYTES = 16384
"""At a time; nearly every request is smaller."""
_CONTROL_BYTES = socket.CMSG_SPACE(4 * array.array("i").itemsize)
_WAITING = int(socket.MSG_CMSG_CLOEXEC)
_NOT_WAITING = int(socket.MSG_DONTWAIT)
_AT_ONCE = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
_CUT = int(socket.MSG_CTRUNC)
"""As plain numbers: each step of arithmetic with the enumeration's members makes a new one."""

# Error codes of the CNI specification (1.1.0, section "Error") and our own, from 100 on.
INCOMPATIBLE_VERSION = 1
INVALID_ENVIRONMENT = 4
DECODING_FAILURE = 6
INVALID_NETWORK_CONFIG = 7
TRY_AGAIN_LATER = 11
PLUGIN_NOT_AVAILABLE = 50
CONNECTIVITY_LIMITED = 51
HARDWARE_FAILED = 100
IPAM_FAILED = 101
LEDGER_FAILED = 102
CHECK_FAILED = 103
INTERNAL = 999


class FrameInvalid(ValueError):
    """The bytes are not a frame of ours."""


class NothingSaid(FrameInvalid):
    """The connection ended before its first byte: somebody has looked whether anybody listens."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the runtime gave the relay. `netns` is an open descriptor the receiver must close."""

    env: Mapping[str, str]
    stdin: bytes
    netns: int | None = field(default=None, compare=False)
    spooled_at: float | None = field(default=None, compare=False)
    """When it was put on disk, as time.time tells; None if it came over a connection."""

    @property
    def wants_beats(self) -> bool:
        return "NODEFABRIC_BEATS" in self.env


@dataclass(frozen=True, slots=True)
class Answer:
    exit: int
    stdout: bytes


def decode_request(frame: bytes, netns: int | None = None) -> Request:
    """Read a whole request frame. Raises FrameInvalid."""
    if len(frame) < _HEAD.size:
        raise FrameInvalid("shorter than a frame's head")
    if _expected(frame) != len(frame) - _HEAD.size:
        raise FrameInvalid(f"says {_expected(frame)} bytes, has {len(frame) - _HEAD.size}")
    body = frame[_HEAD.size :]
    # No entry is empty: the first empty one ends the environment.
    written, end, stdin = (b"", b"\0", body[1:]) if body[:1] == b"\0" else body.partition(b"\0\0")
    if not end:
        raise FrameInvalid("the environment does not end")
    env: dict[str, str] = {}
    for entry in written.decode("utf-8", "surrogateescape").split("\0") if written else ():
        name, equals, value = entry.partition("=")
        if not equals or not name:
            raise FrameInvalid("an environment entry is not NAME=VALUE")
        env[name] = value
    return Request(MappingProxyType(env), stdin, netns)


def encode_answer(answer: Answer) -> bytes:
    """Make an answer frame."""
    return _HEAD.pack(MAGIC, 1 + len(answer.stdout)) + bytes([answer.exit]) + answer.stdout


def receive_request(connection: socket.socket, seconds: float | None = None) -> Request:
    """Read one request and its descriptor, if one came. Raises FrameInvalid, or OSError.

    `seconds` is for the whole request, however slowly it trickles in; TimeoutError when they are over.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    try:
        data, netns = _receive_with_descriptor(connection, _AT_ONCE)  # a relay sends all of it at once
    except BlockingIOError:
        _set_timeout(connection, deadline)
        data, netns = _receive_with_descriptor(connection, _WAITING)
    try:
        while len(data) < _HEAD.size or len(data) < _HEAD.size + _expected(data):
            _set_timeout(connection, deadline)
            more = connection.recv(RECEIVE_BYTES)
            if not more:
                raise FrameInvalid("the connection ended inside a frame")
            data += more
        return decode_request(data, netns)
    except BaseException:
        if netns is not None:
            os.close(netns)
        raise


def _set_timeout(connection: socket.socket, deadline: float | None) -> None:
    if deadline is not None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request did not come in time")
        connection.settimeout(left)


def _expected(data: bytes) -> int:
    magic, length = _HEAD.unpack_from(data)
    if magic != MAGIC or length > MAX_REQUEST:
        raise FrameInvalid(f"begins with {magic!r} and says {length} bytes (limit {MAX_REQUEST})")
    return int(length)


def send_answer(connection: socket.socket, answer: Answer, seconds: float | None = None) -> None:
    """Send an answer. Raises OSError; TimeoutError if the other side does not take it in `seconds`."""
    data = encode_answer(answer)
    if connection.gettimeout() is not None:
        connection.settimeout(None)  # or the time that was left for the request would count
    sent = _send_at_once(connection, data)
    if sent < len(data):
        connection.settimeout(seconds)
        connection.sendall(data[sent:])


def send_beat(connection: socket.socket) -> None:
    """Send a beat unless it would have to wait. Raises OSError if nobody is there."""
    _send_at_once(connection, BEAT)


def _send_at_once(connection: socket.socket, data: bytes) -> int:
    """Send what fits into the socket, which nearly every answer does."""
    try:
        return connection.send(data, _NOT_WAITING)
    except BlockingIOError:
        return 0


def _receive_with_descriptor(connection: socket.socket, how: int) -> tuple[bytes, int | None]:
    data, control, flags, _ = connection.recvmsg(RECEIVE_BYTES, _CONTROL_BYTES, how)
    received = array.array("i")
    for level, kind, payload in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
    if not data or len(received) > 1 or flags & _CUT:
        for fd in received:
            os.close(fd)
        raise FrameInvalid("more than one descriptor came") if data else NothingSaid("empty")
    return data, received[0] if received else None
