"""One view of PodResources: which answer serves whom."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from agent.errors import Unavailable
from agent.kubelet.podresources import ContainerDevices, DeviceAssignment, Listing, PodDevices, PodResources
from agent.model.allocation import PodRef
from tests.awaiting import until

TRAINER = PodDevices(
    PodRef("default", "trainer"), (ContainerDevices("main", (DeviceAssignment("rdma/vf", ("vf-1", "vf-2")),)),)
)


class Kubelet(PodResources):
    """Is asked at times that the test says, and answers when it says."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"), clock=self.time)
        self.now = 100.0
        self.asked = 0
        self.answers = asyncio.Event()
        self.answers.set()
        self.is_away = False

    def time(self) -> float:
        return self.now

    async def list(self) -> tuple[PodDevices, ...]:
        self.asked += 1
        await self.answers.wait()
        if self.is_away:
            raise Unavailable("kubelet is away")
        return (TRAINER,)


async def test_an_answer_serves_whoever_wants_none_that_is_older() -> None:
    kubelet = Kubelet()
    first = await kubelet.listing()
    kubelet.now = 160.0
    assert await kubelet.listing(100.0) is first
    assert await kubelet.listing(99.0) is first
    assert kubelet.asked == 1
    second = await kubelet.listing(100.5)
    assert second.asked_at == 160.0
    kubelet.now = 160.1
    assert (await kubelet.listing()).asked_at == 160.1
    assert kubelet.asked == 3


async def crowd(kubelet: Kubelet) -> list[Coroutine[Any, Any, Listing]]:
    """Have one question in flight, and three that are asked a moment later."""
    kubelet.answers.clear()
    early = asyncio.create_task(kubelet.listing())
    await until(lambda: kubelet.asked == 1)
    kubelet.now = 101.0
    late = [asyncio.create_task(kubelet.listing()) for _ in range(3)]
    await asyncio.sleep(0)
    kubelet.now = 102.0
    kubelet.answers.set()
    return [_of(early), *map(_of, late)]


async def _of(task: asyncio.Task[Listing]) -> Listing:
    return await task


async def test_who_asks_while_kubelet_is_asked_already_shares_the_next_answer() -> None:
    kubelet = Kubelet()
    found = await asyncio.gather(*await crowd(kubelet))
    assert [listing.asked_at for listing in found] == [100.0, 102.0, 102.0, 102.0]
    assert kubelet.asked == 2


async def test_who_waits_with_others_for_a_kubelet_that_is_away_does_not_ask_it_once_more() -> None:
    kubelet = Kubelet()
    kubelet.is_away = True
    found = await asyncio.gather(*await crowd(kubelet), return_exceptions=True)
    assert all(isinstance(one, Unavailable) for one in found)
    assert kubelet.asked == 2
    kubelet.is_away, kubelet.now = False, 103.0
    assert (await kubelet.listing(60.0)).pods == (TRAINER,)


async def test_one_who_gives_up_takes_the_answer_from_nobody() -> None:
    kubelet = Kubelet()
    kubelet.answers.clear()
    impatient = asyncio.create_task(kubelet.listing())
    await until(lambda: kubelet.asked == 1)
    patient = asyncio.create_task(kubelet.listing(100.0))
    impatient.cancel()
    await until(lambda: kubelet.asked == 2)
    kubelet.answers.set()
    assert (await patient).pods == (TRAINER,)


async def test_who_follows_the_newest_answer_hears_what_others_asked() -> None:
    kubelet = Kubelet()
    before = kubelet.newest.value
    assert before.pods == ()
    following = asyncio.create_task(kubelet.newest.other_than(before))
    found = await kubelet.listing()
    assert await following is found
    assert found.names == {("default", "trainer")}
    assert found.containers == {"vf-1": "main", "vf-2": "main"}
