"""The relay's end of `cni.protocol`: requests written, answers read."""

from __future__ import annotations

import struct

from cni.protocol import MAGIC, Answer, Request

MAX_ANSWER = 4 << 20
"""More is refused (`cni/shim/frame.h`)."""


def encode_request(request: Request) -> bytes:
    """Make a request frame. The descriptor travels beside it."""
    env = b"".join(f"{k}={v}".encode("utf-8", "surrogateescape") + b"\0" for k, v in request.env.items())
    body = env + b"\0" + request.stdin
    return struct.pack(">4sI", MAGIC, len(body)) + body


def decode_answer(frame: bytes) -> Answer:
    """Read a whole answer frame. Raises ValueError."""
    try:
        magic, length, status = struct.unpack_from(">4sIB", frame)
    except struct.error as error:
        raise ValueError("shorter than an answer") from error
    if magic != MAGIC or not 0 < length == len(frame) - 8 <= MAX_ANSWER:
        raise ValueError(f"begins with {magic!r}, says {length} bytes, has {len(frame) - 8}")
    return Answer(status, frame[9:])
