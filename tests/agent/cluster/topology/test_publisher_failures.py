"""A publisher that is refused, answered by nobody, or not alone in writing."""

from __future__ import annotations

import pytest

from agent.cluster.apiserver import NODE
from agent.errors import AgentError, LedgerError, Refused, Unavailable
from tests.agent.cluster.topology.published import CHANGED, DOCUMENT, SLOW, FakeApi, Node, Rig
from tests.awaiting import until


def test_without_the_right_to_read_the_heartbeat_writes() -> None:
    api, node = FakeApi(), Node()
    api.unreadable = Refused(403, "forbidden")
    Rig(api, node, SLOW).pass_time(0, 700)
    assert len(api.applied) == 2


def test_a_failing_server_is_asked_again_with_growing_pauses_and_the_newest_content_wins() -> None:
    api, node = FakeApi(), Node()
    api.failing = Unavailable("PATCH: 500")
    rig = Rig(api, node, SLOW)
    assert rig.pass_time(0, 1000)[1:] == [15, 16, 18, 22, 30, 46, 78, 142, 270, 526, 826]
    assert rig.publisher.problem == "NodeResourceTopology cannot be published: PATCH: 500"
    api.failing = None
    node.document = CHANGED
    rig.pass_time(1126, 1126)
    assert api.applied == [CHANGED]
    assert rig.complaints == ["NodeResourceTopology cannot be published: PATCH: 500", None]
    assert rig.writes("Unavailable") == 11


async def test_ten_hours_without_a_server_cost_a_hundred_and_some_attempts_however_much_changes() -> None:
    api, node = FakeApi(), Node()
    api.failing = Unavailable("no route to host")
    rig = Rig(api, node, SLOW)

    now = 0.0
    while now < 36000:
        rig.publisher.changed()
        due = await rig.publisher.step(now)
        now = min(due, now + 7)
    assert 100 < api.calls < 140


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
    node.kind, node.is_shared = NODE, True
    api.owner = (".metadata.labels.example.com/rack", "kubectl-label")
    rig = Rig(api, node, SLOW)
    rig.pass_time(0, 16)
    assert api.applied[0]["metadata"]["labels"] == {"example.com/rails": "8"}
    assert "kubectl-label writes .metadata.labels.example.com/rack of this node's Node too" in str(rig.complaints)
    api.owner = None
    rig.pass_time(16, 620)
    assert api.applied[-1] == document
    assert rig.publisher.problem is None


async def test_a_publication_that_yields_to_an_error_is_built_anew_at_once() -> None:
    api, node = FakeApi(), Node()
    api.failing = Unavailable(".spec.podAllocations: field not declared in schema")

    def yields(error: AgentError) -> bool:
        api.failing = None
        node.document = CHANGED
        return "podAllocations" in str(error)

    node.yields = yields  # type: ignore[method-assign]
    publisher = Rig(api, node, SLOW).publisher

    await publisher.step(0)
    assert await publisher.step(15) == 16
    await publisher.step(16)
    assert api.applied == [CHANGED]


async def test_a_build_that_fails_with_an_error_of_ours_is_waited_out_and_others_end_the_task() -> None:
    api, node = FakeApi(), Node()
    node.failing = LedgerError("disk full")
    async with Rig(api, node) as rig:
        await until(lambda: node.built >= 3)
        assert rig.publisher.problem == "NodeResourceTopology cannot be published: disk full"
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
