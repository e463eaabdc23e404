"""Frames: written, read, and refused."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cni import protocol
from cni.protocol import Answer, FrameInvalid, Request
from tests import frames

CORPUS = sorted(path for path in (Path(__file__).parent / "shim_corpus").rglob("*") if path.is_file())
CONTENTS = st.sampled_from([path.read_bytes() for path in CORPUS])
"""The bytes that the relay's code is fuzzed with."""


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Take two inputs of the corpus and cut, splice and change them; often with a length that is true."""
    one, other = draw(CONTENTS), draw(CONTENTS)
    at, after = draw(st.integers(0, len(one))), draw(st.integers(0, len(other)))
    content = bytearray(one[:at] + draw(st.binary(max_size=8)) + other[after:])
    if len(content) >= protocol.HEAD_SIZE and draw(st.booleans()):
        content[: protocol.HEAD_SIZE] = b"NFC1" + (len(content) - protocol.HEAD_SIZE).to_bytes(4, "big")
    return bytes(content)


def read_everywhere(content: bytes) -> None:
    with suppress(FrameInvalid):
        request = protocol.decode_request(content)
        again = protocol.decode_request(frames.encode_request(request))
        assert again == request
    here, there = socket.socketpair()
    with here, there, suppress(FrameInvalid):
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        here.sendall(content)
        here.shutdown(socket.SHUT_WR)
        protocol.receive_request(there, seconds=20)


@settings(max_examples=500)
@given(damaged())
def test_no_bytes_raise_anything_but_a_frame_error(content: bytes) -> None:
    read_everywhere(content)


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (b"", "shorter than"),
        (b"NFC1\0\0\0", "shorter than"),
        (b"NFC2\0\0\0\0", "begins with"),
        (b"NFC1\0\0\0\2x", "says 2 bytes, has 1"),
        (b"NFC1\0\0\0\0x", "says 0 bytes, has 1"),
        (b"NFC1\xff\xff\xff\xff", "limit 1048576"),
        (b"NFC1\0\0\0\0", "does not end"),
        (b"NFC1\0\0\0\3A=1", "does not end"),
        (b"NFC1\0\0\0\3A\0\0", "not NAME=VALUE"),
        (b"NFC1\0\0\0\4=A\0\0", "not NAME=VALUE"),
    ],
)
def test_what_is_wrong_with_a_frame_is_told(frame: bytes, text: str) -> None:
    with pytest.raises(FrameInvalid, match=text):
        protocol.decode_request(frame)


def received(frame: bytes, *descriptors: int) -> Request:
    """Send a frame with descriptors, and receive it."""
    here, there = socket.socketpair()
    with here, there:
        socket.send_fds(here, [frame], list(descriptors))
        here.shutdown(socket.SHUT_WR)
        return protocol.receive_request(there)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("count", [2, 3, 9])
def test_more_than_one_descriptor_is_refused_and_all_are_closed(count: int) -> None:
    frame = frames.encode_request(Request({"A": "1"}, b""))
    with open("/dev/null") as file:
        before = open_descriptors()
        with pytest.raises(FrameInvalid, match="more than one descriptor"):
            received(frame, *[file.fileno()] * count)
        assert open_descriptors() <= before


@pytest.mark.parametrize("frame", [b"garbage!", b"NFC1\0\0\0\4A\0\0x", b"NFC1\0\0\0\4A", b"NF"])
def test_the_descriptor_of_a_refused_request_is_closed(frame: bytes) -> None:
    with open("/dev/null") as file:
        before = open_descriptors()
        with pytest.raises(FrameInvalid):
            received(frame, file.fileno())
        assert open_descriptors() <= before


def test_a_large_answer_is_taken_as_slowly_as_the_relay_likes() -> None:
    answer = Answer(0, os.urandom(3 << 20))
    here, there = socket.socketpair()
    with here, there:
        sending = threading.Thread(target=protocol.send_answer, args=(here, answer, 20), daemon=True)
        sending.start()
        received = b""
        while len(received) < protocol.HEAD_SIZE + 1 + len(answer.stdout):
            received += there.recv(1 << 16)
        sending.join(20)
        assert not sending.is_alive()
    assert frames.decode_answer(received) == answer
