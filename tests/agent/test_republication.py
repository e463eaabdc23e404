"""Publications begin and end with the configuration that asks for them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from agent.config import Topology
from agent.republication import Republication
from tests.awaiting import until

ON, OFF = Topology(publish=True), Topology()


@dataclass
class Press:
    """Stands for `Publications`: notes what becomes of it."""

    topology: Topology
    notes: list[str]
    failure: Exception | None = None

    def changed(self) -> None:
        self.notes.append(f"told {self.topology.publish}")

    async def run(self) -> None:
        self.notes.append(f"begun {self.topology.publish}")
        try:
            if self.failure is not None:
                raise self.failure
            await asyncio.Event().wait()
        finally:
            self.notes.append(f"ended {self.topology.publish}")


@dataclass
class Shop:
    notes: list[str] = field(default_factory=list)
    failure: Exception | None = None

    def make(self, topology: Topology) -> Press:
        return Press(topology, self.notes, self.failure)


def test_another_configuration_ends_one_and_begins_the_next() -> None:
    shop = Shop()

    async def work() -> None:
        publishing = Republication(shop.make, OFF)
        running = asyncio.create_task(publishing.run())
        await until(lambda: shop.notes == ["begun False"])
        publishing.reconfigure(OFF)
        publishing.reconfigure(ON)
        await until(lambda: shop.notes[1:] == ["ended False", "begun True"])
        publishing.changed()
        assert shop.notes.pop() == "told True"
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(work())
    assert shop.notes == ["begun False", "ended False", "begun True", "ended True"]


def test_publications_that_fail_are_told_of_and_begin_anew(caplog: pytest.LogCaptureFixture) -> None:
    shop, complaints = Shop(failure=ZeroDivisionError("a bug")), list[str | None]()

    async def work() -> None:
        publishing = Republication(shop.make, ON, complain=complaints.append, again_seconds=0.01)
        running = asyncio.create_task(publishing.run())
        await until(lambda: shop.notes.count("begun True") > 1)
        shop.failure = None
        await until(lambda: shop.notes[-1] == "begun True")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(work())
    assert complaints[:2] == ["failed unexpectedly, which the log tells more of: ZeroDivisionError", None]
    assert complaints[-1] is None
    assert "ZeroDivisionError: a bug" in caplog.text


def test_another_configuration_does_not_wait_for_those_that_failed() -> None:
    shop = Shop(failure=ZeroDivisionError("a bug"))

    async def work() -> None:
        publishing = Republication(shop.make, ON, again_seconds=3600)
        running = asyncio.create_task(publishing.run())
        await until(lambda: shop.notes == ["begun True", "ended True"])
        shop.failure = None
        publishing.reconfigure(OFF)
        await until(lambda: shop.notes[-1] == "begun False")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(work())
