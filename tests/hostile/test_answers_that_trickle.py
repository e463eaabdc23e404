"""An API server sends its answers byte by byte, for ever: they fail in time, and neither healing nor Prepare stops."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agent.cluster.apiserver import CLAIM, CONNECT_SECONDS, POD, READ_SECONDS, ApiServer
from agent.cluster.claim_objects import ClaimObjects
from agent.edits.specs import Specs, file_of_claim
from agent.errors import Unavailable
from agent.model.allocation import ClaimRef
from agent.process.conditions import NO_ADD_NEEDS, NO_POD_NEEDS
from agent.reconcile.claims import NEW_SECONDS, Claims
from agent.reconcile.reconciler import OVERDUE_SECONDS
from agent.reconcile.view import View
from agent.state import Latest
from cni.pod_devices import ClaimReader as Reads
from tests.agent.reconcile.outside import Answers
from tests.agent.reconcile.scene import Scene
from tests.awaiting import until
from tests.hostile.answering import Asked, asking
from tests.node import claimed_vf, open_books, prepare

QUICK = 2.0
"""For a whole answer, in place of the agent's 15 s."""
ALL_IN_TIME = 60.0
"""Before this, an answer has failed on any machine. The trickle goes on for longer."""
KUBELET_SECONDS = 45.0
"""kubelet gives NodePrepareResources up after so long."""
FOR_EVER = 150.0


def trickle(asked: Asked, first: bytes, then: bytes) -> None:
    """Send bytes, then one more every now and then."""
    asked.wfile.write(first)
    until = time.monotonic() + FOR_EVER
    while time.monotonic() < until:
        asked.wfile.write(then)
        time.sleep(0.5)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
TRICKLES: dict[str, Callable[[Asked], None]] = {
    "status line": lambda asked: trickle(asked, b"", b"H"),
    "headers": lambda asked: trickle(asked, HEAD, b"x"),
    "interim answers": lambda asked: trickle(asked, b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "body": lambda asked: trickle(asked, HEAD + b"Content-Length: 100000\r\n\r\n", b" "),
    "chunks": lambda asked: trickle(asked, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
}
TRICKLES["watch"] = TRICKLES["chunks"]


@contextlib.contextmanager
def fails_in_time() -> Iterator[None]:
    began = time.monotonic()
    with pytest.raises(Unavailable):
        yield
    assert time.monotonic() - began < ALL_IN_TIME


def test_an_answer_fails_in_time_whatever_of_it_trickles(tmp_path: Path) -> None:
    """All kinds and a watch at once: each takes its whole time."""

    def fails(kind: str) -> float:
        folder = tmp_path / kind.replace(" ", "-")
        folder.mkdir()
        with asking(folder, TRICKLES[kind], read_seconds=QUICK) as api:
            began = time.monotonic()
            with pytest.raises(Unavailable):
                list(api.watch(POD, {}, "1", 0)) if kind == "watch" else api.current(CLAIM.within("default"), "nics")
            return time.monotonic() - began

    with ThreadPoolExecutor(len(TRICKLES)) as threads:
        took = [threads.submit(fails, kind) for kind in TRICKLES]
        for kind, each in zip(TRICKLES, took, strict=True):
            assert each.result(FOR_EVER) < ALL_IN_TIME, kind


def test_an_answer_that_comes_slowly_and_in_time_is_read(tmp_path: Path) -> None:
    def slowly(asked: Asked) -> None:
        body = b'{"metadata": {"uid": "u", "namespace": "default"}}'
        asked.wfile.write(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode())
        for byte in body:
            asked.wfile.write(bytes([byte]))
            time.sleep(0.02)

    with asking(tmp_path, slowly) as api:
        for _ in range(2):
            assert ClaimObjects(lambda: api, "n").get(ClaimRef("u", "default", "nics")) is not None


def test_while_all_turns_are_taken_by_trickles_others_are_told_in_time_and_served_after(tmp_path: Path) -> None:
    def answer(asked: Asked) -> None:
        if "trickle" in asked.path:
            TRICKLES["body"](asked)
        else:
            asked.send(b'{"metadata": {"uid": "u", "namespace": "default"}}')

    def ask(api: ApiServer, name: str) -> Any:
        return ClaimObjects(lambda: api, "n").get(ClaimRef("u", "default", name))

    with asking(tmp_path, answer, 2, QUICK) as api, ThreadPoolExecutor(2) as threads:
        stuck = [threads.submit(ask, api, f"trickle-{number}") for number in range(2)]
        time.sleep(0.5)
        with fails_in_time():
            for _ in range(2):  # a turn may become free while the first waits
                ask(api, "trickle-again")
        for each in stuck:
            assert isinstance(each.exception(FOR_EVER), Unavailable)
        assert ask(api, "healthy") is not None
    assert 2 * (CONNECT_SECONDS + READ_SECONDS) < KUBELET_SECONDS


def test_answers_that_trickle_stop_no_healing(tmp_path: Path) -> None:
    asked_for: list[str] = []

    def answer(asked: Asked) -> None:
        asked_for.append(asked.path)
        TRICKLES["body"](asked)

    with (
        asking(tmp_path, answer) as api,
        open_books(tmp_path, clock=lambda: time.time() - NEW_SECONDS - 60) as books,
    ):
        specs = Specs(books, tmp_path / "cdi")
        for number in range(3):
            specs.sync([file_of_claim(prepare(books, f"claim-{number}", claimed_vf(f"0000:3b:00.{number}")).ref.uid)])
        reader: Latest[Reads | None] = Latest(ClaimObjects(lambda: api, "n"))
        healer = Claims(books, specs, Answers(), reader)
        scene = Scene(books, others=[healer])

        async def rounds() -> None:
            running = asyncio.create_task(scene.reconciler.run(seconds=0.1))
            try:
                await until(lambda: len(scene.counted) > 3, ALL_IN_TIME)
                assert scene.reconciler.overdue(time.monotonic()) is None
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

        asyncio.run(rounds())
        assert len(asked_for) == 1, "one question that hangs tells of the next"


class Hanging:
    """A healer that does not come back before it is let go."""

    name = "slots"

    def __init__(self) -> None:
        self.began, self.go = threading.Event(), threading.Event()

    def heal(self, view: View) -> None:
        self.began.set()
        self.go.wait(FOR_EVER)


def test_healing_that_makes_no_round_for_minutes_is_a_condition_until_it_does(tmp_path: Path) -> None:
    hanging = Hanging()

    async def rounds(scene: Scene) -> None:
        overdue = scene.reconciler.overdue
        assert overdue(time.monotonic() + OVERDUE_SECONDS + 1) is None, "it has not begun"
        running = asyncio.create_task(scene.reconciler.run(seconds=0.1))
        try:
            await until(hanging.began.is_set)
            assert overdue(time.monotonic()) is None
            what = overdue(time.monotonic() + OVERDUE_SECONDS + 1)
            assert what is not None
            assert "slots" in what
            late = time.monotonic()
            hanging.go.set()
            await until(lambda: overdue(late + OVERDUE_SECONDS) is None)
        finally:
            hanging.go.set()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    with open_books(tmp_path) as books:
        asyncio.run(rounds(Scene(books, others=[hanging])))
    assert "reconciler" not in NO_POD_NEEDS, "the agent is not ready"
    assert "reconciler" in NO_ADD_NEEDS, "pods' networks are made as before"
