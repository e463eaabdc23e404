"""The timer that wakes the ledger's thread."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from agent.ledger.alarm import Alarm


@contextmanager
def opened(seconds: float) -> Iterator[Alarm]:
    alarm = Alarm(seconds)
    yield alarm
    alarm.close()  # not after a failure: somebody may be waiting


def waits(alarm: Alarm, seconds: float) -> bool:
    """Wait on a thread, which may be left behind, and tell whether it still waits after so many seconds."""
    waiting = threading.Thread(target=alarm.wait, daemon=True)
    waiting.start()
    waiting.join(seconds)
    return waiting.is_alive()


def test_it_goes_off_after_its_time_and_once_each_time_it_is_set() -> None:
    with opened(0.05) as alarm:
        for _ in range(2):
            began = time.monotonic()
            assert alarm.set()
            assert not waits(alarm, 20)
            assert time.monotonic() - began >= 0.05
        waiting = threading.Thread(target=alarm.wait, daemon=True)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        assert alarm.set()
        waiting.join(20)
        assert not waiting.is_alive()


def test_one_that_is_set_again_begins_anew() -> None:
    with opened(0.2) as alarm:
        assert alarm.set()
        time.sleep(0.1)
        again = time.monotonic()
        assert alarm.set()
        assert not waits(alarm, 20)
        assert time.monotonic() - again >= 0.2


def test_one_that_is_closed_says_so() -> None:
    alarm = Alarm(1)
    alarm.close()
    assert not alarm.set()


def test_a_process_without_descriptors_is_told() -> None:
    code = (
        "import resource; from agent.ledger.alarm import Alarm;"
        " resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3)); Alarm(1)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert "[Errno 24] timerfd_create: Too many open files" in process.stderr
