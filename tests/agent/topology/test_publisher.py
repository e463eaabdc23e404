from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from agent.clients.apiserver import NODE, TOPOLOGY, ApiServer, ObjectKind
from agent.errors import Conflicted, LedgerError, Refused, Unavailable
from agent.metrics import Metrics
from agent.sim.apiserver import ApiServerStandIn, Counts, Fault
from agent.topology.publisher import ObjectApi, Pace, Publication, Publisher

QUICK = Pace(coalesce=0.02, heartbeat=60, refresh=60, start_spread=0, retry_first=0.01, retry_cap=0.05)
SLOW = Pace(coalesce=2, heartbeat=600, refresh=10, start_spread=30, retry_first=1, retry_cap=300, jitter=0)
DOCUMENT = {
    "apiVersion": "topology.node.k8s.io/v1alpha2",
    "kind": "NodeResourceTopology",
    "metadata": {"name": "worker-1"},
    "zones": [],
}
CHANGED = {**DOCUMENT, "zones": [{"name": "node-0", "type": "Node"}]}


class FakeApi:
    """Keeps what was applied; raises what it is told to."""

    def __init__(self) -> None:
        self.applied: list[Mapping[str, Any]] = []
        self.forced: list[bool] = []
        self.gets = 0
        self.calls = 0
        self.failing: Exception | None = None
        self.unreadable: Exception | None = None
        self.stored: dict[str, Any] | None = None
        self.owner: tuple[str, str] | None = None
        """(field, manager) of another writer, met unless forced or left out."""

    def get(self, kind: ObjectKind, name: str) -> dict[str, Any] | None:
        self.gets += 1
        if self.unreadable is not None:
            raise self.unreadable
        return self.stored

    def apply(self, kind: ObjectKind, document: Mapping[str, Any], *, force: bool) -> dict[str, Any]:
        self.calls += 1
        if self.failing is not None:
            raise self.failing
        if self.owner is not None and not force and self._touches(document, self.owner[0]):
            raise Conflicted("PATCH: 409", [self.owner])
        self.applied.append(document)
        self.forced.append(force)
        self.stored = dict(document)
        return self.stored

    @staticmethod
    def _touches(document: Mapping[str, Any], field: str) -> bool:
        found: Any = document
        for key in field.split(".", 3)[1:]:
            if key not in found:
                return False
            found = found[key]
        return True


class Node:
    """A builder whose content the test changes."""

    def __init__(self, content: Mapping[str, Any] = DOCUMENT) -> None:
        self.content: Mapping[str, Any] | None = content
        self.built = 0
        self.failing: Exception | None = None

    async def build(self) -> Mapping[str, Any] | None:
        self.built += 1
        if self.failing is not None:
            raise self.failing
        return self.content


class Rig:
    """A publisher with all around it."""

    def __init__(
        self, api: ObjectApi, node: Node, pace: Pace = QUICK, *, kind: ObjectKind = TOPOLOGY, takes_over: bool = True
    ) -> None:
        self.registry = CollectorRegistry()
        self.complaints: list[str | None] = []
        self.publisher = Publisher(
            Publication(kind, node.build, takes_over),
            api,
            Metrics(self.registry),
            pace,
            complain=self.complaints.append,
            chance=lambda: 0.5,
        )

    async def __aenter__(self) -> Rig:
        self.task = asyncio.create_task(self.publisher.run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])

    def writes(self, outcome: str) -> float:
        labels = {"object": "NodeResourceTopology", "outcome": outcome}
        return self.registry.get_sample_value("nodefabric_api_writes_total", labels) or 0

    def pass_time(self, start: float, end: float) -> list[float]:
        """Let the time pass, and return the moments at which the publisher did something."""

        async def scenario() -> list[float]:
            now, moments = start, []
            while now <= end:
                moments.append(now)
                now = await self.publisher.step(now)
            return moments

        return asyncio.run(scenario())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 -- conditions are about other threads and processes
            await asyncio.sleep(0.005)


def test_the_object_is_written_at_start_and_equal_content_never_again() -> None:
    async def scenario() -> None:
        api, node = FakeApi(), Node()
        async with Rig(api, node) as rig:
            await until(lambda: len(api.applied) == 1)
            for n in range(2, 5):
                rig.publisher.changed()
                await until(lambda n=n: node.built == n)  # type: ignore[misc]
            assert len(api.applied) == 1
            assert rig.writes("accepted") == 1

    asyncio.run(scenario())


def test_new_content_is_written_and_many_changes_become_one_write() -> None:
    async def scenario() -> None:
        api, node = FakeApi(), Node()
        async with Rig(api, node) as rig:
            await until(lambda: len(api.applied) == 1)
            node.content = CHANGED
            for _ in range(100):
                rig.publisher.changed()
            await until(lambda: len(api.applied) == 2)
            await asyncio.sleep(0.1)
            assert len(api.applied) == 2
            assert node.built <= 3

    asyncio.run(scenario())


def test_changed_may_be_called_from_any_thread_and_before_the_start() -> None:
    async def scenario() -> None:
        api, node = FakeApi(), Node()
        rig = Rig(api, node)
        rig.publisher.changed()
        async with rig:
            await until(lambda: node.built == 1)
            await asyncio.to_thread(rig.publisher.changed)
            await until(lambda: node.built == 2)
        rig.publisher.changed()

    asyncio.run(scenario())


def test_the_first_write_waits_for_its_moment_though_something_changes_before() -> None:
    api, node = FakeApi(), Node()
    rig = Rig(api, node, SLOW)
    rig.publisher.changed()
    assert rig.pass_time(0, 14) == [0]
    rig.publisher.changed()
    assert rig.pass_time(14, 15) == [14, 15]
    assert len(api.applied) == 1


def test_a_change_is_waited_out_and_a_later_one_does_not_put_the_write_off() -> None:
    api, node = FakeApi(), Node()
    rig = Rig(api, node, SLOW)
    rig.pass_time(0, 16)
    node.content = CHANGED
    rig.publisher.changed()
    assert rig.pass_time(16, 16) == [16]
    rig.publisher.changed()
    assert rig.pass_time(17.5, 18) == [17.5, 18]
    assert api.applied == [DOCUMENT, CHANGED]


def test_in_an_idle_day_nothing_is_written_and_the_object_is_read_once_per_heartbeat() -> None:
    api, node = FakeApi(), Node()
    rig = Rig(api, node, SLOW)
    rig.pass_time(0, 86400)
    assert len(api.applied) == 1
    assert api.gets == 86400 // 600
    assert rig.complaints == []


def test_what_an_earlier_run_left_is_not_written_again() -> None:
    api, node = FakeApi(), Node(CHANGED)
    api.stored = {**CHANGED, "metadata": {"name": "worker-1", "uid": "u"}}
    rig = Rig(api, node, SLOW)
    rig.pass_time(0, 700)
    assert api.applied == []
    node.content = DOCUMENT
    rig.pass_time(700, 720)
    assert api.applied == [DOCUMENT]


@pytest.mark.parametrize(
    "stored",
    [
        {**CHANGED, "zones": []},
        {**CHANGED, "attributes": []},
        {**CHANGED, "metadata": {"name": "worker-2"}},
        {
            **CHANGED,
            "metadata": {
                "name": "worker-1",
                "managedFields": [{"manager": "nfd", "operation": "Update", "fieldsV1": {"f:zones": {}}}],
            },
        },
    ],
)
def test_what_is_not_quite_that_or_not_ours_is_written(stored: dict[str, Any]) -> None:
    api = FakeApi()
    api.stored = stored
    rig = Rig(api, Node(CHANGED), SLOW)
    rig.pass_time(0, 16)
    assert api.applied == [CHANGED]


def test_the_refresh_finds_changes_that_nobody_told() -> None:
    api, node = FakeApi(), Node()
    rig = Rig(api, node, SLOW)
    rig.pass_time(0, 16)
    node.content = CHANGED
    rig.pass_time(16, 26)
    assert api.applied == [DOCUMENT, CHANGED]


@pytest.mark.parametrize("stored", [None, {**DOCUMENT, "zones": [{"name": "node-7", "type": "Node"}]}])
def test_the_heartbeat_writes_anew_what_somebody_removed_or_changed(stored: dict[str, Any] | None) -> None:
    api, node = FakeApi(), Node()
    rig = Rig(api, node, SLOW)
    rig.pass_time(0, 16)
    api.stored = stored
    rig.pass_time(16, 620)
    assert api.applied == [DOCUMENT, DOCUMENT]


def test_what_the_server_and_others_add_to_an_object_is_no_change() -> None:
    api, node = FakeApi(), Node()
    rig = Rig(api, node, SLOW)
    rig.pass_time(0, 16)
    api.stored = {**DOCUMENT, "metadata": {"name": "worker-1", "uid": "u", "labels": {"a": "b"}}, "attributes": []}
    rig.pass_time(16, 620)
    assert len(api.applied) == 1


def test_without_the_right_to_read_the_heartbeat_writes() -> None:
    api, node = FakeApi(), Node()
    api.unreadable = Refused(403, "forbidden")
    rig = Rig(api, node, SLOW)
    rig.pass_time(0, 700)
    assert len(api.applied) == 2


def test_a_failing_server_is_asked_again_with_growing_pauses_and_the_newest_content_wins() -> None:
    api, node = FakeApi(), Node()
    api.failing = Unavailable("PATCH: 500")
    rig = Rig(api, node, SLOW)
    assert rig.pass_time(0, 1000)[1:] == [15, 16, 18, 22, 30, 46, 78, 142, 270, 526, 826]
    assert rig.publisher.problem == "NodeResourceTopology cannot be published: PATCH: 500"
    api.failing = None
    node.content = CHANGED
    rig.pass_time(1126, 1126)
    assert api.applied == [CHANGED]
    assert rig.complaints == ["NodeResourceTopology cannot be published: PATCH: 500", None]
    assert rig.writes("Unavailable") == 11


def test_ten_hours_without_a_server_cost_a_hundred_and_some_attempts_however_much_changes() -> None:
    api, node = FakeApi(), Node()
    api.failing = Unavailable("no route to host")
    rig = Rig(api, node, SLOW)

    async def scenario() -> None:
        now = 0.0
        while now < 36000:
            rig.publisher.changed()
            due = await rig.publisher.step(now)
            now = min(due, now + 7)

    asyncio.run(scenario())
    assert 100 < api.calls < 140


def test_a_refusal_is_counted_by_its_reason() -> None:
    api, node = FakeApi(), Node()
    api.failing = Refused(403, "forbidden")
    rig = Rig(api, node, SLOW)
    rig.pass_time(0, 15)
    assert rig.writes("Refused") == 1


def test_another_writer_is_named_and_the_object_taken_over() -> None:
    api, node = FakeApi(), Node()
    api.owner = (".zones", "nfd-topology-updater")
    rig = Rig(api, node, SLOW)
    rig.pass_time(0, 16)
    assert api.forced == [True]
    assert rig.publisher.problem == (
        "nfd-topology-updater writes .zones of this node's NodeResourceTopology too: let only one of them publish it"
    )
    assert rig.writes("Conflicted") == 1
    api.owner = None
    rig.pass_time(16, 620)
    assert rig.publisher.problem is None


def test_labels_of_another_writer_are_left_out_and_tried_again_later() -> None:
    labels = {"example.com/rack": "r1", "example.com/rails": "8"}
    document = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "worker-1", "labels": labels}}
    api, node = FakeApi(), Node(document)
    api.owner = (".metadata.labels.example.com/rack", "kubectl-label")
    rig = Rig(api, node, SLOW, kind=NODE, takes_over=False)
    rig.pass_time(0, 16)
    assert api.applied[0]["metadata"]["labels"] == {"example.com/rails": "8"}
    assert "kubectl-label writes .metadata.labels.example.com/rack of this node's Node too" in str(rig.complaints)
    api.owner = None
    rig.pass_time(16, 620)
    assert api.applied[-1] == document
    assert rig.publisher.problem is None


def test_a_publication_that_yields_to_an_error_is_built_anew_at_once() -> None:
    api, node = FakeApi(), Node()
    api.failing = Unavailable(".spec.podAllocations: field not declared in schema")

    def yields(error: Exception) -> bool:
        api.failing = None
        node.content = CHANGED
        return "podAllocations" in str(error)

    publisher = Publisher(
        Publication(TOPOLOGY, node.build, yields=yields), api, Metrics(CollectorRegistry()), SLOW, chance=lambda: 0.5
    )

    async def scenario() -> None:
        await publisher.step(0)
        assert await publisher.step(15) == 16
        await publisher.step(16)

    asyncio.run(scenario())
    assert api.applied == [CHANGED]


def test_a_build_that_fails_with_an_error_of_ours_is_waited_out_and_others_end_the_task() -> None:
    async def scenario() -> None:
        api, node = FakeApi(), Node()
        node.failing = LedgerError("disk full")
        async with Rig(api, node) as rig:
            await until(lambda: node.built >= 3)
            assert rig.publisher.problem == "NodeResourceTopology cannot be published: disk full"
            node.failing = KeyError("bug")
            with pytest.raises(KeyError):
                await rig.task

    asyncio.run(scenario())


def test_nothing_to_say_writes_nothing() -> None:
    async def scenario() -> None:
        api, node = FakeApi(), Node()
        node.content = None
        async with Rig(api, node) as rig:
            await until(lambda: node.built == 1)
            node.content = DOCUMENT
            rig.publisher.changed()
            await until(lambda: len(api.applied) == 1)

    asyncio.run(scenario())


def test_pauses_grow_to_the_cap_and_a_server_may_ask_for_more() -> None:
    pace = Pace(retry_first=1, retry_cap=300)
    assert [pace.retry(n, None) for n in (1, 2, 3, 9, 10, 1000)] == [1, 2, 4, 256, 300, 300]
    assert pace.retry(1, 30) == 30
    assert pace.retry(1, 1e9) == 300
    assert [pace.varied(100, chance) for chance in (0, 0.5, 1)] == pytest.approx([90, 100, 110])


class Timed(FakeApi):
    """Notes when something was accepted."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.moments: list[float] = []

    def apply(self, kind: ObjectKind, document: Mapping[str, Any], *, force: bool) -> dict[str, Any]:
        answer = super().apply(kind, document, force=force)
        self.moments.append(self.now)
        return answer


STEPS = st.lists(
    st.tuples(st.floats(0, 900), st.sampled_from(["change", "nudge", "fail", "heal", "tamper", "wait"])), max_size=25
)


@settings(max_examples=50, deadline=None)
@given(STEPS)
def test_whatever_happens_the_server_ends_up_with_what_the_node_says(steps: list[tuple[float, str]]) -> None:
    api, node = Timed(), Node()
    rig = Rig(api, node, SLOW)
    version = 0

    async def pass_on(until: float) -> None:
        while (due := await rig.publisher.step(api.now)) <= until:
            api.now = due
        api.now = until

    async def scenario() -> None:
        nonlocal version
        for pause, what in [*steps, (0.0, "heal")]:
            await pass_on(api.now + pause)
            if what == "change":
                version += 1
                node.content = {**DOCUMENT, "zones": [{"name": f"node-{version}", "type": "Node"}]}
                rig.publisher.changed()
            elif what == "nudge":
                rig.publisher.changed()
            elif what == "tamper":
                api.stored = None
            else:
                api.failing = Unavailable("500") if what == "fail" else None if what == "heal" else api.failing
        await pass_on(api.now + SLOW.retry_cap + SLOW.heartbeat + SLOW.refresh)

    asyncio.run(scenario())
    assert api.stored == node.content
    assert rig.publisher.problem is None
    changes, tampered = version, sum(what == "tamper" for _, what in steps)
    assert len(api.applied) <= 1 + changes + tampered
    assert all(later - earlier >= SLOW.coalesce for earlier, later in pairwise(api.moments))


def opened(server: ApiServerStandIn, folder: Path) -> ApiServer:
    path = folder / "kubeconfig"
    path.write_text(server.kubeconfig())
    return ApiServer.from_kubeconfig(path)


def test_a_silent_server_delays_neither_the_loop_nor_the_end(tmp_path: Path) -> None:
    async def scenario(client: ApiServer) -> None:
        async with Rig(client, Node()):
            for _ in range(50):
                await asyncio.sleep(0.005)

    with ApiServerStandIn() as server:
        server.state.set_fault(Fault(delay_seconds=10))
        client = opened(server, tmp_path)
        asyncio.run(scenario(client))
        assert server.state.counts == Counts()  # all this while nothing was answered
        client.close()


def test_over_real_http_the_object_arrives_and_heals_after_faults(tmp_path: Path) -> None:
    async def scenario(client: ApiServer, server: ApiServerStandIn) -> None:
        node = Node()
        async with Rig(client, node) as rig:
            await until(lambda: server.state.counts.applies == 1)
            server.state.set_fault(Fault(status=429, retry_after=0))
            node.content = CHANGED
            rig.publisher.changed()
            await until(lambda: rig.writes("Unavailable") >= 2)
            server.state.set_fault(Fault(drop=True))
            await until(lambda: rig.writes("Unavailable") >= 4)
            server.state.set_fault(None)
            await until(lambda: server.state.counts.changes == 2)

    with ApiServerStandIn() as server:
        client = opened(server, tmp_path)
        asyncio.run(scenario(client, server))
        client.close()


def test_over_real_http_a_fight_with_another_writer_is_seen_and_said(tmp_path: Path) -> None:
    with ApiServerStandIn() as server:
        client = opened(server, tmp_path)
        rig = Rig(client, Node(CHANGED), SLOW)
        rig.pass_time(0, 16)
        theirs = {"metadata": {}, "zones": [{"name": "node-1", "type": "Node"}]}
        server.state.apply("NodeResourceTopology", "worker-1", theirs, "nfd-topology-updater", force=True)
        rig.pass_time(16, 620)
        stored = server.state.get("NodeResourceTopology", "worker-1")
        assert stored is not None
        assert stored["zones"] == CHANGED["zones"]
        assert "nfd-topology-updater writes .zones" in str(rig.publisher.problem)
        assert server.state.counts.conflicts == 1
        client.close()
