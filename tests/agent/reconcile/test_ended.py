"""Grants of pods that have ended: free within seconds, and not before kubelet lists the pod no more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

from agent.kubelet.podresources import HeldUnit
from agent.ledger import Ledger
from agent.model.allocation import PodRef
from agent.reconcile.grants import EndedPods
from tests.agent.reconcile.scene import Scene
from tests.awaiting import until
from tests.node import POD, VF, granted

NEXT = PodRef("default", "next")


def reconciling(scene: Scene, work: Callable[[], Awaitable[None]]) -> None:
    """Do something while the reconciler runs, to which nothing else happens for an hour."""

    async def scenario() -> None:
        running = asyncio.create_task(scene.reconciler.run(seconds=3600))
        await until(lambda: scene.settled.value)
        await work()
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(scenario())


def end(scene: Scene, pod: PodRef) -> None:
    """Have a DEL come on a thread of CNI's, a moment later."""
    scene.now += 1
    caller = threading.Thread(target=scene.grants.ended.note, args=(pod,))
    caller.start()
    caller.join()
    scene.now += 1


def test_kubelet_is_asked_again_while_it_still_lists_the_pod(scene: Scene) -> None:
    scene.books.grant(granted("rdma/vf", {VF: VF}))
    scene.held_units = [HeldUnit(POD, "rdma/vf", VF)]
    scene.now += 1
    asked = 0

    def meanwhile() -> None:
        nonlocal asked
        asked += 1

    scene.on_claims = meanwhile

    async def work() -> None:
        assert scene.books.pod_of(VF) is not None  # as kubelet has told
        end(scene, POD)
        before = asked
        await until(lambda: asked > before)
        assert len(scene.books.holds()) == 1
        scene.held_units = []
        await until(lambda: not scene.books.holds())

    reconciling(scene, work)
    assert ("grant-release", "unclaimed") in scene.counted


def test_pods_are_asked_about_a_few_times_and_those_without_grants_once(books: Ledger) -> None:
    async def ask() -> list[PodRef]:
        await asyncio.wait_for(ended.due(), 10)
        ended.looked()
        return [one.pod for one in ended.pods()]

    async def asked() -> list[list[PodRef]]:
        return [await ask() for _ in pauses]

    pauses = (0.0, 0.01, 0.01)
    ended = EndedPods(books, clock=lambda: 1000.0, pauses=pauses)
    books.grant(granted("rdma/vf", {VF: VF}))
    books.bind([VF], POD)
    for again in range(2):
        ended.note(NEXT)
        ended.note(POD)
        ended.note(PodRef("default", "spooled"), 900.0)
        assert [one.at for one in ended.pods()] == [1000.0, 1000.0, 900.0]
        assert asyncio.run(asked()) == [[POD], [POD], []], again


def test_a_pod_that_ends_while_kubelet_is_asked_about_another_is_asked_about_soon(books: Ledger) -> None:
    async def scenario() -> None:
        await ended.due()
        ended.note(NEXT)
        ended.looked()
        assert [one.pod for one in ended.pods()] == [POD, NEXT]
        await asyncio.wait_for(ended.due(), 10)
        ended.looked()
        assert [one.pod for one in ended.pods()] == [POD]

    ended = EndedPods(books, clock=lambda: 1000.0, pauses=(0.0, 3600.0))
    books.grant(granted("rdma/vf", {VF: VF}))
    books.bind([VF], POD)
    ended.note(POD)
    asyncio.run(scenario())
