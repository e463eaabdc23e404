"""kubelet's calls for claims in front, `Preparer` behind; and the health of the driver's devices.

Each claim of a call is worked on by a thread of its own, side by side, never two for one claim at once. A call has an
answer for each of its claims: kubelet fails the pod's whole call for one that is missing. kubelet gives a call up after
45 s; so the call answers before that for what is not done yet, and the thread goes on: the next call finds its work.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import grpc.aio

from agent.errors import AgentError
from agent.model.allocation import ClaimRef, Hold
from agent.model.health import Health, Reason, text_of
from agent.model.unit_id import cdi_name
from agent.state import Latest, first
from deviceplugin.dra.devices import DraDevice
from deviceplugin.dra.preparer import Preparer
from deviceplugin.server import Context, Observe
from proto.dra.v1 import api_pb2
from proto.dra.v1beta1 import api_pb2 as v1beta1
from proto.drahealth.v1 import api_pb2 as health_pb2
from proto.drahealth.v1alpha1 import api_pb2 as v1alpha1

BUDGET_SECONDS = 40.0
MOST_THREADS = 256
"""For each of the two calls: an Unprepare need not wait for Prepares that wait for its devices.

So many as a node has pods: those that wait for half a minute, doing nothing, must not keep out others that need not."""
TIMEOUT_SECONDS = 30
MOST_MESSAGE = 1024
"""Bytes of one message that kubelet takes."""
MOST_MESSAGES = 2 << 20
"""Bytes of all messages of one list: kubelet takes 4 MiB in all."""

# They become parts of file names: a UID as Kubernetes makes them, or as another source of pods might.
_UID = re.compile(r"[0-9A-Za-z](?:[0-9A-Za-z-]{0,62}[0-9A-Za-z])?")
_NAME = re.compile(r"[0-9a-z](?:[0-9a-z.-]{0,251}[0-9a-z])?")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """What kubelet is told of one claim."""

    devices: tuple[Hold, ...] = ()
    error: str = ""


def add_generic(server: grpc.aio.Server, service: str, versions: Iterable[Any], handlers: dict[str, Any]) -> None:
    """Serve all versions of a service by the same handlers: their messages are the same on the wire."""
    for version in versions:
        name = version.DESCRIPTOR.services_by_name[service].full_name
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))


Failed = Callable[[ClaimRef, str, AgentError], None]
"""Hears of a claim that was not prepared, or not unprepared: the text says which of the two. On the claim's thread; it
must not block or raise."""


class ClaimThreads:
    """Has claims worked on by threads, one at a time for each claim. Used on one event loop."""

    def __init__(self) -> None:
        self._under_way: dict[str, asyncio.Future[Answer]] = {}

    async def run(self, uid: str, pool: ThreadPoolExecutor, work: Callable[[], Answer]) -> Answer:
        """Work when nothing else is under way for the claim. Once begun, it is never left. `work` must not raise."""
        while (before := self._under_way.get(uid)) is not None:
            await asyncio.wait((before,))
        begun: Future[Answer] = Future()

        def carry_out() -> None:
            if begun.set_running_or_notify_cancel():
                begun.set_result(work())

        done = self._under_way[uid] = asyncio.wrap_future(begun)
        done.add_done_callback(lambda _: self._under_way.pop(uid))
        try:
            pool.submit(carry_out)
        except RuntimeError as error:
            if begun.cancel():  # else a thread that is there has taken it
                return Answer(error=f"the node has no thread left for it: {error}")
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            begun.cancel()  # what has not begun is not done
            raise


class ClaimService:
    """Answers both versions of the service; their messages are the same on the wire."""

    def __init__(
        self,
        driver: str,
        claims: Preparer,
        observe: Observe,
        failed: Failed,
        budget: float = BUDGET_SECONDS,
    ) -> None:
        self._driver = driver
        self._claims = claims
        self._observe = observe
        self._failed = failed
        self._budget = budget
        """Seconds for one call."""
        self._threads = ClaimThreads()
        self._preparing = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="prepare")
        self._unpreparing = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="unprepare")

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
        add_generic(server, "DRAPlugin", (api_pb2, v1beta1), handlers)

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
        self, claims: Iterable[api_pb2.Claim], pool: ThreadPoolExecutor, work: Callable[[ClaimRef], Answer]
    ) -> Mapping[str, Answer]:
        refs = {claim.uid: ClaimRef(claim.uid, claim.namespace, claim.name) for claim in claims}
        answers = await asyncio.gather(*(self._in_time(ref, pool, work) for ref in refs.values()))
        return dict(zip(refs, answers, strict=True))

    async def _in_time(self, ref: ClaimRef, pool: ThreadPoolExecutor, work: Callable[[ClaimRef], Answer]) -> Answer:
        if not is_usable(ref):
            return Answer(error=f"{ref!r} is no claim that Kubernetes could have: its names are not usable")
        try:
            async with asyncio.timeout(self._budget):
                return await self._threads.run(ref.uid, pool, partial(work, ref))
        except TimeoutError:
            text = f"not done within {self._budget:g} s; what was begun goes on, and kubelet asks again"
            log.warning("claim %s: %s", ref, text)
            return Answer(error=text)

    def _prepared(self, ref: ClaimRef) -> Answer:
        return self._guarded("NodePrepareResources", ref, self._prepare, "not prepared")

    def _unprepared(self, ref: ClaimRef) -> Answer:
        return self._guarded("NodeUnprepareResources", ref, self._unprepare, "not unprepared")

    def _prepare(self, ref: ClaimRef) -> Answer:
        answer = Answer(tuple(self._claims.prepare(ref)))
        log.info("prepared claim %s: %s", ref, ", ".join(device.device_name for device in answer.devices))
        return answer

    def _unprepare(self, ref: ClaimRef) -> Answer:
        self._claims.unprepare(ref)
        log.info("unprepared claim %s", ref)
        return Answer()

    def _guarded(self, operation: str, ref: ClaimRef, work: Callable[[ClaimRef], Answer], what: str) -> Answer:
        """Work, and make an answer of what is raised: an error that nobody foresaw fails this one claim."""
        try:
            with self._observe(operation, self._driver):
                return work(ref)
        except AgentError as error:
            log.warning("%s failed for claim %s: %s", operation, ref, error)
            self._failed(ref, what, error)
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
                request_names=[device.request],
                pool_name=device.pool,
                device_name=device.device_name,
                cdi_device_ids=[cdi_name(device.spec.kind, device.key)] if device.spec is not None else (),
                share_id=device.share_id or None,
            )
            for device in answer.devices
        ],
        error=answer.error,
    )


Catalog = Latest[tuple[DraDevice, ...]]
"""All devices that the driver offers."""


class HealthService:
    """kubelet's DRAResourceHealth service: the health of all devices, which kubelet shows in the status of their pods.

    kubelet takes what it has as UNKNOWN when that is older than its timeout, and when the stream ends it forgets all
    without a word. So the whole list is sent when it changes and three times in a timeout, and before a planned end
    every device is sent as UNKNOWN.
    """

    def __init__(
        self,
        pool: str,
        catalog: Catalog,
        timeout: int = TIMEOUT_SECONDS,
    ) -> None:
        self.open = 0
        """Streams that are open."""
        self._pool = pool
        self._catalog = catalog
        self._timeout = timeout
        """Seconds."""
        self._ending = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve both versions."""
        handlers = {
            "NodeWatchResources": grpc.unary_stream_rpc_method_handler(
                self.watch,
                request_deserializer=health_pb2.NodeWatchResourcesRequest.FromString,
                response_serializer=health_pb2.NodeWatchResourcesResponse.SerializeToString,
            )
        }
        add_generic(server, "DRAResourceHealth", (health_pb2, v1alpha1), handlers)

    async def end(self, seconds: float) -> None:
        """Tell all devices as UNKNOWN, then let the streams end. Waits so long for those who listen."""
        self._ending.set()
        await first(self._ended.wait(), seconds=seconds)

    async def watch(
        self, request: health_pb2.NodeWatchResourcesRequest, context: Context
    ) -> AsyncIterator[health_pb2.NodeWatchResourcesResponse]:
        self.open += 1
        self._ended.clear()
        try:
            devices = self._catalog.value
            while not self._ending.is_set():
                devices = self._catalog.value
                yield health_list(devices, self._pool, int(time.time()), self._timeout)
                changed, ending = self._catalog.other_than(devices), self._ending.wait()
                await first(changed, ending, seconds=self._timeout / 3)
            yield unknown_list(devices, self._pool, int(time.time()), self._timeout)
        finally:
            self.open -= 1
            if not self.open:
                self._ended.set()


def health_list(
    devices: Sequence[DraDevice], pool: str, now: int, timeout: int = TIMEOUT_SECONDS
) -> health_pb2.NodeWatchResourcesResponse:
    """Spell the health of all devices for kubelet. `now` is in seconds since the epoch."""
    most = min(MOST_MESSAGE, MOST_MESSAGES // max(1, len(devices)))
    answer = health_pb2.NodeWatchResourcesResponse()
    for device in devices:
        status, message = _health_status(device.health), _health_message(device.health, most)
        answer.devices.append(_health_of(device, pool, now, timeout, status, message))
    return answer


def unknown_list(
    devices: Sequence[DraDevice], pool: str, now: int, timeout: int = TIMEOUT_SECONDS
) -> health_pb2.NodeWatchResourcesResponse:
    """Spell that nobody knows the devices' health from now on."""
    text = "the agent has stopped: nobody looks after it until it is back"
    return health_pb2.NodeWatchResourcesResponse(
        devices=[_health_of(device, pool, now, timeout, health_pb2.UNKNOWN, text) for device in devices]
    )


def _health_status(health: Health) -> health_pb2.HealthStatus.ValueType:
    if health.healthy:
        return health_pb2.HEALTHY
    # The device may be as good as ever; it is the books that fail.
    return health_pb2.UNKNOWN if health.reason == Reason.BOOKS_UNWRITABLE else health_pb2.UNHEALTHY


def _health_message(health: Health, most: int) -> str:
    """Say why, within some bytes: kubelet cuts what is longer, maybe within a letter."""
    if health.healthy:
        return ""
    text = f"{health.reason}: {text_of(health.reason)}"
    return text.encode()[:most].decode(errors="ignore")


def _health_of(
    device: DraDevice, pool: str, now: int, timeout: int, status: health_pb2.HealthStatus.ValueType, message: str
) -> health_pb2.DeviceHealth:
    return health_pb2.DeviceHealth(
        device=health_pb2.DeviceIdentifier(pool_name=pool, device_name=device.name),
        health=status,
        last_updated_time=now,
        health_check_timeout_seconds=timeout,
        message=message,
    )
