"""The timer that wakes the ledger's thread."""

from __future__ import annotations

import errno
import os
import resource
import threading
import time

import pytest

from agent.ledger.alarm import Alarm


def test_it_goes_off_after_its_time_and_once_each_time_it_is_set() -> None:
    alarm = Alarm(0.05)
    try:
        for _ in range(2):
            began = time.monotonic()
            alarm.set()
            alarm.wait()
            assert time.monotonic() - began >= 0.05
        waiting = threading.Thread(target=alarm.wait)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        alarm.set()
        waiting.join(20)
        assert not waiting.is_alive()
    finally:
        alarm.close()


def test_one_that_is_set_again_begins_anew() -> None:
    alarm = Alarm(0.2)
    try:
        alarm.set()
        time.sleep(0.1)
        again = time.monotonic()
        alarm.set()
        alarm.wait()
        assert time.monotonic() - again >= 0.2
    finally:
        alarm.close()


def test_a_process_without_descriptors_is_told() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = os.open("/dev/null", os.O_RDONLY)
    os.close(taken)
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken, limits[1]))
    try:
        with pytest.raises(OSError, match="timerfd_create") as raised:
            Alarm(1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert raised.value.errno == errno.EMFILE
