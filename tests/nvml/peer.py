"""The real pynvml over the fake library, in a process of its own: run as a program, and the test's end of it."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

DEADLINE = 20.0
ROOT = Path(__file__).parents[2]


class Peer:
    """A program that answers each line with one, and may say more lines by itself."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._answers: queue.Queue[Any] = queue.Queue()
        self.said: queue.Queue[Any] = queue.Queue()
        """What it said by itself: ["changed", what] or ["event", {…}]."""
        self.listening = threading.Thread(target=self._listen, daemon=True)
        self.listening.start()

    def ask(self, command: str, **options: Any) -> Any:
        """Give a command and wait for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([command, options]) + "\n")
        self._process.stdin.flush()
        return self._answers.get(timeout=DEADLINE)

    def hear(self, kind: str, word: str = "") -> Any:
        """Wait until it says something of a kind, with a word in it."""
        while True:
            said = self.said.get(timeout=DEADLINE)
            if said[0] == kind and word in said[1]:
                return said[1]

    def until(self, command: str, fits: Callable[[Any], bool], **options: Any) -> Any:
        """Ask until the answer fits."""
        for _ in range(2000):
            answer = self.ask(command, **options)
            if fits(answer):
                return answer
            threading.Event().wait(0.01)
        raise AssertionError(f"{command} answered last {answer}")

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind, value = json.loads(line)
            if kind == "answer":
                self._answers.put(value)
            else:
                self.said.put((kind, value))


@contextmanager
def peer(mode: str, environment: dict[str, str]) -> Iterator[Peer]:
    """Start this module in a mode: `nvml`, `monitor`, `impatient`, `hasty` or `patient`.

    An impatient monitor says soon that the driver hangs, and a hasty one does not even wait for the first reading. A
    patient one reads all but once, unless it is asked to.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.nvml.peer", mode],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    started = Peer(process)
    try:
        yield started
    finally:
        process.stdin.close()
        status = process.wait(DEADLINE)
        started.listening.join(DEADLINE)
        process.stdout.close()
    assert status == 0


def main(mode: str) -> None:
    lock = threading.Lock()

    def say(kind: str, value: Any) -> None:
        with lock:
            print(json.dumps([kind, value]), flush=True)

    answer = _nvml() if mode == "nvml" else _monitor(say, mode)
    for line in sys.stdin:
        command, options = json.loads(line)
        say("answer", answer(command, options))
    answer("close", {})
    answer("close", {})


def _nvml() -> Callable[[str, dict[str, Any]], Any]:
    from agent.hardware.nvml.library import Nvml

    nvml = Nvml()

    def answer(command: str, options: dict[str, Any]) -> Any:
        if command == "close":
            return nvml.close()
        return {**asdict(nvml.read(**options)), "loaded": "pynvml" in sys.modules, "session": nvml.session}

    return answer


def _monitor(say: Callable[[str, Any], None], mode: str) -> Callable[[str, dict[str, Any]], Any]:
    from agent.hardware.nvml.monitor import GpuMonitor, Times

    first, overdue = {"impatient": (DEADLINE, 0.3), "hasty": (0.1, 0.3)}.get(mode, (DEADLINE, DEADLINE))
    slow = 3600.0 if mode == "patient" else 0.2
    monitor = GpuMonitor(Times(apart=0.05, quick=0.05, slow=slow, first=first, overdue=overdue, absent=0.0))
    monitor.follow(
        on_change=lambda what, change: say("changed", what),
        on_event=lambda event: say("event", asdict(event)),
    )

    def answer(command: str, options: dict[str, Any]) -> Any:
        if command == "close":
            return monitor.close()
        if command == "pci":
            return monitor.pci_event(**options)
        if command == "expect":
            return monitor.expect(**options)
        if command == "pause":
            return monitor.pause(**options)
        return {
            **asdict(monitor.latest()),
            "session": monitor.session,
            "watching": monitor.watching,
            "unheard": monitor.unheard,
            "threads": threading.active_count(),
        }

    return answer


if __name__ == "__main__":
    main(sys.argv[1])
