"""The pods of new grants are learnt soon."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from agent.errors import Unavailable
from agent.kubelet.podresources import HeldUnit
from agent.ledger import Ledger
from agent.model.allocation import PodRef
from agent.reconcile.grants import OWNER_PAUSES, Owners
from cni.pods_file import PodsFile
from tests.agent.reconcile.outside import Answers
from tests.awaiting import until
from tests.node import VF, granted, open_books

TRAINER, WEB = PodRef("default", "trainer"), PodRef("shop", "web")
OTHER = "0000:3b:00.3"


def follow(books: Ledger, told: Sequence[Sequence[HeldUnit] | None], enough: int) -> tuple[int, list[tuple[str, str]]]:
    """Follow the grants while kubelet tells this, the last again and again; return how often it was asked.

    None is no answer. Ends once it was asked often enough, and nobody is looked for any more.
    """
    asked = 0
    counted: list[tuple[str, str]] = []

    class Unknown:
        @property
        def has_unknown(self) -> bool:
            return any(hold.pod is None for hold in books.holds())

    async def work() -> None:
        answers = itertools.chain(told, itertools.repeat(told[-1]))

        async def held_units() -> Sequence[HeldUnit]:
            nonlocal asked
            asked += 1
            if (found := next(answers)) is None:
                raise Unavailable("kubelet starts")
            return found

        outside = Answers(dict, held_units=held_units)
        following = asyncio.create_task(Owners(books, cast(PodsFile, Unknown()), outside, pauses=(0.0, 0.0, 0.0)).run())
        await until(lambda: asked >= enough)
        for _ in range(20):
            await asyncio.sleep(0.01)
        following.cancel()
        counted.extend(outside.counted)

    asyncio.run(work())
    return asked, counted


def test_a_grants_pod_is_named_when_kubelet_tells_it(books: Ledger) -> None:
    books.grant(granted("rdma/vf", {VF: VF, OTHER: OTHER}))
    held_units = [HeldUnit(TRAINER, "rdma/vf", VF), HeldUnit(TRAINER, "rdma/vf", OTHER), HeldUnit(WEB, "a/b", "c")]
    asked, counted = follow(books, [None, (), held_units], 3)
    assert (asked, counted) == (3, [("grant-bind", "claimed")])
    assert [hold.pod for hold in books.holds()] == [TRAINER, TRAINER]


def test_kubelet_is_asked_a_few_times_and_no_grant_ends_by_that(tmp_path: Path) -> None:
    with open_books(tmp_path, clock=lambda: 1.0) as books:
        books.grant(granted("rdma/vf", {VF: VF}))
        assert follow(books, [()], len(OWNER_PAUSES)) == (len(OWNER_PAUSES), [])
        assert [hold.pod for hold in books.holds()] == [None]


def test_what_was_granted_after_kubelet_was_asked_is_nobodys_yet(tmp_path: Path) -> None:
    with open_books(tmp_path, clock=lambda: math.inf) as books:
        books.grant(granted("rdma/vf", {VF: VF}))
        follow(books, [[HeldUnit(WEB, "rdma/vf", VF)]], len(OWNER_PAUSES))
        assert [hold.pod for hold in books.holds()] == [None]
