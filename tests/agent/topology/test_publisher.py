from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from agent.clients.apiserver import ApiServer
from agent.errors import LedgerError, Refused, Unavailable
from agent.metrics import Metrics
from agent.sim.apiserver import ApiServerStandIn, Counts, Fault
from agent.topology.publisher import Pace, Publisher, TopologyApi

QUICK = Pace(coalesce=0.02, heartbeat=60, refresh=60, start_spread=0, retry_first=0.01, retry_cap=0.05)
DOCUMENT = {
    "apiVersion": "topology.node.k8s.io/v1alpha2",
    "kind": "NodeResourceTopology",
    "metadata": {"name": "worker-1"},
    "zones": [],
}


class FakeApi:
    """Keeps what was applied; raises what it is told to."""

    def __init__(self) -> None:
        self.applied: list[Mapping[str, Any]] = []
        self.calls = 0
        self.failing: Exception | None = None
        self.node_failing: Exception | None = None

    def node_uid(self, name: str) -> str:
        if self.node_failing is not None:
            raise self.node_failing
        return "uid-1"

    def apply_topology(self, document: Mapping[str, Any]) -> None:
        self.calls += 1
        if self.failing is not None:
            raise self.failing
        self.applied.append(document)


class Node:
    """A builder whose content the test changes."""

    def __init__(self) -> None:
        self.content: dict[str, Any] | None = dict(DOCUMENT)
        self.built = 0
        self.uids: list[str | None] = []
        self.failing: Exception | None = None

    async def build(self, node_uid: str | None) -> Mapping[str, Any] | None:
        self.built += 1
        self.uids.append(node_uid)
        if self.failing is not None:
            raise self.failing
        return self.content


class Running:
    """A publisher at work."""

    def __init__(self, api: TopologyApi, node: Node, pace: Pace = QUICK) -> None:
        self.registry = CollectorRegistry()
        self.publisher = Publisher("worker-1", node.build, api, Metrics(self.registry), pace)

    async def __aenter__(self) -> Running:
        self.task = asyncio.create_task(self.publisher.run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])

    def writes(self, outcome: str) -> float:
        labels = {"object": "NodeResourceTopology", "outcome": outcome}
        return self.registry.get_sample_value("nodefabric_api_writes_total", labels) or 0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 -- conditions are about other threads and processes
            await asyncio.sleep(0.005)


def test_the_object_is_written_at_start_and_equal_content_never_again() -> None:
    async def scenario() -> None:
        api, node = FakeApi(), Node()
        async with Running(api, node) as running:
            await until(lambda: len(api.applied) == 1)
            for n in range(2, 5):
                running.publisher.changed()
                await until(lambda n=n: node.built == n)  # type: ignore[misc]
            assert len(api.applied) == 1
            assert running.writes("accepted") == 1
            assert node.uids[0] == "uid-1"

    asyncio.run(scenario())


def test_new_content_is_written_and_many_changes_become_one_write() -> None:
    async def scenario() -> None:
        api, node = FakeApi(), Node()
        async with Running(api, node) as running:
            await until(lambda: len(api.applied) == 1)
            node.content = {**DOCUMENT, "zones": [{"name": "node-0"}]}
            for _ in range(100):
                running.publisher.changed()
            await until(lambda: len(api.applied) == 2)
            await asyncio.sleep(0.1)
            assert len(api.applied) == 2
            assert node.built <= 3

    asyncio.run(scenario())


def test_changed_may_be_called_from_any_thread_and_before_the_start() -> None:
    async def scenario() -> None:
        api, node = FakeApi(), Node()
        running = Running(api, node)
        running.publisher.changed()
        async with running:
            await until(lambda: node.built == 1)
            await asyncio.to_thread(running.publisher.changed)
            await until(lambda: node.built == 2)
        running.publisher.changed()

    asyncio.run(scenario())


def test_the_heartbeat_writes_equal_content_again() -> None:
    async def scenario() -> None:
        api, node = FakeApi(), Node()
        async with Running(api, node, Pace(heartbeat=0.05, start_spread=0)):
            await until(lambda: len(api.applied) >= 3)

    asyncio.run(scenario())


def test_the_refresh_finds_changes_that_nobody_told() -> None:
    async def scenario() -> None:
        api, node = FakeApi(), Node()
        async with Running(api, node, Pace(refresh=0.02, coalesce=0, start_spread=0)):
            await until(lambda: len(api.applied) == 1)
            node.content = {**DOCUMENT, "zones": [{"name": "node-0"}]}
            await until(lambda: len(api.applied) == 2)

    asyncio.run(scenario())


def test_a_failing_server_is_asked_again_and_the_newest_content_wins(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        api, node = FakeApi(), Node()
        api.failing = Unavailable("PATCH: 500")
        async with Running(api, node) as running:
            await until(lambda: api.calls >= 3)
            assert running.publisher.last_error == "PATCH: 500"
            node.content = {**DOCUMENT, "zones": [{"name": "node-0"}]}
            api.failing = None
            await until(lambda: len(api.applied) == 1)
            assert api.applied[0]["zones"]
            await until(lambda: running.publisher.last_error is None)
            assert running.writes("Unavailable") >= 3

    asyncio.run(scenario())
    assert sum("cannot be published" in record.message for record in caplog.records) == 1


def test_a_refusal_is_counted_by_its_reason() -> None:
    async def scenario() -> None:
        api, node = FakeApi(), Node()
        api.failing = Refused(403, "forbidden")
        async with Running(api, node) as running:
            await until(lambda: running.writes("Refused") >= 1)

    asyncio.run(scenario())


def test_without_the_node_object_it_publishes_without_owner_and_asks_again() -> None:
    async def scenario() -> None:
        api, node = FakeApi(), Node()
        api.node_failing = Refused(404, "no such node")
        async with Running(api, node) as running:
            await until(lambda: len(api.applied) == 1)
            assert node.uids == [None]
            api.node_failing = None
            running.publisher.changed()
            await until(lambda: node.uids[-1] == "uid-1")

    asyncio.run(scenario())


def test_a_build_that_fails_with_an_error_of_ours_is_waited_out_and_others_end_the_task() -> None:
    async def scenario() -> None:
        api, node = FakeApi(), Node()
        node.failing = LedgerError("disk full")
        async with Running(api, node) as running:
            await until(lambda: node.built >= 3)
            assert running.publisher.last_error == "disk full"
            node.failing = KeyError("bug")
            with pytest.raises(KeyError):
                await running.task

    asyncio.run(scenario())


def test_nothing_to_say_writes_nothing() -> None:
    async def scenario() -> None:
        api, node = FakeApi(), Node()
        node.content = None
        async with Running(api, node) as running:
            await until(lambda: node.built == 1)
            node.content = dict(DOCUMENT)
            running.publisher.changed()
            await until(lambda: len(api.applied) == 1)

    asyncio.run(scenario())


def test_pauses_grow_to_the_cap_and_a_server_may_ask_for_more() -> None:
    pace = Pace(retry_first=1, retry_cap=300)
    assert [pace.retry(n, None) for n in (1, 2, 3, 9, 10, 1000)] == [1, 2, 4, 256, 300, 300]
    assert pace.retry(1, 30) == 30
    assert pace.retry(1, 1e9) == 300
    assert [pace.varied(100, chance) for chance in (0, 0.5, 1)] == pytest.approx([90, 100, 110])


def test_a_silent_server_delays_neither_the_loop_nor_the_end(tmp_path: Path) -> None:
    async def scenario(client: ApiServer) -> None:
        async with Running(client, Node()):
            for _ in range(50):
                await asyncio.sleep(0.005)

    with ApiServerStandIn() as server:
        server.state.set_fault(Fault(delay_seconds=10))
        path = tmp_path / "kubeconfig"
        path.write_text(server.kubeconfig())
        client = ApiServer.from_kubeconfig(path)
        asyncio.run(scenario(client))
        assert server.state.counts == Counts()  # all this while nothing was answered
        client.close()


def test_over_real_http_the_object_arrives_and_heals_after_faults(tmp_path: Path) -> None:
    async def scenario(client: ApiServer, server: ApiServerStandIn) -> None:
        node = Node()
        async with Running(client, node) as running:
            await until(lambda: server.state.counts.applies == 1)
            server.state.set_fault(Fault(status=429, retry_after=0))
            node.content = {**DOCUMENT, "zones": [{"name": "node-0"}]}
            running.publisher.changed()
            await until(lambda: running.writes("Unavailable") >= 2)
            server.state.set_fault(Fault(drop=True))
            await until(lambda: running.writes("Unavailable") >= 4)
            server.state.set_fault(None)
            await until(lambda: server.state.counts.changes == 2)

    with ApiServerStandIn() as server:
        server.state.add_node("worker-1")
        path = tmp_path / "kubeconfig"
        path.write_text(server.kubeconfig())
        client = ApiServer.from_kubeconfig(path)
        asyncio.run(scenario(client, server))
        client.close()
