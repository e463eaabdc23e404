"""A thread goes to a processor and comes back to all that it may use."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable

import pytest

from agent.hardware.netlink.cpus import Processors

ALL = os.sched_getaffinity(0)


def in_thread(work: Callable[[], None]) -> None:
    """Run something on a thread whose affinity nobody else has."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def is_bound() -> bool:
    """Tell whether somebody has bound the whole process to some processors."""
    found: list[bool] = []

    def work() -> None:
        os.sched_setaffinity(0, range(8192))
        found.append(os.sched_getaffinity(0) != ALL)

    in_thread(work)
    return found[0]


IS_BOUND = is_bound()
"""Then nothing may be chosen; that is what the tests look for."""


@pytest.mark.parametrize("cpu", sorted({min(ALL), max(ALL)}))
def test_the_block_runs_on_the_processor_and_what_follows_anywhere(cpu: int) -> None:
    def work() -> None:
        with Processors().on(cpu):
            assert os.sched_getaffinity(0) == (ALL if IS_BOUND else {cpu})
        assert os.sched_getaffinity(0) == ALL

    in_thread(work)


def test_an_error_leaves_the_thread_free_as_well() -> None:
    def work() -> None:
        with pytest.raises(OSError, match="of the block"), Processors().on(min(ALL)):
            raise OSError("of the block")
        assert os.sched_getaffinity(0) == ALL

    in_thread(work)


@pytest.mark.parametrize("cpu", [None, -1, 10**6])
def test_a_processor_that_is_not_there_is_passed_over(cpu: int | None) -> None:
    def work() -> None:
        with Processors().on(cpu):
            assert os.sched_getaffinity(0) == ALL

    in_thread(work)


def test_a_process_that_was_bound_to_some_processors_stays_bound() -> None:
    def work() -> None:
        only = min(ALL)
        os.sched_setaffinity(0, {only})
        with Processors().on(max(ALL)):
            assert os.sched_getaffinity(0) == {only}
        assert os.sched_getaffinity(0) == {only}

    in_thread(work)


@pytest.mark.parametrize("allowed", [0, 2], ids=["forbidden from the start", "forbidden later"])
def test_a_kernel_that_forbids_it_changes_nothing(monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
    calls: list[object] = []

    def choose(_thread: int, processors: object) -> None:
        calls.append(processors)
        if len(calls) > allowed:
            raise PermissionError(errno.EPERM, "sched_setaffinity")

    monkeypatch.setattr(os, "sched_setaffinity", choose)
    processors, done = Processors(), []
    for _ in range(3):
        with processors.on(min(ALL)):
            done.append(True)
    assert len(done) == 3
    assert len(calls) == max(1, allowed + 1)


@pytest.mark.parametrize("error", [None, ValueError("of the block")])
def test_a_thread_that_cannot_come_back_is_told_of_and_is_the_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception | None
) -> None:
    calls: list[object] = []

    def choose(_thread: int, wanted: object) -> None:
        calls.append(wanted)
        if len(calls) == 3:  # to look whether it works, to go there, to come back
            raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(os, "sched_setaffinity", choose)
    processors = Processors()
    with contextlib.suppress(ValueError), processors.on(min(ALL)):
        if error is not None:
            raise error
    assert "stays on processor" in caplog.text
    with processors.on(min(ALL)):
        assert len(calls) == 3
