"""Runs the parts of a long test one after the other, each in a process of its own, and keeps their figures in a report.

The report is written before the first part and after each: it says what was found, and which parts are still to end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

GRACE_SECONDS = 20.0
"""How long a part that is told to end has for tidying up."""
Figures = dict[str, Any]


class Ended(BaseException):
    """A signal ends the whole."""


def run(report: Path, parts: Mapping[str, Sequence[str]], figures: Figures) -> int:
    """Run commands, which write to `--figures FILE` as `note` does. Returns 1 if anything was wrong or did not end."""
    figures, problems, unfinished = dict(figures), list[str](), list(parts)
    report.parent.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        _write(report, figures | {"unfinished": unfinished, "problems": problems})

    write()
    with _told_to_end():
        try:
            for name, command in parts.items():
                print(f"== {name}", flush=True)
                file, began = report.with_name(f".{report.name}.{name}"), time.monotonic()
                status = "?"
                try:
                    status = _run(command, file)
                finally:
                    found = json.loads(file.read_text()) if file.exists() else {}
                    file.unlink(missing_ok=True)
                    figures |= found.get("figures", {}) | {
                        f"{name.replace('-', '_')}_seconds": round(time.monotonic() - began)
                    }
                    problems += found.get("problems", [])
                if found.get("is_over"):
                    unfinished.remove(name)
                else:
                    problems.append(f"{name} ended with status {status} before it was over")
                write()
        except Ended as ended:
            problems.append(f"{ended}: {', '.join(unfinished)} did not come to an end")
    write()
    print("\n".join(f"{name:24} {value}" for name, value in figures.items()))
    print(f"\nThe figures are in {report}", *(f"WRONG: {problem}" for problem in problems), sep="\n", flush=True)
    return 1 if problems else 0


def note(file: Path, figures: Mapping[str, Any], problems: Sequence[str], *, is_over: bool) -> None:
    """Say, in a part, what it has found so far."""
    _write(file, {"figures": dict(figures), "problems": list(problems), "is_over": is_over})


def _run(command: Sequence[str], figures: Path) -> str:
    """Run a part, and end whatever it has left behind of its process group."""
    figures.unlink(missing_ok=True)
    process = subprocess.Popen([*command, "--figures", str(figures)], start_new_session=True)
    try:
        return str(process.wait())
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _write(file: Path, document: Mapping[str, Any]) -> None:
    fresh = file.with_name(f"{file.name}.new")
    fresh.write_text(json.dumps(document, indent=1) + "\n")
    fresh.rename(file)


@contextmanager
def _told_to_end() -> Iterator[None]:
    """Raise Ended, once, where a signal says so."""

    def end(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise Ended(f"ended by {signal.Signals(number).name}")

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
