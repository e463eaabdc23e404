"""Threads that are there before they are needed."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial

import pytest

from agent.model.allocation import Hold
from agent.offer.offer import Offer
from agent.process import interpreter
from agent.process.interpreter import collect_seldom, set_aside, set_aside_later
from agent.state import Latest
from deviceplugin.allocation import Allocator
from tests.waiting import until


@contextmanager
def no_thread_to_be_had() -> Iterator[None]:
    former = threading.stack_size(1 << 46)  # more than there is
    try:
        yield
    finally:
        threading.stack_size(former)


class Book:
    def __init__(self) -> None:
        self.granted: list[Hold] = []

    def grant(self, holds: Sequence[Hold]) -> None:
        self.granted += holds


async def test_work_that_blocks_goes_on_where_no_thread_can_be_started() -> None:
    asyncio.get_running_loop().set_default_executor(interpreter.workers_of_loop())
    with no_thread_to_be_had():
        assert await asyncio.gather(*(asyncio.to_thread(abs, -i) for i in range(50))) == list(range(50))


async def test_grants_are_written_where_no_thread_can_be_started() -> None:
    book, hold = Book(), Hold("u", "rdma/vf", ("d",))
    with closing(Allocator(Latest(Offer()), book.grant, lambda unit: None)) as allocator, no_thread_to_be_had():
        await allocator._record([hold])
    assert book.granted == [hold]


def test_who_gets_too_few_threads_leaves_none_behind() -> None:
    before = threading.active_count()
    with no_thread_to_be_had(), pytest.raises(RuntimeError, match="can't start new thread"):
        interpreter.started_workers(3, "test")
    until(lambda: threading.active_count() == before)


def test_all_work_in_the_background_goes_on_at_once_and_a_few_threads_stay_for_more() -> None:
    background, go = interpreter.Background("a few threads stay"), threading.Event()
    here = threading.Barrier(2 * interpreter.SPARE_THREADS + 1)

    def work() -> None:
        here.wait(60)
        go.wait(60)

    for _ in range(2 * interpreter.SPARE_THREADS):
        background.start(work)
    here.wait(60)
    go.set()
    until(lambda: [t.name for t in threading.enumerate()].count("a few threads stay") == interpreter.SPARE_THREADS)
    with no_thread_to_be_had():
        done = [threading.Event() for _ in range(interpreter.SPARE_THREADS)]
        go.clear()
        for each in done:
            background.start(partial(_told, each, go))
        assert all(each.wait(60) for each in done)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            background.start(here.wait)
        go.set()


def _told(done: threading.Event, go: threading.Event) -> None:
    done.set()
    go.wait(60)


def test_the_collector_waits_during_the_start_and_does_not_see_what_is_there_afterwards() -> None:
    def is_seen(kept: object) -> bool:
        return any(each is kept for each in gc.get_objects())

    usual, early = gc.get_threshold(), list[object]()
    collect_seldom()
    assert gc.isenabled()
    assert gc.get_threshold()[0] > 100 * usual[0]
    assert is_seen(early)
    with set_aside():
        assert gc.get_threshold() == usual
        late: list[object] = []
        assert (is_seen(early), is_seen(late)) == (False, True)
        asyncio.run(set_aside_later(0))
        assert not is_seen(late)
    assert is_seen(early)
