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


def test_publications_that_fail_are_not_hidden() -> None:
    shop = Shop(failure=ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        asyncio.run(Republication(shop.make, ON).run())
