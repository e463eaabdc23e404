"""An API server answers with JSON of any shape and depth: the question fails, and nothing else does."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from agent.cluster import slice_plan
from agent.cluster.apiserver import NODE, SLICE, ApiServer
from agent.cluster.claim_objects import ClaimObjects
from agent.cluster.slices import Pool, remove_all
from agent.edits.specs import Specs, file_of_claim
from agent.errors import Unavailable
from agent.model.allocation import ClaimRef, PodRef
from agent.process.conditions import NO_POD_NEEDS
from agent.reconcile.claims import NEW_SECONDS, Claims
from agent.reconcile.view import Outside, View
from agent.state import Latest
from cni.pod_devices import ClaimReader as Reads
from cni.pod_devices import pods_of
from deviceplugin.dra.attributes import leaves_in
from tests.agent.reconcile.outside import Answers
from tests.agent.reconcile.scene import Scene
from tests.hostile.answering import asking
from tests.node import new_report, open_books, prepare

UID = "uid-nics"
REF = ClaimRef(UID, "default", "nics")
ALL_RIGHT = {"uid": UID, "name": "nics", "namespace": "default", "resourceVersion": "1"}


def claim(status: Any) -> bytes:
    return json.dumps({"metadata": ALL_RIGHT, "status": status}).encode()


STRANGE = {
    "nested lists": b"[" * 3000 + b"]" * 3000,
    "nested in an object": b'{"metadata": ' + b"[" * 500 + b"]" * 500 + b"}",
    "nested parameters": claim({"allocation": json.loads("[" * 90 + "]" * 90)}),
    "no JSON": b"<html>",
    "no text": b"\xff",
    "JSON and more": b'{"a": 1} x',
    "no bytes": b"",
    "nothing": b"{}",
    "null": b"null",
    "a list": b"[]",
    "a number": b"5",
    "a text": b'"claim"',
    "no metadata": b'{"metadata": null}',
    "metadata of another type": b'{"metadata": ["uid"]}',
    "a number for UID": b'{"metadata": {"uid": 5}}',
}
STRANGE_CLAIMS = {
    "no namespace": json.dumps({"metadata": {"uid": UID}, "status": {}}).encode(),
    "a list for status": claim([]),
    "a number for pods": claim({"reservedFor": 7}),
    "numbers for pods": claim({"reservedFor": [7]}),
    "a pod without a name": claim({"reservedFor": [{"resource": "pods"}]}),
    "lists for names": claim({"reservedFor": [{"resource": "pods", "name": ["a"], "uid": {"b": 1}}]}),
}


@pytest.mark.parametrize("answer", [*STRANGE, *STRANGE_CLAIMS])
def test_a_strange_answer_about_a_leftover_claim_ends_no_round_of_healing(tmp_path: Path, answer: str) -> None:
    body = (STRANGE | STRANGE_CLAIMS)[answer]
    with (
        asking(tmp_path, lambda asked: asked.send(body)) as api,
        open_books(tmp_path, clock=lambda: time.time() - NEW_SECONDS - 60) as books,
    ):
        prepare(books)
        reader: Latest[Reads | None] = Latest(ClaimObjects(lambda: api, "n"))
        specs = Specs(books, tmp_path / "cdi")
        specs.sync([file_of_claim(UID)])
        scene = Scene(books, others=[Claims(books, specs, Answers(), reader)])
        scene.run_once()
        assert scene.counted == [("lease-return", "owed")], "healers after the claims' have had their turn"
        assert books.claim(UID) is not None, "what is not understood is no reason to end a claim"


QUESTIONS: dict[str, Callable[[ApiServer], object]] = {
    "a node's metadata": lambda api: api.metadata(NODE, "n"),
    "a claim": lambda api: ClaimObjects(lambda: api, "n").get(REF),
    "a pod": lambda api: ClaimObjects(lambda: api, "n").pod(PodRef("ns", "p", "u")),
    "slices": lambda api: api.list_of(SLICE, {}, slice_plan.stored_of),
    "slices to delete": lambda api: remove_all(api, Pool("nodefabric.io", "n")),
    "an applied slice": lambda api: slice_plan.stored_of(api.apply(SLICE, {"metadata": {"name": "s"}}, force=True)),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_whatever_is_asked_a_strange_answer_is_none(tmp_path: Path, question: str) -> None:
    each = [(body, status) for status in (200, 409, 422) for body in STRANGE.values()]
    left = iter(each)
    with asking(tmp_path, lambda asked: asked.send(*next(left))) as api:
        for body, status in each:
            try:
                found = QUESTIONS[question](api)
            except Unavailable:
                continue
            pytest.fail(f"taken for an answer: {status} {body[:60]!r}: {found!r}")


ITEMS = [
    5,
    {},
    {"metadata": ALL_RIGHT},
    {"metadata": ALL_RIGHT, "spec": 5},
    {"metadata": ALL_RIGHT, "spec": {"pool": 5}},
    {"metadata": ALL_RIGHT, "spec": {"pool": {}, "devices": [5]}},
    {"metadata": ALL_RIGHT, "spec": {"pool": {}, "devices": [{"name": "a", "attributes": []}]}},
    {"metadata": ALL_RIGHT, "spec": {"pool": {}, "devices": [{"name": "a", "attributes": {"resource": 5}}]}},
    {"metadata": ALL_RIGHT, "spec": {"pool": {}, "devices": [{"name": "a", "taints": [{"timeAdded": "t"}]}]}},
    {"metadata": {**ALL_RIGHT, "ownerReferences": [{"kind": "Node"}]}, "spec": {"pool": {}}},
]


@pytest.mark.parametrize("item", ITEMS, ids=json.dumps)
def test_slices_of_any_shape_are_none(tmp_path: Path, item: Any) -> None:
    body = json.dumps({"metadata": {"resourceVersion": "1"}, "items": [item]}).encode()
    with asking(tmp_path, lambda asked: asked.send(body)) as api, pytest.raises(Unavailable):
        remove_all(api, Pool("nodefabric.io", "n"))


@pytest.mark.parametrize("item", ITEMS[3:], ids=json.dumps)
def test_switches_are_not_read_from_slices_of_any_shape(item: Any) -> None:
    with contextlib.suppress(Unavailable):
        assert leaves_in([item]) == {}


def test_a_claim_reserved_for_no_pod_has_none() -> None:
    assert pods_of({"metadata": ALL_RIGHT, "status": {"reservedFor": None}}) == []


class Stumbling:
    """A healer that meets what nobody has foreseen."""

    name = "slots"

    def __init__(self) -> None:
        self.error: Exception | None = ZeroDivisionError("division by zero")

    def heal(self, view: View) -> None:
        if self.error is not None:
            raise self.error


def test_what_nobody_has_foreseen_in_one_healer_is_shown_until_it_succeeds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stumbling = Stumbling()
    with open_books(tmp_path) as books:
        scene = Scene(books, others=[stumbling])
        for _ in range(2):
            scene.run_once()
        assert scene.counted == [("lease-return", "owed")] * 2, "the others have healed"
        assert scene.outside.failures == "slots: ZeroDivisionError: division by zero"
        assert scene.outside.heal_failures == ["slots", "slots"]
        (said,) = [record for record in caplog.records if record.name == "agent.reconcile.reconciler"]
        assert said.exc_info is not None, "the log has where it happened, once"
        stumbling.error = None
        scene.run_once()
        assert scene.outside.failures is None


def test_a_failing_healer_is_a_condition_and_a_number_and_pods_are_served() -> None:
    report, nobody = new_report(), cast(Any, None)
    metrics, conditions = report.metrics, report.conditions
    told = Outside(nobody, nobody, None, int, nobody, report)
    told.heal_failed("slots")
    told.failing("slots: stuck")
    assert conditions.found["healing"] == "slots: stuck"
    assert "healing" in NO_POD_NEEDS
    assert metrics.registry.get_sample_value("nodefabric_healer_failures_total", {"healer": "slots"}) == 1
    told.failing(None)
    assert "healing" not in conditions.found
