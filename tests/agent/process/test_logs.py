from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

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
        log.info("granted %s", "0000:3b:02.1", extra={"units": 2})
    (line,) = lines(stream)
    assert line["time"].endswith("Z")
    assert (line["level"], line["logger"], line["message"], line["units"]) == (
        "info",
        "tests.logs",
        "granted 0000:3b:02.1",
        2,
    )


def test_bound_fields_are_in_every_line_inside_and_in_none_outside() -> None:
    with captured() as stream:
        with logs.bind(device="0000:3b:02.1"), logs.bind(pod="ns/a"):
            log.info("inside")
        log.info("outside")
    inside, outside = lines(stream)
    assert (inside["device"], inside["pod"]) == ("0000:3b:02.1", "ns/a")
    assert "device" not in outside


def test_bound_fields_follow_a_task_and_do_not_leak_into_its_neighbour() -> None:
    async def work(pod: str) -> None:
        with logs.bind(pod=pod):
            await asyncio.sleep(0)
            await asyncio.to_thread(log.info, "working")

    async def both() -> None:
        await asyncio.gather(work("ns/a"), work("ns/b"))

    with captured() as stream:
        asyncio.run(both())
    assert {line["pod"] for line in lines(stream) if line["message"] == "working"} == {"ns/a", "ns/b"}


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
    with captured() as stream, logs.bind(token="abc"):
        log.info("asked", extra={"Authorization": "Bearer abc"})
    assert "abc" not in stream.getvalue()


def test_long_text_is_cut() -> None:
    with captured() as stream:
        log.info("x" * 100_000, extra={"request": {"a": "y" * 100_000}})
    assert len(stream.getvalue()) < 3 * logs.MAX_TEXT


def test_a_format_that_does_not_fit_still_gives_a_line() -> None:
    with captured() as stream:
        log.info("%d devices", "many")
    assert lines(stream)[0]["message"] == "%d devices ('many',)"


def test_an_extra_field_cannot_take_the_place_of_a_fixed_one() -> None:
    with captured() as stream:
        log.info("true", extra={"level": "forged"})
    (line,) = lines(stream)
    assert (line["level"], line["field_level"]) == ("info", "forged")


def test_text_form_is_one_readable_line() -> None:
    with captured("text") as stream, logs.bind(pod="ns/a"):
        log.warning("link is\ndown", extra={"why": "no carrier"})
    (line,) = stream.getvalue().splitlines()
    assert line.endswith('WARNING link is\\ndown pod=ns/a why="no carrier"')


FORGED = "a\rb\x1b[2Jc\u2028d\x9b1me\udcff\n2026 ERROR f"


def test_what_comes_from_outside_neither_forges_a_line_nor_steers_a_terminal() -> None:
    with captured("text") as stream:
        log.warning("IPAM plugin x: %s", FORGED, extra={"said": FORGED})
        try:
            raise ValueError(FORGED)
        except ValueError:
            log.exception("oh")
    text = stream.getvalue()
    assert [c for c in text if not c.isprintable() and c != "\n"] == []
    first, *_ = text.split("\n")
    assert first.endswith(r'a\rb\u001b[2Jc\u2028d\u009b1me\udcff\n2026 ERROR f"')
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


def test_an_unknown_level_or_form_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'loud'"):
        logs.configure(io.StringIO(), level="loud")
    with pytest.raises(ValueError, match="'xml'"):
        logs.configure(io.StringIO(), form="xml")
