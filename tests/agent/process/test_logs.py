from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from agent.errors import DeviceGone
from agent.process import logs

log = logging.getLogger("tests.logs")


@contextmanager
def captured(form: str = "json") -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    try:
        logs.configure(stream, "DEBUG", form)
        yield stream
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_one_json_object_with_time_level_logger_and_message() -> None:
    with captured() as stream:
        log.info("granted %s", "0000:3b:02.1", extra={"units": 2, "level": "forged"})
        log.info("%d devices", "many")
    line, unfit = lines(stream)
    assert line.pop("time").endswith("Z")
    fixed = {"level": "info", "logger": "tests.logs", "message": "granted 0000:3b:02.1"}
    assert line == {**fixed, "units": 2, "field_level": "forged"}
    assert unfit["message"] == "%d devices ('many',)"


def test_an_error_of_ours_brings_its_reason_and_the_traceback() -> None:
    with captured() as stream:
        try:
            raise DeviceGone("0000:3b:02.1", "in /sys")
        except DeviceGone:
            log.exception("cannot attach")
    (line,) = lines(stream)
    assert line["reason"] == "DeviceGone"
    assert "0000:3b:02.1 is gone" in line["traceback"]


def test_what_may_be_a_secret_by_its_name_is_not_shown() -> None:
    with captured() as stream:
        log.info("asked", extra={"Authorization": "Bearer abc", "token": "abc"})
    assert "abc" not in stream.getvalue()


def test_long_text_is_cut() -> None:
    with captured() as stream:
        log.info("x" * 100_000, extra={"request": {"a": "y" * 100_000}})
    assert len(stream.getvalue()) < 3 * logs.MAX_TEXT


FORGED = "a\rb\x1b[2Jc\u2028d\x9b1me\udcff\n2026 ERROR f"


def test_what_comes_from_outside_neither_forges_a_line_nor_steers_a_terminal() -> None:
    with captured("text") as stream:
        log.warning("IPAM plugin x: %s", FORGED, extra={"pod": "ns/a", "said": FORGED})
        try:
            raise ValueError(FORGED)
        except ValueError:
            log.exception("oh")
    text = stream.getvalue()
    assert [c for c in text if not c.isprintable() and c != "\n"] == []
    first, *_ = text.split("\n")
    shown = r"a\rb\u001b[2Jc\u2028d\u009b1me\udcff\n2026 ERROR f"
    assert first.partition("WARNING ")[2] == f'IPAM plugin x: {shown} pod=ns/a said="{shown}"'
    with captured() as stream:
        log.warning("IPAM plugin x: %s", FORGED, extra={"said": FORGED})
    text = stream.getvalue()
    assert [c for c in text[:-1] if not c.isprintable()] == []
    (line,) = lines(stream)
    assert (line["message"], line["said"]) == (f"IPAM plugin x: {FORGED}", FORGED)


def test_auto_form_is_json_unless_the_stream_is_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    with captured("auto") as stream:
        log.info("hello")
        assert lines(stream)
    with captured():
        assert isinstance(logs.configure(Terminal()).formatter, logs.TextFormatter)
