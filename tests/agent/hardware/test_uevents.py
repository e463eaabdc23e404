"""Real kernel events about real links, in a network namespace of the test's own."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.errors import DriverUnavailable
from agent.hardware.netlink.rtnetlink import IFLA_IFALIAS
from agent.hardware.uevents import Uevent, Uevents, change_of
from agent.model.change import EVERYTHING, Change, of_function, of_netdev
from hack.sim import uevents
from tests import descriptors

DEADLINE = 20.0


class Notes:
    """What a watch has said so far."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.changes: dict[str, Change] = {}

    def note(self, what: str, change: Change) -> None:
        self.changes[what] = change
        self.seen.add(what)

    def until(self, condition: Callable[[set[str]], bool]) -> None:
        end = time.monotonic() + DEADLINE
        while not condition(set(self.seen)):
            assert time.monotonic() < end, self.seen
            time.sleep(0.01)


def ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True)


def watching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "uevents"]


@pytest.mark.usefixtures("own_network")
def test_links_that_come_change_and_go_are_seen() -> None:
    notes = Notes()
    with closing(Uevents(notes.note, virtual_links=True)):
        ip("link add nf0 type veth peer name nf1")
        ip("link set nf0 up")
        notes.until({"net add nf0", "link nf0 changed"}.issubset)
        ip("link del nf0")
        notes.until({"net remove nf0", "link nf0 gone"}.issubset)


def test_closing_ends_the_thread_at_once_and_may_be_repeated() -> None:
    watch = Uevents(lambda what, change: None)
    assert len(watching()) == 1
    watch.close()
    watch.close()
    assert watching() == []


@pytest.mark.usefixtures("own_network")
def test_the_end_of_a_watch_does_not_wait_for_a_burst_to_end() -> None:
    witness, notes = Notes(), Notes()
    quick = Uevents(witness.note, virtual_links=True)
    watch = Uevents(notes.note, virtual_links=True, gather_seconds=2 * DEADLINE)
    ip("link add nf0 type veth peer name nf1")
    witness.until({"net add nf0"}.issubset)
    quick.close()
    assert len(watching()) == 1
    watch.close()
    assert watching() == []
    assert notes.seen == set()


@pytest.mark.usefixtures("own_network")
def test_a_link_message_names_the_function_below_it() -> None:
    notes = Notes()
    with closing(Uevents(notes.note, virtual_links=True, device_attribute=IFLA_IFALIAS)):
        ip("link add nf0 type veth peer name nf1")
        ip("link set nf0 alias 0000:3b:00.1")
        ip("link set nf0 up")
        ip("link set nf0 down")
        notes.until({"link nf0 changed"}.issubset)
        ip("link del nf0")
        notes.until({"link nf0 gone"}.issubset)
    assert notes.changes["link nf0 gone"] == of_function("0000:3b:00.1") | of_netdev("nf0")
    assert notes.changes["link nf1 gone"] == of_netdev("nf1")


@pytest.mark.usefixtures("own_network")
@pytest.mark.parametrize("shortage", [nullcontext, descriptors.none_left])
def test_events_that_were_lost_are_told_and_the_next_ones_are_seen(
    shortage: Callable[[], AbstractContextManager[None]],
) -> None:
    notes, reached, goes_on = Notes(), threading.Event(), threading.Event()

    def note(what: str, change: Change) -> None:
        notes.note(what, change)
        if what == "pci add 0000:3b:00.0":
            reached.set()
            goes_on.wait(DEADLINE)  # meanwhile more comes than the socket can hold

    bridge = "/devices/pci0000:3a/0000:3a:00.0"
    watch = Uevents(note)
    try:
        uevents.emit("add", f"{bridge}/0000:3b:00.0", "pci")
        assert reached.wait(DEADLINE)
        for _ in range(10_000):
            uevents.emit("bind", f"{bridge}/0000:3b:00.1", "pci")
        with shortage():
            goes_on.set()
            notes.until({"kernel events were lost"}.issubset)
        uevents.emit("add", f"{bridge}/0000:3b:00.2", "pci")
        notes.until({"pci add 0000:3b:00.2"}.issubset)
    finally:
        goes_on.set()
        watch.close()
    assert notes.changes["kernel events were lost"] == EVERYTHING


@pytest.mark.usefixtures("own_network")
def test_link_messages_are_heard_where_uevents_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.hardware.uevents.LIBUDEV", "libudev.so.none")
    notes = Notes()
    with closing(Uevents(notes.note, virtual_links=True)) as watch:
        (told,) = watch.unheard
        assert told.startswith("uevents cannot be heard: libudev.so.none")
        ip("link add nf0 type veth peer name nf1")
        notes.until({"link nf0 changed"}.issubset)


@pytest.mark.usefixtures("own_network")
def test_uevents_are_heard_where_link_messages_are_not() -> None:
    notes = Notes()
    Uevents(notes.note).close()  # so that libudev is loaded
    with descriptors.left(2):  # to end the watch, and for uevents
        watch = Uevents(notes.note, virtual_links=True)
    with closing(watch):
        assert [text.partition(":")[0] for text in watch.unheard] == ["link messages cannot be heard"]
        ip("link add nf0 type veth peer name nf1")
        notes.until({"net add nf0"}.issubset)


def test_a_process_that_can_open_nothing_has_no_watch() -> None:
    with descriptors.none_left(), pytest.raises(DriverUnavailable, match="Too many open files"):
        Uevents(Notes().note)


@pytest.mark.usefixtures("own_network")
def test_a_name_that_is_no_text_does_not_end_the_watch() -> None:
    notes = Notes()
    with closing(Uevents(notes.note, virtual_links=True)):
        subprocess.run([b"ip", b"link", b"add", b"nf\xff0", b"type", b"veth", b"peer", b"name", b"nf1"], check=True)
        notes.until({"something whose name is no text", "net add nf1"}.issubset)
        ip("link del nf1")
        notes.until({"net remove nf1"}.issubset)
    assert notes.changes["something whose name is no text"] == EVERYTHING


EVENTS = yaml.safe_load(Path(__file__).with_name("events.yaml").read_text())


@pytest.mark.parametrize(("action", "path", "subsystem", "said"), EVENTS)
def test_an_event_says_what_is_to_be_looked_at(action: str, path: str, subsystem: str, said: Any) -> None:
    expected = EVERYTHING if said else None
    if isinstance(said, dict):
        functions, netdevs = (frozenset(said.get(key, ())) for key in ("functions", "netdevs"))
        expected = Change(functions, netdevs, said.get("bus", False))
    assert change_of(Uevent(action, path, subsystem)) == expected


def test_a_pods_veth_counts_on_a_simulated_node() -> None:
    assert change_of(Uevent("add", "/devices/virtual/net/veth0", "net"), virtual_links=True) == of_netdev("veth0")
