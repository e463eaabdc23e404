"""Runs the parts of a long test one after the other, each as a process of its own, and keeps the report true.

The report says at any moment what has been found so far and which parts are still to end, whatever becomes of a part
or of this process: it is written before the first part, as figures come, and at the end. What is shown goes into a log
beside it, too, so that nobody need stay to look.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

HEARTBEAT_SECONDS = 60.0
"""A part that says nothing for so long is said to be at work."""
LOOK_SECONDS = 2.0
GRACE_SECONDS = 20.0
"""How long a part that is told to end has for tidying up."""
ENDING = (signal.SIGTERM, signal.SIGINT)

Figures = dict[str, Any]


class Ended(BaseException):
    """Somebody wants the whole to end."""


class Supervisor:
    """One run of some parts."""

    def __init__(
        self,
        report: Path,
        parts: Mapping[str, Sequence[str]],
        figures: Figures,
        *,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`parts` are commands by name. Each is called with `--figures FILE` and writes there what `note` says.

        `figures` are in the report from the beginning.
        """
        self._report = report
        self._log = report.with_suffix(".log")
        self._parts = parts
        self._figures = dict(figures)
        self._problems: list[str] = []
        self._unfinished = list(parts)
        self._heartbeat = heartbeat_seconds
        self._clock = clock
        self._said_at = 0.0

    def run(self) -> int:
        """Run all parts. Returns 1 if anything was wrong, or anything did not come to its end."""
        self._report.parent.mkdir(parents=True, exist_ok=True)
        self._log.write_text("")
        self._write()
        with _told_to_end():
            try:
                for name, command in self._parts.items():
                    self._part(name, command)
            except Ended as ended:
                self._problems.append(f"{ended}: {', '.join(self._unfinished)} did not come to an end")
        self._write()
        self.say("\n" + "\n".join(f"{name:24} {value}" for name, value in self._figures.items()))
        self.say(f"\nThe figures are in {self._report}")
        for problem in self._problems:
            self.say(f"WRONG: {problem}")
        return 1 if self._problems else 0

    def say(self, text: str) -> None:
        """Show a line at once, and keep it. Who looked on may have gone."""
        self._said_at = self._clock()
        with suppress(OSError):
            print(text, flush=True)
        with self._log.open("a") as log:
            log.write(text + "\n")

    def _part(self, name: str, command: Sequence[str]) -> None:
        began = self._clock()
        self.say(f"== {name}")
        file = self._report.with_name(f".{self._report.name}.{name}")
        file.unlink(missing_ok=True)
        process = subprocess.Popen(
            [*command, "--figures", str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        before, problems = dict(self._figures), list(self._problems)
        try:
            for line in self._lines(process):
                if line is not None:
                    self.say(line)
                elif self._clock() - self._said_at > self._heartbeat:
                    self.say(f"{name}: at work for {self._clock() - began:.0f} s")
                found = _read(file)
                self._figures = before | found.get("figures", {})
                self._problems = problems + found.get("problems", [])
                self._write()
        finally:
            _end(process)
            found = _read(file)
            file.unlink(missing_ok=True)
            self._figures = before | found.get("figures", {})
            self._problems = problems + found.get("problems", [])
        if not found.get("is_over"):
            self._problems.append(f"{name} ended with status {process.returncode} before it was over")
        else:
            self._unfinished.remove(name)
        self._figures[f"{name.replace('-', '_')}_seconds"] = round(self._clock() - began)
        self._write()

    def _lines(self, process: subprocess.Popen[bytes]) -> Iterator[str | None]:
        """Yield what a part says, line by line, and None now and then; until it ends, whoever keeps its output open."""
        assert process.stdout is not None
        pending = b""
        with process.stdout as output, selectors.DefaultSelector() as ready:
            ready.register(output, selectors.EVENT_READ)
            while True:
                is_over = process.poll() is not None
                if ready.select(0 if is_over else LOOK_SECONDS):
                    data = os.read(output.fileno(), 1 << 16)
                    *lines, pending = (pending + data).split(b"\n")
                    yield from (line.decode(errors="replace") for line in lines)
                    if data:
                        continue
                    process.wait()
                    is_over = True
                yield None
                if is_over:
                    if pending:
                        yield pending.decode(errors="replace")
                    return

    def _write(self) -> None:
        document = self._figures | {"unfinished": self._unfinished, "problems": self._problems}
        fresh = self._report.with_name(f".{self._report.name}.new")
        fresh.write_text(json.dumps(document, indent=1) + "\n")
        fresh.rename(self._report)


def note(file: Path, figures: Mapping[str, Any], problems: Sequence[str], *, is_over: bool) -> None:
    """Say, in a part, what it has found so far."""
    fresh = file.with_name(f"{file.name}.new")
    fresh.write_text(json.dumps({"figures": dict(figures), "problems": list(problems), "is_over": is_over}))
    fresh.rename(file)


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part, and whatever it has left behind of its process group."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def _told_to_end() -> Iterator[None]:
    """Raise Ended, once, where a signal says so. A terminal that goes away is no reason to end."""

    def end(number: int, frame: FrameType | None) -> None:
        for one in ENDING:
            signal.signal(one, signal.SIG_IGN)
        raise Ended(f"ended by {signal.Signals(number).name}")

    former = {number: signal.signal(number, end) for number in ENDING}
    former[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
