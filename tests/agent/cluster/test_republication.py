"""Publications begin and end with the configuration that asks for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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

    def __init__(self, topology: Topology, failure: Exception | None = None, again_seconds: float = 3600) -> None:
        self.notes: list[str] = []
        self.failure = failure
        self.complaints: list[str | None] = []
        self.config = Latest(Config(topology=topology))
        conditions = Conditions(lambda _, what: self.complaints.append(what))
        super().__init__(
            self.config, node_of(Latest(Snapshot())), None, Metrics(CollectorRegistry()), conditions, again_seconds
        )

    def make(self, topology: Topology) -> Publications:
        return cast(Publications, Press(topology, self.notes, self.failure))

    def reconfigure(self, topology: Topology) -> None:
        self.config.set(Config(topology=topology))


@asynccontextmanager
async def open_shop(shop: Shop) -> AsyncIterator[Shop]:
    running = asyncio.create_task(shop.run())
    yield shop
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_another_configuration_ends_one_and_begins_the_next() -> None:
    async with open_shop(Shop(OFF)) as shop:
        await until(lambda: shop.notes == ["begun False"])
        shop.reconfigure(OFF)
        shop.reconfigure(ON)
        await until(lambda: shop.notes[1:] == ["ended False", "begun True"])
        shop.changed()
        assert shop.notes.pop() == "told True"
    assert shop.notes == ["begun False", "ended False", "begun True", "ended True"]


async def test_publications_that_fail_are_told_of_and_begin_again(caplog: pytest.LogCaptureFixture) -> None:
    async with open_shop(Shop(ON, ZeroDivisionError("a bug"), again_seconds=0.01)) as shop:
        await until(lambda: shop.notes.count("begun True") > 1)
        shop.failure = None
        await until(lambda: shop.notes[-1] == "begun True")
    assert shop.complaints[:2] == ["failed unexpectedly, which the log tells more of: ZeroDivisionError", None]
    assert shop.complaints[-1] is None
    assert "ZeroDivisionError: a bug" in caplog.text


async def test_another_configuration_does_not_wait_for_those_that_failed() -> None:
    shop = Shop(OFF, ZeroDivisionError("a bug"))
    shop.reconfigure(ON)  # before they ran, which counts too
    async with open_shop(shop):
        await until(lambda: shop.notes[-2:] == ["begun True", "ended True"])
        shop.failure = None
        shop.reconfigure(OFF)
        await until(lambda: shop.notes[-1] == "begun False")
