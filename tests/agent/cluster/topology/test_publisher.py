"""When a publisher writes, when it has nothing to write, and what it does where it is refused or not alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from agent.cluster.apiserver import NODE, TOPOLOGY, ApiServer, ObjectKind
from agent.cluster.topology.publisher import (
    UNCHANGED_SINCE,
    Problems,
    Publication,
    Publisher,
    Times,
    holds,
)
from agent.errors import Conflicted, LedgerError, Refused, Unavailable
from agent.process.backoff import Backoff
from agent.process.conditions import Conditions
from agent.report.metrics import Metrics
from tests.awaiting import until

QUICK = Times(coalesce=0.02, heartbeat=60, refresh=60, start_spread=0, retry=Backoff(0.01, 0.05))
SLOW = Times(coalesce=2, heartbeat=600, refresh=10, start_spread=30, retry=Backoff(1, 300))
DOCUMENT = {
    "apiVersion": "topology.node.k8s.io/v1alpha2",
    "kind": "NodeResourceTopology",
    "metadata": {"name": "worker-1"},
    "zones": [],
}
CHANGED = {**DOCUMENT, "zones": [{"name": "node-0", "type": "Node"}]}


class FakeApi(ApiServer):
    """Keeps what was applied; raises what it is told to."""

    def __init__(self) -> None:
        self.applied: list[Mapping[str, Any]] = []
        self.forced: list[bool] = []
        self.gets = 0
        self.calls = 0
        self.failing: Exception | None = None
        self.is_mute = False
        """It does what it is asked, and its answers do not arrive."""
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
        if self.is_mute:
            raise Unavailable("timed out")
        return self.stored

    @staticmethod
    def _touches(document: Mapping[str, Any], field: str) -> bool:
        found: Any = document
        for key in field.split(".", 3)[1:]:
            if key not in found:
                return False
            found = found[key]
        return True


class Node(Publication):
    """A publication whose content the test changes."""

    kind = TOPOLOGY

    def __init__(self, content: Mapping[str, Any] = DOCUMENT) -> None:
        self.document: Mapping[str, Any] | None = content
        self.built = 0
        self.failing: Exception | None = None

    async def content(self) -> Mapping[str, Any] | None:
        self.built += 1
        if self.failing is not None:
            raise self.failing
        return self.document


class Rig:
    """A publisher with all around it."""

    def __init__(self, api: ApiServer, node: Node, times: Times = QUICK) -> None:
        self.registry = CollectorRegistry()
        self.complaints: list[str | None] = []
        self.publisher = Publisher(
            node,
            api,
            Metrics(self.registry),
            times,
            Problems(Conditions(self._note)),
        )
        self.publisher.chance = lambda: 0.5

    def _note(self, _name: str, what: str | None) -> None:
        self.complaints.append(what)

    @property
    def problem(self) -> str | None:
        return self.complaints[-1] if self.complaints else None

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


def test_in_an_idle_day_nothing_is_written_and_the_object_is_read_once_per_heartbeat() -> None:
    api, node = FakeApi(), Node()
    rig = Rig(api, node, SLOW)
    rig.pass_time(0, 86400)
    assert len(api.applied) == 1
    assert api.gets == 86400 // 600
    assert rig.complaints == []


BY_ANOTHER = [{"manager": "nfd", "operation": "Update", "fieldsV1": {"f:zones": {}}}]


@pytest.mark.parametrize(
    ("stored", "is_left"),
    [
        ({**CHANGED, "metadata": {"name": "worker-1", "uid": "u"}}, True),
        ({**CHANGED, "zones": []}, False),
        ({**CHANGED, "attributes": []}, False),
        ({**CHANGED, "metadata": {"name": "worker-2"}}, False),
        ({**CHANGED, "metadata": {"name": "worker-1", "managedFields": BY_ANOTHER}}, False),
    ],
)
def test_what_an_earlier_run_left_is_written_again_only_if_it_is_not_quite_that_or_not_ours(
    stored: dict[str, Any], is_left: bool
) -> None:
    api, node = FakeApi(), Node(CHANGED)
    api.stored = stored
    rig = Rig(api, node, SLOW)
    rig.pass_time(0, 700)
    assert api.applied == ([] if is_left else [CHANGED])
    node.document = DOCUMENT
    rig.pass_time(700, 720)
    assert api.applied[-1] == DOCUMENT


ADDED = {**DOCUMENT, "metadata": {"name": "worker-1", "uid": "u", "labels": {"a": "b"}}, "attributes": []}


TAKEN = {**CHANGED, "metadata": {"name": "worker-1", "managedFields": BY_ANOTHER}}


@pytest.mark.parametrize(
    ("stored", "said"), [(None, "was changed or removed"), (TAKEN, "was changed by nfd"), (ADDED, None)]
)
def test_the_heartbeat_writes_again_what_somebody_removed_or_changed_but_not_what_was_added(
    stored: dict[str, Any] | None, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    api, node = FakeApi(), Node()
    rig = Rig(api, node, SLOW)
    rig.pass_time(0, 16)
    api.stored = stored
    rig.pass_time(16, 620)
    assert api.applied == [DOCUMENT] * (2 if said else 1)
    assert (said or "") in caplog.text


SETTLING = replace(SLOW, settle=10)


def settled(document: Mapping[str, Any]) -> bool:
    return UNCHANGED_SINCE in document["metadata"].get("annotations", {})


@pytest.mark.parametrize("annotations", [{UNCHANGED_SINCE: "2026-01-01T00:00:00Z"}, {}])
def test_an_object_that_an_earlier_run_left_settles_if_it_has_not_yet(annotations: dict[str, str]) -> None:
    api, node = FakeApi(), Node()
    api.stored = {**DOCUMENT, "metadata": {"name": "worker-1", "annotations": annotations}}
    Rig(api, node, SETTLING).pass_time(0, 700)
    assert list(map(settled, api.applied)) == ([] if annotations else [True])


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
@given(STEPS, st.sampled_from([SLOW, SETTLING]))
def test_whatever_happens_the_server_ends_up_with_what_the_node_says(
    steps: list[tuple[float, str]], times: Times
) -> None:
    api, node = Timed(), Node()
    rig = Rig(api, node, times)
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
                node.document = {**DOCUMENT, "zones": [{"name": f"node-{version}", "type": "Node"}]}
                rig.publisher.changed()
            elif what == "nudge":
                rig.publisher.changed()
            elif what == "tamper":
                api.stored = None
            else:
                api.failing = Unavailable("500") if what == "fail" else None if what == "heal" else api.failing
        await pass_on(api.now + SLOW.retry.longest + SLOW.heartbeat + SLOW.refresh)

    asyncio.run(scenario())
    assert api.stored is not None
    assert node.document is not None
    assert settled(api.stored) == bool(times.settle)
    assert {**api.stored, "metadata": node.document["metadata"]} == node.document
    assert rig.problem is None
    changes, tampered = version, sum(what == "tamper" for _, what in steps)
    assert len(api.applied) <= (1 + changes + tampered) * (2 if times.settle else 1)
    assert all(later - earlier >= SLOW.coalesce for earlier, later in pairwise(api.moments))


def test_without_the_right_to_read_the_heartbeat_writes() -> None:
    api, node = FakeApi(), Node()
    api.unreadable = Refused(403, "forbidden")
    Rig(api, node, SLOW).pass_time(0, 700)
    assert len(api.applied) == 2


def test_a_failing_server_is_asked_again_with_growing_pauses_and_the_newest_content_wins(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    api, node = FakeApi(), Node()
    api.failing = Unavailable("PATCH: 500")
    rig = Rig(api, node, SLOW)
    assert rig.pass_time(0, 1000)[1:] == [15, 16, 18, 22, 30, 46, 78, 142, 270, 526, 826]
    assert rig.problem == "NodeResourceTopology cannot be published: PATCH: 500"
    api.failing = None
    node.document = CHANGED
    rig.pass_time(1126, 1126)
    assert api.applied == [CHANGED]
    assert rig.complaints == ["NodeResourceTopology cannot be published: PATCH: 500", None]
    assert rig.writes("Unavailable") == 11
    assert "NodeResourceTopology is published again" in caplog.text


def test_a_write_whose_answer_is_lost_is_undone_when_the_node_is_again_as_it_was() -> None:
    api, node = FakeApi(), Node()
    rig = Rig(api, node, SLOW)
    rig.pass_time(0, 16)
    node.document, api.is_mute = CHANGED, True
    rig.pass_time(25, 25)
    assert api.stored == CHANGED
    node.document, api.is_mute = DOCUMENT, False
    rig.pass_time(26, 40)
    assert api.stored == DOCUMENT
    assert api.applied == [DOCUMENT, CHANGED, DOCUMENT]


def test_another_writer_is_named_and_the_object_taken_over() -> None:
    api, node = FakeApi(), Node()
    api.owner = (".zones", "nfd-topology-updater")
    rig = Rig(api, node, SLOW)
    rig.pass_time(0, 16)
    assert api.forced == [True]
    assert rig.problem == (
        "nfd-topology-updater writes .zones of this node's NodeResourceTopology too: let only one of them publish it"
    )
    assert rig.writes("Conflicted") == 1
    api.owner = None
    rig.pass_time(16, 620)
    assert rig.problem is None


def test_labels_of_another_writer_are_left_out_and_tried_again_later() -> None:
    labels = {"example.com/rack": "r1", "example.com/rails": "8"}
    document = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "worker-1", "labels": dict(labels)}}
    api, node = FakeApi(), Node(document)
    node.kind, node.is_shared = NODE, True
    api.owner = (".metadata.labels.example.com/rack", "kubectl-label")
    rig = Rig(api, node, SLOW)
    rig.pass_time(0, 16)
    assert api.applied[0]["metadata"]["labels"] == {"example.com/rails": "8"}
    assert "kubectl-label writes .metadata.labels.example.com/rack of this node's Node too" in str(rig.complaints)
    api.owner = None
    rig.pass_time(16, 620)
    assert api.applied[-1]["metadata"]["labels"] == labels
    assert not any(api.forced)
    assert rig.problem is None


async def test_a_build_that_fails_with_an_error_of_ours_is_waited_out_and_others_end_the_task() -> None:
    api, node = FakeApi(), Node()
    node.failing = LedgerError("disk full")
    async with Rig(api, node) as rig:
        await until(lambda: node.built >= 3)
        assert rig.problem == "NodeResourceTopology cannot be published: disk full"
        node.failing = KeyError("bug")
        with pytest.raises(KeyError):
            await rig.task


def test_a_node_that_could_not_be_asked_for_long_is_published_soon_after_it_answers() -> None:
    api, node = FakeApi(), Node()
    rig = Rig(api, node, SLOW)
    rig.pass_time(0, 16)
    node.failing, node.document = Unavailable("kubelet does not answer"), CHANGED
    moments = rig.pass_time(25, 625)
    assert moments[:6] == [25, 26, 28, 32, 40, 50]
    node.failing = None
    rig.pass_time(moments[-1] + SLOW.refresh, 640)
    assert api.applied == [DOCUMENT, CHANGED]


def test_a_list_holds_itself_only_but_owners_are_found_among_others() -> None:
    assert not holds({"zones": [1, 2]}, {"zones": [1]})
    owner = {"uid": "1", "kind": "Node"}
    others = [{"uid": "2"}, {**owner, "controller": False}]
    assert holds({"ownerReferences": others}, {"ownerReferences": [owner]})
    assert not holds({"ownerReferences": [{"uid": "2"}]}, {"ownerReferences": [owner]})
    assert not holds(None, owner)
