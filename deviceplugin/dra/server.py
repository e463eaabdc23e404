"""kubelet's DRAPlugin service: its calls for claims in front, `Claims` behind.

Each claim of a call is worked on by a thread of its own, side by side, never two for one claim at once. A call has an
answer for each of its claims: kubelet fails the pod's whole call for one that is missing. kubelet gives a call up after
45 s; so the call answers before that for what is not done yet, and the thread goes on: the next call finds its work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

import grpc
import grpc.aio

from agent.errors import AgentError
from agent.model.allocation import ClaimRef
from deviceplugin.server import Context, Observe
from proto.dra.v1 import api_pb2
from proto.dra.v1beta1 import api_pb2 as v1beta1

BUDGET_SECONDS = 40.0
MOST_THREADS = 256
"""For each of the two calls: an Unprepare need not wait for Prepares that wait for its devices.

So many as a node has pods: those that wait for half a minute, doing nothing, must not keep out others that need not."""
KEPT_SECONDS = 60.0
"""How long a thread waits for the next claim."""

# They become parts of file names: a UID as Kubernetes makes them, or as another source of pods might.
_UID = re.compile(r"[0-9A-Za-z](?:[0-9A-Za-z-]{0,62}[0-9A-Za-z])?")
_NAME = re.compile(r"[0-9a-z](?:[0-9a-z.-]{0,251}[0-9a-z])?")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedDevice:
    """What kubelet is told of one device of a prepared claim."""

    request_names: tuple[str, ...]
    """Without their sub-requests; empty for all of the claim."""
    pool_name: str
    device_name: str
    cdi_device_ids: tuple[str, ...] = ()
    share_id: str = ""


class Claims(Protocol):
    """Carries out what kubelet wants with claims. Both block, each call on a thread of its own.

    What they raise of AgentError becomes the error of their claim; kubelet tries again.
    """

    def prepare(self, ref: ClaimRef) -> Sequence[PreparedDevice]:
        """Make a claim's devices ready for its containers. The same again for a claim that is prepared."""

    def unprepare(self, ref: ClaimRef) -> None:
        """Take back what prepare did. A claim that is unknown is no error."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What kubelet is told of one claim."""

    devices: tuple[PreparedDevice, ...] = ()
    error: str = ""


class _Threads:
    """Daemon threads, kept for a while for the next piece of work: the loop waits until one that starts has begun."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._idle = 0
        """How many wait for work that is not on its way to them yet."""
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def begin(self, work: Callable[[], None]) -> None:
        """Have it done on a thread of its own. It may not raise. Raises RuntimeError without a thread for it."""
        with self._guard:
            is_kept = self._idle > 0
            self._idle -= is_kept
        if is_kept:
            self._work.put(work)
        else:
            threading.Thread(target=self._live, args=(work,), name="claim", daemon=True).start()

    def _live(self, work: Callable[[], None]) -> None:
        while True:
            work()
            with self._guard:
                self._idle += 1
            while True:
                try:
                    work = self._work.get(timeout=KEPT_SECONDS)
                    break
                except Empty:
                    with self._guard:
                        if self._idle:
                            self._idle -= 1
                            return


class ClaimThreads:
    """Threads that work on claims, one at a time for each claim. Used on one event loop."""

    def __init__(self) -> None:
        self._under_way: dict[str, asyncio.Future[Answer]] = {}
        self._threads = _Threads()

    async def run(self, uid: str, room: asyncio.Semaphore, work: Callable[[], Answer]) -> Answer:
        """Do the work when there is room and nothing else is under way for the claim. Once begun, it is never left."""
        while True:
            while (before := self._under_way.get(uid)) is not None:
                await asyncio.wait((before,))
            await room.acquire()
            if uid not in self._under_way:
                break
            room.release()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Answer] = loop.create_future()
        self._under_way[uid] = done

        def finish(answer: Answer) -> None:
            del self._under_way[uid]
            room.release()
            done.set_result(answer)

        def carry_out() -> None:
            answer = work()
            with contextlib.suppress(RuntimeError):  # the loop has ended, and who waited with it
                loop.call_soon_threadsafe(finish, answer)

        try:
            self._threads.begin(carry_out)
        except RuntimeError as error:
            finish(Answer(error=f"the node has no thread left for it: {error}"))
        return await asyncio.shield(done)


class ClaimService:
    """Answers both versions of the service; their messages are the same on the wire."""

    def __init__(self, driver: str, claims: Claims, observe: Observe, budget: float = BUDGET_SECONDS) -> None:
        self._driver = driver
        self._claims = claims
        self._observe = observe
        self._budget = budget
        """Seconds for one call."""
        self._threads = ClaimThreads()
        self._preparing = asyncio.Semaphore(MOST_THREADS)
        self._unpreparing = asyncio.Semaphore(MOST_THREADS)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve both versions. kubelet skips the field that only the newer one has."""
        handlers = {
            "NodePrepareResources": grpc.unary_unary_rpc_method_handler(
                self.prepare,
                request_deserializer=api_pb2.NodePrepareResourcesRequest.FromString,
                response_serializer=api_pb2.NodePrepareResourcesResponse.SerializeToString,
            ),
            "NodeUnprepareResources": grpc.unary_unary_rpc_method_handler(
                self.unprepare,
                request_deserializer=api_pb2.NodeUnprepareResourcesRequest.FromString,
                response_serializer=api_pb2.NodeUnprepareResourcesResponse.SerializeToString,
            ),
        }
        for version in (api_pb2, v1beta1):
            name = version.DESCRIPTOR.services_by_name["DRAPlugin"].full_name
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))

    async def prepare(
        self, request: api_pb2.NodePrepareResourcesRequest, context: Context
    ) -> api_pb2.NodePrepareResourcesResponse:
        answers = await self._each(request.claims, self._preparing, self._prepared)
        return api_pb2.NodePrepareResourcesResponse(claims={uid: _prepared(a) for uid, a in answers.items()})

    async def unprepare(
        self, request: api_pb2.NodeUnprepareResourcesRequest, context: Context
    ) -> api_pb2.NodeUnprepareResourcesResponse:
        answers = await self._each(request.claims, self._unpreparing, self._unprepared)
        return api_pb2.NodeUnprepareResourcesResponse(
            claims={uid: api_pb2.NodeUnprepareResourceResponse(error=a.error) for uid, a in answers.items()}
        )

    async def _each(
        self, claims: Iterable[api_pb2.Claim], room: asyncio.Semaphore, work: Callable[[ClaimRef], Answer]
    ) -> Mapping[str, Answer]:
        refs = {claim.uid: ClaimRef(claim.uid, claim.namespace, claim.name) for claim in claims}
        answers = await asyncio.gather(*(self._in_time(ref, room, work) for ref in refs.values()))
        return dict(zip(refs, answers, strict=True))

    async def _in_time(self, ref: ClaimRef, room: asyncio.Semaphore, work: Callable[[ClaimRef], Answer]) -> Answer:
        if not is_usable(ref):
            return Answer(error=f"{ref!r} is no claim that Kubernetes could have: its names are not usable")
        try:
            async with asyncio.timeout(self._budget):
                return await self._threads.run(ref.uid, room, partial(work, ref))
        except TimeoutError:
            text = f"not done within {self._budget:g} s; what was begun goes on, and kubelet asks again"
            log.warning("claim %s: %s", ref, text)
            return Answer(error=text)

    def _prepared(self, ref: ClaimRef) -> Answer:
        return self._guarded("NodePrepareResources", ref, self._prepare)

    def _unprepared(self, ref: ClaimRef) -> Answer:
        return self._guarded("NodeUnprepareResources", ref, self._unprepare)

    def _prepare(self, ref: ClaimRef) -> Answer:
        answer = Answer(tuple(self._claims.prepare(ref)))
        log.info("prepared claim %s: %s", ref, ", ".join(device.device_name for device in answer.devices))
        return answer

    def _unprepare(self, ref: ClaimRef) -> Answer:
        self._claims.unprepare(ref)
        log.info("unprepared claim %s", ref)
        return Answer()

    def _guarded(self, operation: str, ref: ClaimRef, work: Callable[[ClaimRef], Answer]) -> Answer:
        """Work, and make an answer of what is raised: an error that nobody foresaw fails this one claim."""
        try:
            with self._observe(operation, self._driver):
                return work(ref)
        except AgentError as error:
            log.warning("%s failed for claim %s: %s", operation, ref, error)
            return Answer(error=str(error) or error.reason)
        except Exception as error:
            log.exception("%s failed unexpectedly for claim %s", operation, ref)
            return Answer(error=f"{type(error).__name__}: {error} (see the agent's log)")


def is_usable(ref: ClaimRef) -> bool:
    """Tell whether a claim's UID and names are such as Kubernetes makes: they become parts of file names."""
    return bool(_UID.fullmatch(ref.uid) and _NAME.fullmatch(ref.namespace) and _NAME.fullmatch(ref.name))


def _prepared(answer: Answer) -> api_pb2.NodePrepareResourceResponse:
    return api_pb2.NodePrepareResourceResponse(
        devices=[
            api_pb2.Device(
                request_names=device.request_names,
                pool_name=device.pool_name,
                device_name=device.device_name,
                cdi_device_ids=device.cdi_device_ids,
                share_id=device.share_id or None,
            )
            for device in answer.devices
        ],
        error=answer.error,
    )
