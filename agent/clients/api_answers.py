"""What the API server answers: bodies, streams, and refusals as errors of ours."""

from __future__ import annotations

import codecs
import contextlib
import json
import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from agent.errors import Conflicted, Refused, Unavailable

MAX_RETRY_AFTER_SECONDS = 3600.0
MAX_ANSWER_BYTES = 64 << 20
MAX_EVENT_BYTES = 8 << 20
"""A watch event holds one object; etcd takes none above 1.5 MiB."""
CHUNK_BYTES = 64 << 10
T = TypeVar("T")

_MANAGER = re.compile(r'conflict with "([^"]*)"')
_CUSTOM = re.compile(r"PATCH /apis/([^/]+)/[^/]+/([^/]+)/")


@contextlib.contextmanager
def translated(where: str) -> Iterator[None]:
    """Turn the package's errors, and those of the connection, into Unavailable."""
    from kubernetes.client.exceptions import ApiException
    from kubernetes.config.config_exception import ConfigException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except (ApiException, ConfigException, HTTPError, ssl.SSLError, OSError) as error:
        raise Unavailable(f"{where}: the API server does not answer: {_short(error)}") from error


def body_of(response: Any) -> bytes:
    """Read a whole answer. Raises Unavailable for one without end."""
    data: bytes = response.read(MAX_ANSWER_BYTES + 1)
    if len(data) > MAX_ANSWER_BYTES:
        raise Unavailable(f"the API server's answer is larger than {MAX_ANSWER_BYTES} bytes")
    return data


def lines_of(response: Any) -> Iterator[bytes]:
    """Yield the lines of a streamed answer as they come. Raises Unavailable for one without end."""
    pending = b""
    for chunk in response.stream(amt=None):
        *lines, pending = (pending + chunk).split(b"\n")
        yield from filter(None, lines)
        if len(pending) > MAX_EVENT_BYTES:
            raise Unavailable(f"a watch event is larger than {MAX_EVENT_BYTES} bytes")


def listed(response: Any, read: Callable[[dict[str, Any]], T], where: str) -> dict[str, Any]:
    """Read a list object as it comes, with what `read` makes of each item in place of it. Raises Unavailable.

    Decoded, an object may take a dozen times as much memory as it has bytes, and who may create pods decides how many
    and how large those of a node are. So no more than one is there at a time.
    """
    text = _Text(response.stream(CHUNK_BYTES), where)
    found: dict[str, Any] = {}
    if text.next() != "{":
        raise text.wrong()
    text.skip()
    while text.next() != "}":
        key = text.value()
        if text.next() != ":":
            raise text.wrong()
        text.skip()
        if key == "items" and text.next() == "[":
            text.skip()
            found[key] = [read(item) for item in text.items()]
        else:
            found[str(key)] = text.value()
        if text.next() == ",":
            text.skip()
    text.skip()
    if text.next():
        raise text.wrong()
    return found


class _Text:
    """JSON that comes in pieces, read value by value. What was read is forgotten."""

    def __init__(self, pieces: Iterator[bytes], where: str) -> None:
        self._pieces = pieces
        self._where = where
        self._decode = codecs.getincrementaldecoder("utf-8")()
        self._read = json.JSONDecoder().raw_decode
        self._text = ""
        self._at = self._bytes = 0

    def next(self) -> str:
        """Look at the next character that is no blank; empty at the end."""
        while True:
            while self._at < len(self._text):
                if not self._text[self._at].isspace():
                    return self._text[self._at]
                self._at += 1
            if not self._more(0):
                return ""

    def skip(self) -> None:
        """Go past the character that `next` has shown."""
        self._at += 1

    def value(self) -> Any:
        """Read a value that is followed by something."""
        self.next()
        while True:
            known = len(self._text) - self._at
            try:
                value, end = self._read(self._text, self._at)
            except ValueError:
                end = len(self._text)  # half of it, perhaps
            if end < len(self._text):
                self._at = end
                return value
            # As much again as is there: whatever is tried in vain is tried for half of it at most.
            if known > MAX_EVENT_BYTES or not self._more(known):
                raise self.wrong()

    def items(self) -> Iterator[Any]:
        """Read the objects of a list whose beginning is past, and its end. What else is in it is left out."""
        while self.next() != "]":
            item = self.value()
            if isinstance(item, dict):
                yield item
            if self.next() == ",":
                self.skip()
        self.skip()

    def wrong(self) -> Unavailable:
        return Unavailable(f"{self._where}: the answer is not JSON, or not an object")

    def _more(self, characters: int) -> bool:
        """Take in so many characters more, or one piece. False at the end."""
        self._text, self._at = self._text[self._at :], 0
        wanted, pieces = len(self._text) + characters, [self._text]
        length, is_over = len(self._text), True
        for piece in self._pieces:
            self._bytes += len(piece)
            if self._bytes > MAX_ANSWER_BYTES:
                raise Unavailable(f"the API server's answer is larger than {MAX_ANSWER_BYTES} bytes")
            try:
                pieces.append(self._decode.decode(piece))
            except UnicodeDecodeError as error:
                raise self.wrong() from error
            length += len(pieces[-1])
            is_over = False
            if length > wanted:
                break
        self._text = "".join(pieces)
        return not is_over


def decoded(data: bytes, where: str) -> dict[str, Any]:
    """Read a JSON object. Raises Unavailable for anything else."""
    try:
        document = json.loads(data)
    except ValueError as error:
        raise Unavailable(f"{where}: the answer is not JSON") from error
    if not isinstance(document, dict):
        raise Unavailable(f"{where}: the answer is not an object")
    return document


def refusal(status: int, retry_after: str | None, data: bytes, where: str) -> Unavailable:
    """Make the error for an answer of this status, with the remedy where there is one."""
    try:
        answer = json.loads(data)
        text = str(answer["message"])
    except (ValueError, KeyError, TypeError):
        answer, text = {}, data[:200].decode("utf-8", "replace")
    if status == 404 and (custom := _CUSTOM.match(where)):
        text += f" (is the CustomResourceDefinition {custom[2]}.{custom[1]} installed?)"
    if status in (401, 403):
        text += " (does the agent's service account have the permissions that the configuration needs?)"
    message = f"{where}: {status} {' '.join(text.split())}"
    if status == 409:
        return Conflicted(message, _owners(answer))
    if status == 429 or status >= 500:
        seconds = float(retry_after) if retry_after is not None and retry_after.isdecimal() else None
        return Unavailable(message, None if seconds is None else min(seconds, MAX_RETRY_AFTER_SECONDS))
    return Refused(status, message)


def _owners(answer: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Read who owns what from the causes of a conflict."""
    details = answer.get("details")
    causes = details.get("causes") if isinstance(details, dict) else None
    found = []
    for cause in causes if isinstance(causes, list) else []:
        manager = _MANAGER.search(str(cause.get("message", ""))) if isinstance(cause, dict) else None
        if manager is not None:
            found.append((str(cause.get("field", "")), manager[1]))
    return found


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
