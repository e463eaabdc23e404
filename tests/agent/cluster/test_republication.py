"""Publications begin and end with the configuration that asks for them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from agent.cluster.publications import Publications, Republication
from agent.config import Config, Topology
from agent.model.device import Snapshot
from agent.process.conditions import Conditions
from agent.report.metrics import Metrics
from agent.state import Latest
from tests.agent.cluster.publications import node_of
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


class Shop(Republication):
    """Makes no publications, but what stands for them."""

    def __init__(self, topology: Topology, failure: Exception | None = None) -> None:
        self.notes: list[str] = []
        self.failure = failure
        self.config = Latest(Config(topology=topology))
        self.conditions = Conditions()
        super().__init__(self.config, node_of(Latest(Snapshot())), None, Metrics(CollectorRegistry()), self.conditions)

    def make(self, topology: Topology) -> Publications:
        return cast(Publications, Press(topology, self.notes, self.failure))

    def reconfigure(self, topology: Topology) -> None:
        self.config.set(Config(topology=topology))


async def test_another_configuration_ends_one_and_begins_the_next() -> None:
    shop = Shop(ON)
    shop.changed()
    shop.reconfigure(OFF)
    running = asyncio.create_task(shop.run())
    await until(lambda: shop.notes == ["begun False"])
    shop.reconfigure(Topology())
    shop.reconfigure(ON)
    await until(lambda: shop.notes[1:] == ["ended False", "begun True"])
    shop.changed()
    assert shop.notes.pop() == "told True"
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert shop.notes == ["begun False", "ended False", "begun True", "ended True"]


async def test_an_error_that_nobody_expected_ends_them_and_they_may_be_run_again() -> None:
    shop = Shop(ON, ZeroDivisionError("a bug"))
    with pytest.raises(ExceptionGroup):
        await shop.run()
    shop.failure = None
    running = asyncio.create_task(shop.run())
    await until(lambda: shop.notes == ["begun True", "ended True", "begun True"])
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
