from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agent.cluster.topology.publisher import canonical, holds, other_writers, owned_keys, same, without
from hack.sim.cluster.field_sets import apply, rendered

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)
documents = st.dictionaries(st.text(max_size=3), values, max_size=4)


def managed(manager: str, document: dict[str, Any], operation: str = "Apply") -> dict[str, Any]:
    fields = apply(None, document, manager, force=False).owners[manager, "Apply"]
    return {"manager": manager, "operation": operation, "fieldsV1": rendered(fields)}


def stored(*entries: dict[str, Any], **content: Any) -> dict[str, Any]:
    return {"metadata": {"managedFields": list(entries)}, **content}


@given(documents, documents)
def test_a_document_holds_itself_and_one_with_more_still_holds_it(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert holds(one, one)
    assert same(one, one)
    assert holds({**two, **one}, one)
    assert canonical({**two, **one}) == canonical({**dict(reversed(two.items())), **one})


def test_a_list_holds_itself_only_but_owners_are_found_among_others() -> None:
    assert not holds({"zones": [1, 2]}, {"zones": [1]})
    owner = {"uid": "1", "kind": "Node"}
    others = [{"uid": "2"}, {**owner, "controller": False}]
    assert holds({"ownerReferences": others}, {"ownerReferences": [owner]})
    assert not holds({"ownerReferences": [{"uid": "2"}]}, {"ownerReferences": [owner]})
    assert not holds(None, owner)


def test_what_says_more_than_is_wanted_is_not_the_same_unless_it_is_metadata() -> None:
    wanted = {"metadata": {"name": "n"}, "spec": {"a": 1}}
    assert same({"metadata": {"name": "n", "uid": "u"}, "spec": {"a": 1}}, wanted)
    assert not same({"metadata": {"name": "n"}, "spec": {"a": 1, "b": 2}}, wanted)
    assert not same({"metadata": {"name": "n"}, "spec": {"a": 1}, "status": {}}, wanted)


def test_writers_of_metadata_alone_are_no_rivals() -> None:
    labels = {"metadata": {"labels": {"a.b/c": "d"}}}
    found = stored(
        managed("kubectl-label", labels), managed("nfd", {"zones": []}), managed("nodefabric", {"zones": []})
    )
    assert other_writers(found, "nodefabric") == ["nfd"]
    assert other_writers({"metadata": {}}, "nodefabric") == []


def test_only_what_this_agent_has_applied_is_its_own() -> None:
    mine = {"metadata": {"labels": {"a.b/c": "d", "e.f/g.h": "i"}, "annotations": {"j.k/l": "m"}}}
    updated = {"metadata": {"labels": {"n.o/p": "q"}}}
    metadata = stored(managed("nodefabric", mine), managed("nodefabric", updated, "Update"))["metadata"]
    assert owned_keys(metadata, "labels", "nodefabric") == {"a.b/c", "e.f/g.h"}
    assert owned_keys(metadata, "annotations", "nodefabric") == {"j.k/l"}
    assert owned_keys(metadata, "labels", "kubelet") == frozenset()


def test_labels_are_left_out_by_their_field_path_and_the_document_stays_as_it_was() -> None:
    document = {"metadata": {"name": "n", "labels": {"a.b/c": "d", "e.f/g": "h"}, "annotations": {"i.j/k": "l"}}}
    left = without(document, [".metadata.labels.a.b/c", ".metadata.annotations.i.j/k", ".spec.x", ".metadata.labels.z"])
    assert left == {"metadata": {"name": "n", "labels": {"e.f/g": "h"}, "annotations": {}}}
    assert document["metadata"]["labels"] == {"a.b/c": "d", "e.f/g": "h"}
