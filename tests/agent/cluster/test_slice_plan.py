"""What has to be written, and as which generation."""

from __future__ import annotations

from typing import Any

import pytest

from agent.cluster.slice_plan import (
    Batch,
    Change,
    Plan,
    StoredSlice,
    change,
    contents_of,
    document_of,
    dropped_in,
    has_lists,
    plan,
    resources_of,
    stored_of,
    wanted_of,
)
from tests.agent.cluster.slice_documents import DOWN, pool, pool_slice, tainted

NOTHING_SAME: dict[str, str] = {}


def stored(*documents: dict[str, Any], generation: int = 4, owner: str = "node-uid") -> dict[str, StoredSlice]:
    """Those slices as they stand at the server."""
    node = {"name": "n", "uid": owner}
    items = [document_of(one, generation, node, {}) for one in wanted_of(documents)]
    for number, item in enumerate(items):
        item["metadata"] |= {"uid": f"uid-{number}", "resourceVersion": "7"}
    return {item["metadata"]["name"]: stored_of(item) for item in items}


def planned(
    documents: tuple[dict[str, Any], ...],
    found: dict[str, StoredSlice],
    batch: Batch | None = None,
    same: dict[str, str] = NOTHING_SAME,
) -> tuple[int, list[str], list[str]]:
    made: Plan = plan(wanted_of(documents), found, "node-uid", batch or Batch(), same)
    return made.generation, [one.name for one in made.writes], [one.name for one in made.deletes]


def test_what_is_there_already_is_not_written() -> None:
    assert planned(pool(3), stored(*pool(3))) == (4, [], [])


def test_nothing_at_all_is_begun_with_the_first_generation() -> None:
    assert planned(pool(2), {}) == (1, ["0", "1"], [])


def test_one_slice_that_differs_keeps_its_generation() -> None:
    changed = (pool_slice(0, 3, ["vf-9"]), *pool(3)[1:])
    assert planned(changed, stored(*pool(3))) == (4, ["0"], [])


def test_one_slice_that_is_missing_is_written_as_of_the_generation_of_the_others() -> None:
    found = stored(*pool(3))
    del found["1"]
    assert planned(pool(3), found) == (4, ["1"], [])


def test_several_slices_that_differ_are_a_new_generation_of_all() -> None:
    changed = (pool_slice(0, 3, ["vf-8"]), pool_slice(1, 3, ["vf-9"]), pool(3)[2])
    assert planned(changed, stored(*pool(3))) == (5, ["0", "1", "2"], [])


def test_another_number_of_slices_is_a_new_generation_of_all() -> None:
    assert planned(pool(3), stored(*pool(2))) == (5, ["0", "1", "2"], [])
    assert planned(pool(1), stored(*pool(2))) == (5, ["0"], ["1"])


def test_where_no_slices_are_wanted_ours_are_deleted() -> None:
    assert planned((), stored(*pool(2))) == (4, [], ["0", "1"])


def test_a_leftover_of_an_older_generation_is_deleted_and_nothing_written() -> None:
    found = stored(*pool(2)) | {"9": stored(pool_slice(9, 1, ["vf-9"]), generation=3)["9"]}
    assert planned(pool(2), found) == (4, [], ["9"])


def test_a_pool_that_was_wiped_whole_comes_back_as_the_generation_that_it_was() -> None:
    batch = Batch(4, contents_of(wanted_of(pool(2))))
    assert planned(pool(2), {}, batch) == (4, ["0", "1"], [])


def test_a_pool_that_was_wiped_whole_and_has_changed_meanwhile_is_a_new_generation() -> None:
    batch = Batch(4, contents_of(wanted_of(pool(2))))
    assert planned((pool_slice(0, 2, ["vf-9"]), pool(2)[1]), {}, batch) == (5, ["0", "1"], [])


def test_a_batch_that_was_cut_short_is_gone_on_with() -> None:
    batch = Batch(5, contents_of(wanted_of(pool(3))))
    found = stored(*pool(2)) | {"2": stored(pool(3)[2], generation=5)["2"]}
    assert planned(pool(3), found, batch) == (5, ["0", "1"], [])


def test_a_slice_that_says_the_same_as_of_an_older_generation_is_written_anew() -> None:
    found = stored(*pool(3)) | {"2": stored(pool(3)[2], generation=5)["2"]}
    batch = Batch(5, contents_of(wanted_of(pool(3))))
    assert planned(pool(3), found, batch) == (5, ["0", "1"], [])
    assert planned(pool(3), found) == (6, ["0", "1", "2"], [])


def test_another_node_object_of_the_name_owns_them_anew() -> None:
    assert planned(pool(1), stored(*pool(1), owner="of-before")) == (4, ["0"], [])


def test_what_the_server_writes_in_its_own_way_is_not_written_again() -> None:
    sent, kept = wanted_of(pool(1))[0].content, wanted_of((pool_slice(0, 1, ["vf-7"]),))[0].content
    assert planned(pool(1), stored(pool_slice(0, 1, ["vf-7"])), None, {sent: kept}) == (4, [], [])


def test_when_a_taint_began_and_what_is_empty_make_no_difference() -> None:
    dated = tainted(pool_slice(0, 1, ["vf-0"]), "vf-0", {**DOWN, "timeAdded": "2026-01-01T00:00:00Z"})
    plain = tainted(pool_slice(0, 1, ["vf-0"]), "vf-0", DOWN)
    plain["spec"]["devices"][0] |= {"capacity": {}, "bindingConditions": []}
    assert planned((plain,), stored(dated)) == (4, [], [])


def test_taints_keep_the_time_at_which_they_began_whatever_slice_their_device_is_in_now() -> None:
    dated = tainted(pool_slice(0, 1, ["vf-0", "vf-1"]), "vf-0", {**DOWN, "timeAdded": "2026-01-01T00:00:00Z"})
    times = stored(dated)["0"].times
    moved = tainted(tainted(pool_slice(1, 2, ["vf-0", "vf-1"]), "vf-0", DOWN), "vf-1", DOWN)
    made = document_of(wanted_of([moved])[0], 5, {"name": "n", "uid": "u"}, times)
    assert [device["taints"] for device in made["spec"]["devices"]] == [
        [{**DOWN, "timeAdded": "2026-01-01T00:00:00Z"}],
        [DOWN],
    ]
    assert made["spec"]["pool"]["generation"] == 5
    assert made["metadata"]["ownerReferences"][0]["uid"] == "u"


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (pool(1), pool(1), Change.NOTHING),
        (pool(1), pool(2), Change.STRUCTURE),
        (pool(1), (tainted(pool(1)[0], "vf-0", DOWN),), Change.LINK),
        ((tainted(pool(1)[0], "vf-0", DOWN),), pool(1), Change.LINK),
        (pool(1), (tainted(pool(1)[0], "vf-0", {**DOWN, "key": "nodefabric.io/Quarantined"}),), Change.FAULT),
        (pool(1), (tainted(pool_slice(0, 1, ["vf-0", "vf-1"]), "vf-0", DOWN),), Change.STRUCTURE),
    ],
)
def test_a_fault_is_told_from_another_structure(before: Any, after: Any, kind: Change) -> None:
    assert change(before, after) is kind


def test_what_comes_back_without_taints_or_shares_was_dropped() -> None:
    sent = tainted(pool_slice(0, 1, ["vf-0", "hca-1"]), "vf-0", DOWN)
    sent["spec"]["devices"][1]["allowMultipleAllocations"] = True
    assert dropped_in(sent, sent) == frozenset()
    assert dropped_in(sent, pool_slice(0, 1, ["vf-0", "hca-1"])) == {"taints", "capacity"}


def test_lists_and_resources_are_found_in_attributes() -> None:
    document = pool_slice(0, 1, ["vf-0"])
    assert resources_of([document]) == {"rdma/vf"}
    assert not has_lists(document)
    document["spec"]["devices"][0]["attributes"]["gpu.nvidia.com/uuid"] = {"strings": ["a", "b"]}
    assert has_lists(document)
