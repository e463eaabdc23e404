"""Units that the reconciler frees, takes over, and moves after their devices."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agent.errors import Unavailable
from agent.kubelet.cri import Sandbox
from agent.kubelet.podresources import HeldUnit
from agent.reconcile import grants
from agent.reconcile.grants import UNCLAIMED_SECONDS
from tests.agent.reconcile.scene import OTHER_VF, Scene
from tests.awaiting import until
from tests.cni.tiny_node import tiny_snapshot
from tests.node import POD, VF, attach, bound_slot, granted, open_books, owner, prepare


def test_a_grant_that_is_new_to_kubelets_word_stays_however_long_healing_took(scene: Scene) -> None:
    def meanwhile() -> None:
        scene.books.grant(granted("rdma/vf", {VF: VF}))
        scene.now += 10 * UNCLAIMED_SECONDS  # a driver that hangs, and another

    scene.meanwhile = meanwhile
    scene.run_once()
    assert [hold.key for hold in scene.books.holds()] == [VF]


def test_a_slot_that_is_bound_while_kubelets_word_is_compared_keeps_its_device(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ADD finds it with kubelet, too, in books that are new."""
    slot = bound_slot("slot-rdma:vf-0-0", "rdma/vf", "vf", VF, "main", "c1", "eth0", POD, {})
    compare = grants.decide

    def and_bind(*given: Any, **more: Any) -> tuple[grants.Action, ...]:
        actions = compare(*given, **more)
        scene.books.bind_slots([slot])
        return actions

    monkeypatch.setattr(grants, "decide", and_bind)
    scene.offered = {slot.key: (VF,)}
    scene.held_units = [HeldUnit(POD, "rdma/vf", slot.key)]
    scene.run_once()
    assert [hold.devices for hold in scene.books.bound_slots("c1")] == [(VF,)]


def test_a_clock_that_is_set_back_leaves_no_grant_for_the_time_between(tmp_path: Path) -> None:
    """One that ran by local time is hours ahead until the first server of time is heard."""
    scene: Scene
    with open_books(tmp_path, clock=lambda: scene.now) as books:
        scene = Scene(books)
        scene.offered = {VF: (VF, "0000:5e:00.2"), OTHER_VF: (OTHER_VF,)}
        books.grant(granted("rdma/vf", scene.offered))
        books.bind([OTHER_VF], POD)
        scene.now -= 8 * 3600
        scene.held_units = [HeldUnit(POD, "rdma/vf", VF), HeldUnit(POD, "rdma/vf", OTHER_VF)]
        scene.run_once()
        assert books.pod_of(OTHER_VF) == POD
        scene.now += 1
        scene.run_once()
        assert [books.pod_of(unit) for unit in (VF, OTHER_VF)] == [POD, POD]
        scene.held_units = [HeldUnit(POD, "rdma/vf", OTHER_VF)]
        scene.run_once()
        assert {hold.devices for hold in books.holds()} == {(VF, "0000:5e:00.2"), (OTHER_VF,)}
        scene.now += UNCLAIMED_SECONDS + 1
        scene.run_once()
        assert [hold.key for hold in books.holds()] == [OTHER_VF]


def test_a_kubelet_that_does_not_answer_frees_nothing(scene: Scene) -> None:
    scene.books.grant(granted("rdma/vf", {VF: VF}))
    scene.now += UNCLAIMED_SECONDS + 1
    scene.held_units = Unavailable("no kubelet")
    scene.run_once()
    assert [hold.key for hold in scene.books.holds()] == [VF]
    assert not scene.settled.value


def test_a_unit_whose_device_a_claim_has_is_not_taken_over_and_keeps_no_other_from_it(scene: Scene) -> None:
    prepare(scene.books)
    scene.offered = {VF: (VF,), OTHER_VF: (OTHER_VF,)}
    scene.held_units = [HeldUnit(POD, "rdma/vf", VF), HeldUnit(POD, "rdma/vf", OTHER_VF)]
    scene.run_once()
    assert [hold.device for hold in scene.books.holds()] == [OTHER_VF]
    assert scene.settled.value


@pytest.mark.parametrize("lacks", ["lists", "kubelet"])
async def test_kubelets_word_is_compared_soon_after_it_can_be_though_nothing_happens(scene: Scene, lacks: str) -> None:
    scene.held_units = [HeldUnit(POD, "rdma/vf", VF)]
    if lacks == "lists":
        scene.offered = None
    else:
        scene.held_units = Unavailable("no kubelet")
    running = asyncio.create_task(scene.reconciler.run(seconds=3600))
    await until(lambda: scene.reconciler.view.asked_at > 0 and (scene.grants.is_too_early or lacks == "kubelet"))
    scene.offered, scene.held_units = {VF: (VF,)}, [HeldUnit(POD, "rdma/vf", VF)]
    await until(lambda: scene.settled.value)
    running.cancel()
    await asyncio.wait([running])
    assert [hold.pod for hold in scene.books.holds()] == [POD]


def test_a_pod_is_known_to_kubelet_or_to_the_runtime_or_to_nobody(scene: Scene) -> None:
    row = attach(scene.books, VF, owner("c1"))
    known: list[bool | None] = []
    for held_units, sandboxes in (
        ([HeldUnit(POD, "rdma/vf", VF)], Unavailable("no runtime")),
        ((), [Sandbox("c1", POD, ready=False)]),
        ((), ()),
        (Unavailable("no kubelet"), ()),
        ((), Unavailable("no runtime")),
        (Unavailable("no kubelet"), [Sandbox("c1", POD, ready=True)]),
    ):
        scene.held_units, scene.sandboxes = held_units, sandboxes
        scene.run_once()
        known.append(scene.reconciler.pod_known(row))
    assert known == [True, True, False, None, None, True]
    scene.held_units, scene.sandboxes = (), ()
    scene.pods = frozenset({("default", "trainer")})  # kubelet counts no unit of ours to it
    scene.run_once()
    assert scene.reconciler.pod_known(row) is True


def test_grants_follow_their_vfs_to_new_addresses_after_a_reboot(tmp_path: Path) -> None:
    with open_books(tmp_path, boot_id="yesterday") as books:
        scene = Scene(books)
        scene.snapshot = tiny_snapshot(2, boot_id="yesterday")
        scene.run_once()
        books.grant(granted("rdma/vf", {VF: VF}))
        books.bind([VF], POD)
    with open_books(tmp_path, boot_id="today") as books:
        scene = Scene(books)
        scene.snapshot = tiny_snapshot(2, boot_id="today", bus="5e")
        scene.held_units = [HeldUnit(POD, "rdma/vf", VF)]
        scene.offered = None
        scene.run_once()
        # Not before it is known what is offered; and what is needed for it is not forgotten meanwhile.
        assert [hold.device for hold in books.holds()] == [VF]
        assert {k.boot_id for k in books.known_devices()} == {"yesterday"}
        scene.offered = {vf: (vf,) for vf in ("0000:5e:00.2", "0000:5e:00.3")}
        scene.run_once()
        assert [(hold.key, hold.device) for hold in books.holds()] == [(VF, "0000:5e:00.2")]
        assert ("grant-move", "renumbered") in scene.counted
        scene.run_once()
        assert [(k.device, k.boot_id) for k in books.known_devices()] == [
            ("0000:5e:00.2", "today"),
            ("0000:5e:00.3", "today"),
        ]
