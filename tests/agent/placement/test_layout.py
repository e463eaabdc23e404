"""Which units of one resource a container should get."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.model.device import Snapshot
from agent.placement import Distances, Layout, choose
from tests.node import gpu_uuid, node


def vfs(snapshot: Snapshot) -> dict[str, str]:
    return {d.address: d.address for d in snapshot.devices if d.is_vf}


def shares(snapshot: Snapshot, count: int = 12) -> dict[str, str]:
    return {f"hca-{d.address}-{n}": d.address for d in snapshot.devices if d.is_pf for n in range(count)}


def gpus(snapshot: Snapshot) -> dict[str, str]:
    return {g.uuid: g.uuid for g in snapshot.gpus}


def test_without_spread_one_adapter_is_filled_before_another() -> None:
    snapshot = node()
    options = vfs(snapshot)
    filled, spread = Layout(Distances(snapshot), options, spread=False), Layout(Distances(snapshot), options)
    adapters = [filled.adapter[unit] for unit in choose(filled, list(options), (), 5)]
    assert Counter(adapters) == {"0000:12:00.0": 4, "0000:22:00.0": 1}
    assert len({spread.adapter[unit] for unit in choose(spread, list(options), (), 4)}) == 4
    free = [i for i in options if i not in ("0000:32:00.1", "0000:32:00.2")]
    assert choose(filled, free, (), 2) == ("0000:32:00.3", "0000:32:00.4")
    # The pod's GPU goes first, however full another adapter is.
    assert choose(filled, free, (), 2, (gpu_uuid(1),)) == ("0000:22:00.1", "0000:22:00.2")
    assert choose(filled, free, (), 1, (gpu_uuid(0), gpu_uuid(2))) == ("0000:32:00.3",)
    assert choose(spread, free, (), 1, (gpu_uuid(0), gpu_uuid(2))) == ("0000:12:00.1",)


def test_vfs_that_are_joined_in_pairs_are_half_of_each_pf_at_most() -> None:
    snapshot = node()
    options = vfs(snapshot)
    plain, bonded = Layout(Distances(snapshot), options), Layout(Distances(snapshot), options, bonded=True)
    for size, near in ((2, ()), (2, (gpu_uuid(1),)), (4, (gpu_uuid(1),)), (4, (gpu_uuid(0), gpu_uuid(2)))):
        adapters = Counter(bonded.adapter[unit] for unit in choose(bonded, list(options), (), size, near))
        assert adapters.total() == size
        assert max(adapters.values()) <= size // 2
    assert {plain.adapter[unit] for unit in choose(plain, list(options), (), 2, (gpu_uuid(1),))} == {"0000:22:00.0"}
    with_it = choose(bonded, list(options), ("0000:22:00.1",), 2, (gpu_uuid(1),))
    assert [bonded.adapter[unit] for unit in with_it][1] != "0000:22:00.0"


def test_shares_are_taken_in_natural_order() -> None:
    snapshot = node(rails=1)
    free = [f"hca-0000:12:00.0-{n}" for n in (10, 9, 2, 11)]
    assert choose(Layout(Distances(snapshot), shares(snapshot)), free, (), 1) == ("hca-0000:12:00.0-2",)


SNAPSHOT = node()
EVERYTHING = vfs(SNAPSHOT) | shares(SNAPSHOT, 3) | gpus(SNAPSHOT)


LAYOUT = Layout(Distances(SNAPSHOT), EVERYTHING)


@settings(deadline=None)
@given(data=st.data())
def test_an_answer_is_complete_valid_and_independent_of_order(data: st.DataObject) -> None:
    available = data.draw(st.lists(st.sampled_from([*EVERYTHING, "unknown-1", "x"]), unique=True))
    must = data.draw(st.lists(st.sampled_from(available), unique=True, max_size=3)) if available else []
    size = data.draw(st.integers(len(must), len(available) + 2))
    near = data.draw(st.lists(st.sampled_from([gpu_uuid(1), "0000:12:00.1", "GPU-unknown"]), max_size=3))
    found = choose(LAYOUT, available, must, size, near)
    assert len(found) == len(set(found)) == min(size, len(available))
    assert set(must) <= set(found) <= set(available)
    known = [i for i in available if i in EVERYTHING]
    mixed = data.draw(st.permutations(known))
    must_known = [i for i in must if i in known]
    assert choose(LAYOUT, mixed, must_known, min(size, len(known)), near) == choose(
        LAYOUT, known, must_known, min(size, len(known)), near
    )
