"""Structured logs on stderr: one JSON object per line, or plain text for a person at a terminal.

A line has time, level, logger and message; then the `extra=` of the call; then, for an error of ours, its reason. Text
that comes from outside is cut, and what may be a secret by its name is never written.
"""

from __future__ import annotations

import json
import logging
import re
from datetime import UTC, datetime
from typing import Any, TextIO

from agent.errors import AgentError
from agent.model.printable import MASK, is_secret, masked

MAX_TEXT = 4096
"""Characters kept of one text; a CNI request or a peer's answer must not flood the node's log."""
MAX_TRACEBACK = 4 * MAX_TEXT

_FIXED = ("time", "level", "logger", "message")
_RECORD_KEYS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure(stream: TextIO, level: str = "INFO", form: str = "auto") -> logging.Handler:
    """Send the process's log to `stream` and return the handler, which has replaced all others.

    `form` is json, text, or auto: text to a terminal and JSON to anything else.
    """
    text = form == "text" or (form == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextFormatter() if text else JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # At DEBUG gRPC writes a line for each event of each stream, which says nothing about the node.
    logging.getLogger("grpc").setLevel(max(root.level, logging.INFO))
    return handler


class JsonFormatter(logging.Formatter):
    """One JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
            **_fields(record),
        }
        if trace := _traceback(self, record):
            line["traceback"] = trace
        return _legible(json.dumps(line, default=_plain, ensure_ascii=False))


class TextFormatter(logging.Formatter):
    """One line for people: time, level, message, then the fields as key=value."""

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{key}={_word(value)}" for key, value in _fields(record).items())
        head = f"{_time(record)[11:23]} {record.levelname:<7} {_message(record)}"
        line = _legible(" ".join(part for part in (head, fields) if part))
        trace = "\n".join(map(_legible, _traceback(self, record).splitlines()))
        return f"{line}\n{trace}" if trace else line


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _message(record: logging.LogRecord) -> str:
    try:
        return _cut(record.getMessage())
    except (TypeError, ValueError, KeyError):
        # A format that does not fit its arguments must cost neither the line nor the request.
        return _cut(f"{record.msg} {record.args!r}")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = {k: v for k, v in vars(record).items() if k not in _RECORD_KEYS}
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, AgentError):
        fields.setdefault("reason", error.reason)
    return {
        (f"field_{key}" if key in _FIXED else key): MASK if is_secret(key) else _shown(masked(value))
        for key, value in fields.items()
        if value is not None
    }


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    if not record.exc_info:
        return ""
    text = formatter.formatException(record.exc_info)
    return text if len(text) <= MAX_TRACEBACK else "… " + text[-MAX_TRACEBACK:]


def _shown(value: Any) -> Any:
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | tuple | dict | set | frozenset):
        text = json.dumps(value, default=_plain, ensure_ascii=False)
        return json.loads(text) if len(text) <= MAX_TEXT else _cut(text)
    return _cut(str(value))


def _plain(value: Any) -> Any:
    return sorted(value, key=str) if isinstance(value, set | frozenset) else str(value)


def _legible(text: str) -> str:
    """Write what is no letter as JSON does: what comes from outside must not end a line, nor steer a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}… ({len(text) - MAX_TEXT} more characters)"


def _word(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=_plain, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False) if re.search(r"[\s\"=]", text) or not text else text
