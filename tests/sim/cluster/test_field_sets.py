from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hack.sim.cluster.field_sets import Conflicts, Managed, apply, fields, rendered, update

values = st.dictionaries(st.sampled_from("abc"), st.sampled_from(["x", "y"]), max_size=3)
documents = st.builds(lambda labels, spec: {"metadata": {"labels": labels}, "spec": spec}, values, values)


def labelled(**labels: str) -> dict[str, Any]:
    return {"metadata": {"name": "n", "labels": labels}}


def test_two_managers_keep_to_their_fields() -> None:
    first = apply(None, labelled(a="1"), "one", force=False)
    both = apply(first, labelled(b="2"), "two", force=False)
    assert both.content["metadata"]["labels"] == {"a": "1", "b": "2"}
    assert rendered(both.owners["two", "Apply"]) == {"f:metadata": {"f:labels": {"f:b": {}}}}


def test_the_same_value_is_shared_and_stays_until_both_give_it_up() -> None:
    both = apply(apply(None, labelled(a="1"), "one", force=False), labelled(a="1"), "two", force=False)
    left = apply(both, labelled(), "one", force=False)
    assert left.content["metadata"]["labels"]["a"] == "1"
    gone = apply(left, labelled(), "two", force=False)
    assert gone.content["metadata"]["labels"] == {}


def test_another_value_is_a_conflict_unless_forced() -> None:
    first = apply(None, labelled(a="1"), "one", force=False)
    with pytest.raises(Conflicts) as caught:
        apply(first, labelled(a="2"), "two", force=False)
    assert [c.cause("v1") for c in caught.value.found] == [
        {
            "reason": "FieldManagerConflict",
            "message": 'conflict with "one" using v1',
            "field": ".metadata.labels.a",
        }
    ]
    taken = apply(first, labelled(a="2"), "two", force=True)
    assert taken.content["metadata"]["labels"] == {"a": "2"}
    assert set(taken.owners) == {("two", "Apply")}


def test_an_update_owns_what_it_changed() -> None:
    first = apply(None, labelled(a="1", b="2"), "one", force=False)
    second = update(first, labelled(a="9", b="2"), "kubectl")
    assert second.owners == {
        ("one", "Apply"): frozenset({("metadata", "labels", "b")}),
        ("kubectl", "Update"): frozenset({("metadata", "labels", "a")}),
    }
    with pytest.raises(Conflicts):
        apply(second, labelled(a="1", b="2"), "one", force=False)


def test_owner_references_are_kept_by_uid() -> None:
    def owned(uid: str) -> dict[str, Any]:
        return {"metadata": {"ownerReferences": [{"uid": uid, "kind": "Node"}]}}

    both = apply(apply(None, owned("1"), "one", force=False), owned("2"), "two", force=False)
    assert [one["uid"] for one in both.content["metadata"]["ownerReferences"]] == ["1", "2"]
    moved = apply(both, owned("3"), "one", force=False)
    assert [one["uid"] for one in moved.content["metadata"]["ownerReferences"]] == ["2", "3"]


@given(st.lists(st.tuples(st.sampled_from(["one", "two", "three"]), documents), max_size=6))
def test_after_any_applies_each_field_of_the_content_has_an_owner(applies: list[tuple[str, dict[str, Any]]]) -> None:
    present: Managed | None = None
    for manager, document in applies:
        present = apply(present, document, manager, force=True)
        found, wanted = fields(present.content), fields(document)
        assert {path: found[path] for path in wanted} == wanted
        assert found.keys() == frozenset().union(*present.owners.values())
