"""What the reconciler heals and how often it tries, and what never ends it."""

from __future__ import annotations

import asyncio
import errno

import pytest

from agent.errors import HardwareError, LedgerDamaged, LedgerError
from agent.model.device import Snapshot
from tests.agent.reconcile.scene import OTHER_VF, Scene
from tests.awaiting import until
from tests.node import VF, attach, owner


@pytest.mark.parametrize(
    "error", [HardwareError("stuck"), LedgerError("disk full"), OSError(errno.EMFILE, "Too many open files")]
)
def test_a_device_that_cannot_be_healed_keeps_no_other_from_it(scene: Scene, error: Exception) -> None:
    attach(scene.books, VF, owner("c1"))
    attach(scene.books, OTHER_VF, owner("c2"))
    scene.hands.errors[VF] = error
    scene.reconciler.heal_attachments()
    assert scene.hands.healed == [OTHER_VF]
    reason = getattr(error, "reason", "OSError")
    assert scene.counted == [("detach-failed", reason), ("detach", "owner-gone")]


def test_what_replaced_plugins_left_is_adopted_once_the_node_is_known(scene: Scene) -> None:
    scene.hands.adopted = (VF, OTHER_VF)
    scene.snapshot = Snapshot()
    scene.reconciler.heal_attachments()
    assert scene.counted == []
    scene.snapshot = Snapshot(boot_id="boot")
    scene.reconciler.heal_attachments()
    assert scene.counted == [("adopt", "replaced-plugin")] * 2
    scene.reconciler.heal_attachments()
    assert len(scene.counted) == 2


def test_what_replaced_plugins_left_has_a_row_before_kept_dels_are_carried_out(scene: Scene) -> None:
    """One of them may be of such a pod, and would find nothing to undo."""
    scene.hands.adopted = (VF,)
    before: list[tuple[str, str]] = []
    scene.meanwhile = lambda: before.extend(scene.counted)
    scene.reconciler.heal_attachments()
    assert before == [("adopt", "replaced-plugin")]


def test_books_that_cannot_be_written_at_the_start_do_not_end_the_agent(scene: Scene) -> None:
    scene.books.quarantine(VF, "clean-up failed")
    scene.books.close()
    scene.reconciler.heal_attachments()
    scene.run_once()
    assert scene.counted == [("lease-return", "owed")]
    assert "is closed" in str(scene.outside.complaints[-1])


async def test_damaged_books_end_the_agent(scene: Scene) -> None:
    await scene.reconciler.round()
    scene.books.path.unlink()
    scene.now += 60
    with pytest.raises(LedgerDamaged, match="the file is gone"):
        await scene.reconciler.round()


async def test_a_call_that_meets_damage_ends_the_agent_before_the_next_round(scene: Scene) -> None:
    running = asyncio.create_task(scene.reconciler.run(3600))
    await asyncio.sleep(0)
    scene.books.path.unlink()
    with pytest.raises(LedgerDamaged):
        scene.books.probe()
    await asyncio.wait([running], timeout=60)
    with pytest.raises(ExceptionGroup) as ended:
        running.result()
    assert ended.group_contains(LedgerDamaged, match="the file is gone")


def test_a_clock_that_is_set_back_keeps_nothing_waiting(scene: Scene) -> None:
    """At boot it may be wrong by years, until the first server of time is heard."""
    attach(scene.books, VF, owner())
    scene.hands.errors[VF] = HardwareError("stuck")
    scene.run_once()
    del scene.hands.errors[VF]
    scene.outside.complaints.clear()
    scene.now -= 365 * 86400
    scene.run_once()
    assert scene.hands.healed == [VF]
    assert scene.outside.complaints == [None]


async def test_what_is_due_again_is_not_waited_for_until_the_next_round(scene: Scene) -> None:
    attach(scene.books, VF, owner())
    scene.hands.errors[VF] = HardwareError("stuck")

    running = asyncio.create_task(scene.reconciler.run(seconds=3600))
    await until(lambda: scene.counted)
    scene.now += 1000
    del scene.hands.errors[VF]
    await until(lambda: scene.hands.healed)
    running.cancel()
    await asyncio.wait([running])
    assert scene.hands.healed == [VF]


async def test_leases_are_given_back_only_once_pods_are_served(scene: Scene) -> None:
    served = asyncio.Event()
    scene.hands.asked_for_leases = -1
    running = asyncio.create_task(scene.reconciler.run(seconds=3600, served=served.wait))
    await until(lambda: scene.settled.value)
    assert scene.hands.asked_for_leases == -1
    served.set()
    await until(lambda: scene.hands.asked_for_leases == 1)
    running.cancel()
    await asyncio.wait([running])
