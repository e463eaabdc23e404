"""Rails with several NICs, brought in line with kubelet's word."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agent.kubelet.podresources import HeldUnit
from agent.model.allocation import Devices, Grant
from agent.reconcile.grants import Move, Release, TakeOver, decide
from tests.agent.reconcile.scene import Scene
from tests.node import POD, open_books

RAIL, NICS = "rail-GPU-1", ("0000:3b:00.0", "0000:3c:00.0")
GRANT = Grant(RAIL, "rdma/rail", NICS[0], 0.0, POD, others=NICS[1:])
HELD = HeldUnit(POD, "rdma/rail", RAIL)


def decided(
    *held: HeldUnit, offered: Mapping[str, Devices], attached: str = "", moved: Mapping[str, str] | None = None
) -> tuple[object, ...]:
    return decide(
        [GRANT], held, offered=offered, attached={attached}, moved=moved or {}, asked_at=160.0, unclaimed_before=100.0
    )


def test_a_rail_stays_as_long_as_one_of_its_nics_is_in_a_pod() -> None:
    assert decided(offered={RAIL: NICS}) == (Release(RAIL),)
    assert decided(offered={RAIL: NICS}, attached=NICS[1]) == ()


def test_a_rail_that_is_offered_with_another_set_is_moved_to_all_of_it() -> None:
    assert decided(HELD, offered={RAIL: NICS}) == ()
    other = (NICS[0], "0000:5b:00.0")
    assert decided(HELD, offered={RAIL: other}) == (Move(RAIL, other, "offered-elsewhere"),)


def test_a_rail_whose_gpu_is_gone_follows_those_of_its_nics_that_have_moved() -> None:
    moved = {NICS[1]: "0000:5b:00.0"}
    assert decided(HELD, offered={}, moved=moved) == (Move(RAIL, (NICS[0], "0000:5b:00.0"), "renumbered"),)
    taken = {"rail-GPU-2": ("0000:6b:00.0", "0000:5b:00.0")}
    others = HeldUnit(POD, "rdma/rail", "rail-GPU-2")
    assert [a for a in decided(HELD, others, offered=taken, moved=moved) if not isinstance(a, TakeOver)] == []


def test_lost_books_have_all_nics_of_a_rail_again(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        scene = Scene(books)
        scene.offered, scene.held_units = {RAIL: NICS}, [HELD]
        scene.run_once()
        assert [(grant.devices, grant.pod) for grant in books.grants()] == [(NICS, POD)]


def test_a_clock_that_is_set_back_leaves_a_rail_all_its_nics(tmp_path: Path) -> None:
    scene: Scene
    with open_books(tmp_path, clock=lambda: scene.now) as books:
        scene = Scene(books)
        books.grant("rdma/rail", {RAIL: NICS})
        scene.offered, scene.held_units = {RAIL: NICS}, [HELD]
        granted_at = books.grants()[0].granted_at
        scene.now -= 8 * 3600
        scene.run_once()
        (grant,) = books.grants()
        assert grant.granted_at < granted_at
        assert grant.devices == NICS
