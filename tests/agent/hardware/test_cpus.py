"""A thread goes to a processor and comes back to all that it may use."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from agent.hardware.cpus import Processors

ALL = os.sched_getaffinity(0)
FORBIDDEN_OR_NONE = (None, -1, 10**6)


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


@pytest.mark.parametrize("cpu", sorted(ALL))
def test_the_block_runs_on_the_processor_and_what_follows_anywhere(cpu: int) -> None:
    def work() -> None:
        with Processors().on(cpu):
            assert os.sched_getaffinity(0) == {cpu}
        assert os.sched_getaffinity(0) == ALL

    in_thread(work)


def test_an_error_leaves_the_thread_free_as_well() -> None:
    def work() -> None:
        with pytest.raises(OSError, match="of the block"), Processors().on(min(ALL)):
            raise OSError("of the block")
        assert os.sched_getaffinity(0) == ALL

    in_thread(work)


@pytest.mark.parametrize("cpu", FORBIDDEN_OR_NONE)
def test_a_processor_that_is_not_there_is_passed_over(cpu: int | None) -> None:
    def work() -> None:
        with Processors().on(cpu):
            assert os.sched_getaffinity(0) == ALL

    in_thread(work)


@pytest.mark.skipif(len(ALL) < 2, reason="needs two processors")
def test_a_process_that_was_bound_to_some_processors_stays_bound() -> None:
    def work() -> None:
        only = min(ALL)
        os.sched_setaffinity(0, {only})
        with Processors().on(max(ALL)):
            assert os.sched_getaffinity(0) == {only}
        assert os.sched_getaffinity(0) == {only}

    in_thread(work)
