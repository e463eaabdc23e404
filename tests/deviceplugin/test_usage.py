"""The allocator hears what pods hold: from every answer of kubelet's, and from one of its own where nobody asks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import cast

import pytest

from agent.kubelet.podresources import PodDevices
from agent.ledger import Ledger
from agent.model.device import Snapshot
from agent.state import Latest
from deviceplugin.preference import SHOWN_SECONDS, Preference, Usage, UsageTimes
from tests.agent.kubelet.test_podresources import Answering
from tests.awaiting import until
from tests.node import node


class Books:
    """Changes when the test says so."""

    def __init__(self) -> None:
        self.change: Callable[[], None] = lambda: None

    def subscribe(self, listener: Callable[[], None]) -> None:
        self.change = listener


class Scene:
    """Usage on a node, with a kubelet and books."""

    def __init__(self) -> None:
        self.kubelet, self.books = Answering(), Books()
        self.heard: list[tuple[str, float]] = []

    def take(self, pods: tuple[PodDevices, ...], asked_at: float) -> None:
        self.heard.append((pods[0].pod.name, asked_at))

    @contextlib.asynccontextmanager
    async def usage(self, snapshot: Snapshot, times: UsageTimes) -> AsyncIterator[None]:
        preference = type("Reading", (), {"read": staticmethod(self.take)})()
        made = Usage(self.kubelet, cast(Preference, preference), Latest(snapshot), cast(Ledger, self.books), times)
        running = asyncio.create_task(made.run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


QUICK = UsageTimes(settle=0.0, pause=0.0)


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def test_a_kubelet_that_is_away_is_asked_at_the_next_change(scene: Scene) -> None:
    scene.kubelet.is_away = True
    async with scene.usage(node(), QUICK):
        await until(lambda: scene.kubelet.asked == 1)
        scene.kubelet.is_away, scene.kubelet.now = False, 107.0
        await asyncio.sleep(0.01)
        scene.books.change()
        await until(lambda: scene.heard == [("pod-2", 107.0)])


async def test_what_somebody_else_asked_after_a_change_is_taken_in_and_kubelet_not_asked_again(scene: Scene) -> None:
    async with scene.usage(node(), UsageTimes(settle=0.2, pause=0.0)):
        await until(lambda: len(scene.heard) == 1)
        await asyncio.sleep(0.01)
        scene.books.change()
        await asyncio.sleep(0.01)
        scene.kubelet.now += 2 * SHOWN_SECONDS
        await scene.kubelet.listing()
        await until(lambda: [name for name, _ in scene.heard] == ["pod-1", "pod-2"])
        await asyncio.sleep(0.4)
        assert scene.kubelet.asked == 2


async def test_an_answer_from_before_the_change_will_not_do(scene: Scene) -> None:
    async with scene.usage(node(), UsageTimes(settle=0.05, pause=0.0)):
        await until(lambda: len(scene.heard) == 1)
        scene.kubelet.now = 101.0
        await scene.kubelet.listing()
        scene.kubelet.now = 102.0
        scene.books.change()
        await until(lambda: scene.heard[-1] == ("pod-3", 102.0))


async def test_kubelet_is_not_asked_on_a_node_without_gpus(scene: Scene) -> None:
    async with scene.usage(Snapshot(), QUICK):
        scene.books.change()
        await asyncio.sleep(0.05)
        await scene.kubelet.listing()
        await asyncio.sleep(0.05)
        assert scene.kubelet.asked == 1
        assert scene.heard == []


async def test_kubelet_is_asked_now_and_then_for_what_other_plugins_give_out(scene: Scene) -> None:
    async with scene.usage(node(), UsageTimes(settle=0.0, pause=0.0, look=0.02)):
        await until(lambda: len(scene.heard) == 1)
        await asyncio.sleep(0.1)
        assert scene.kubelet.asked == 1  # by its clock no time has passed
        scene.kubelet.now = 200.0
        await until(lambda: len(scene.heard) == 2)
