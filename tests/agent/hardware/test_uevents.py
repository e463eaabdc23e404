"""Real kernel events about real links, in a network namespace of the test's own."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable

import pytest

from agent.hardware.uevents import Uevents

DEADLINE = 20.0


class Notes:
    """What a watch has said so far."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def until(self, condition: Callable[[set[str]], bool]) -> None:
        end = time.monotonic() + DEADLINE
        while not condition(set(self.seen)):
            assert time.monotonic() < end, self.seen
            time.sleep(0.01)


def ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True)


@pytest.mark.usefixtures("own_network")
def test_links_that_come_change_and_go_are_seen() -> None:
    notes = Notes()
    watch = Uevents(notes.seen.add, virtual_links=True)
    try:
        ip("link add nf0 type veth peer name nf1")
        ip("link set nf0 up")
        notes.until({"net add nf0", "link nf0 changed"}.issubset)
        ip("link del nf0")
        notes.until({"net remove nf0", "link nf0 gone"}.issubset)
    finally:
        watch.close()


@pytest.mark.usefixtures("own_network")
def test_links_without_hardware_are_passed_over() -> None:
    everything, notes = Notes(), Notes()
    all_links = Uevents(everything.seen.add, virtual_links=True)
    watch = Uevents(notes.seen.add)
    try:
        ip("link add nf0 type veth peer name nf1")
        ip("link del nf0")
        everything.until({"net remove nf0", "link nf0 gone"}.issubset)
    finally:
        watch.close()
        all_links.close()
    assert {what for what in notes.seen if "nf0" in what or "nf1" in what} == set()


def test_closing_ends_the_thread_at_once_and_may_be_repeated() -> None:
    before = threading.active_count()
    watch = Uevents(lambda what: None)
    assert threading.active_count() == before + 1
    watch.close()
    watch.close()
    assert threading.active_count() == before
