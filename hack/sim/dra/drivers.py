"""The DRA drivers that have registered: their connections, calls, health streams, and the end of their slices.

A driver may be registered several times, by endpoint; the newest that is connected is asked. When the last connection
has ended for a while, the driver's slices are wiped, unless it is back by then. Source: Kubernetes 1.36,
pkg/kubelet/cm/dra/plugin.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from hack.sim.dra.behaviour import Behaviour
from hack.sim.dra.claims import ClaimInfo
from proto.dra.v1 import api_pb2, api_pb2_grpc
from proto.dra.v1beta1 import api_pb2 as v1beta1
from proto.dra.v1beta1 import api_pb2_grpc as v1beta1_grpc
from proto.drahealth.v1alpha1 import api_pb2 as health_pb2
from proto.drahealth.v1alpha1 import api_pb2_grpc as health_grpc

CHANNEL_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
SERVICES = ("v1.DRAPlugin", "v1beta1.DRAPlugin")
"""Those that kubelet knows."""
log = logging.getLogger(__name__)


class CallFailed(Exception):
    """A driver did not answer, or not for all claims."""


class RegistrationRefused(Exception):
    """A plugin cannot be registered."""


@dataclass(frozen=True, slots=True)
class DraCall:
    """One call to a driver, for tests and for the curious."""

    name: str
    driver: str
    claims: tuple[str, ...] = ()
    """UIDs."""


Record = Callable[[DraCall], None]
Hear = Callable[[str, Iterable[health_pb2.DeviceHealth] | None], None]
"""Takes a driver's list; None when its stream has ended."""


class Client:
    """One registered instance of a driver."""

    def __init__(self, driver: str, endpoint: str, service: str, seconds: float, record: Record) -> None:
        self.driver = driver
        self.endpoint = endpoint
        self.service = service
        self.connected = False
        self.channel = grpc.aio.insecure_channel(f"unix:{endpoint}", options=CHANNEL_OPTIONS)
        self._seconds = seconds
        self._record = record

    async def prepare(self, claims: Sequence[ClaimInfo]) -> api_pb2.NodePrepareResourcesResponse:
        """Call NodePrepareResources. Raises CallFailed."""
        request = api_pb2.NodePrepareResourcesRequest(claims=_named(claims))
        answer = await self._call("NodePrepareResources", claims, request)
        return api_pb2.NodePrepareResourcesResponse.FromString(answer.SerializeToString())

    async def unprepare(self, claims: Sequence[ClaimInfo]) -> api_pb2.NodeUnprepareResourcesResponse:
        """Call NodeUnprepareResources. Raises CallFailed."""
        request = api_pb2.NodeUnprepareResourcesRequest(claims=_named(claims))
        answer = await self._call("NodeUnprepareResources", claims, request)
        return api_pb2.NodeUnprepareResourcesResponse.FromString(answer.SerializeToString())

    async def _call(self, name: str, claims: Sequence[ClaimInfo], request: Any) -> Any:
        """Call the version that was chosen; the messages are the same."""
        self._record(DraCall(name, self.driver, tuple(info.uid for info in claims)))
        if self.service == "v1.DRAPlugin":
            stub: Any = api_pb2_grpc.DRAPluginStub(self.channel)
        else:
            stub = v1beta1_grpc.DRAPluginStub(self.channel)
            request = getattr(v1beta1, type(request).__name__).FromString(request.SerializeToString())
        try:
            return await getattr(stub, name)(request, timeout=self._seconds)
        except grpc.aio.AioRpcError as error:
            raise CallFailed(f"{name}: rpc error: code = {error.code().name} desc = {error.details()}") from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise CallFailed(f"{name}: rpc error: the connection is closing") from None

    async def watch(self, hear: Hear) -> None:
        """Follow the driver's health until the stream ends, for whatever reason."""
        stub: health_grpc.DRAResourceHealthAsyncStub = health_grpc.DRAResourceHealthStub(self.channel)
        begun = False
        try:
            async for answer in stub.NodeWatchResources(health_pb2.NodeWatchResourcesRequest()):
                begun = True
                hear(self.driver, answer.devices)
        except grpc.aio.AioRpcError as error:
            log.info("no health of %s: %s %s", self.driver, error.code().name, error.details())
        if begun:
            hear(self.driver, None)


class Drivers:
    """All registered drivers."""

    def __init__(
        self, behaviour: Behaviour, wipe: Callable[[str], Awaitable[None]], hear: Hear, record: Record
    ) -> None:
        """`wipe` deletes the slices of a driver."""
        self._behaviour = behaviour
        self._wipe = wipe
        self._hear = hear
        self._record = record
        self._clients: dict[str, list[Client]] = {}
        """By driver, in the order in which they came."""
        self._tasks: dict[Client, tuple[asyncio.Task[None], ...]] = {}
        self._wipes: dict[str, asyncio.Task[None]] = {}

    def get(self, driver: str) -> Client | None:
        """Return whom to call: the newest that is connected, else the newest."""
        clients = self._clients.get(driver, [])
        return next((c for c in reversed(clients) if c.connected), clients[-1] if clients else None)

    def add(self, driver: str, endpoint: str, versions: Sequence[str]) -> None:
        """Register an instance. Raises RegistrationRefused."""
        service = next((v for v in versions if v in SERVICES), None)
        if service is None:
            raise RegistrationRefused(
                f"none of services supported by the plugin ({list(versions)}) are supported by the kubelet"
            )
        clients = self._clients.setdefault(driver, [])
        if any(client.endpoint == endpoint for client in clients):
            raise RegistrationRefused(f"endpoint {endpoint} already registered for DRA driver plugin {driver}")
        client = Client(driver, endpoint, service, self._behaviour.call, self._record)
        clients.append(client)
        loop = asyncio.get_running_loop()
        self._tasks[client] = (
            loop.create_task(self._follow(client), name=f"connection of {driver}"),
            loop.create_task(self._watch(client), name=f"health of {driver}"),
        )
        self._sync(driver)

    async def remove(self, driver: str, endpoint: str) -> None:
        """Forget an instance, whose registration socket is gone."""
        clients = self._clients.get(driver, [])
        for client in [c for c in clients if c.endpoint == endpoint]:
            clients.remove(client)
            await self._drop(client)
        if not clients:
            self._clients.pop(driver, None)
        self._sync(driver)

    async def close(self) -> None:
        """End all connections, as kubelet's death does. No slice is wiped."""
        wipes, self._wipes = list(self._wipes.values()), {}
        for wipe in wipes:
            wipe.cancel()
        await asyncio.gather(*wipes, return_exceptions=True)
        self._clients = {}
        for client in list(self._tasks):
            await self._drop(client)

    async def _drop(self, client: Client) -> None:
        client.connected = False
        tasks = self._tasks.pop(client)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.channel.close(None)

    async def _follow(self, client: Client) -> None:
        """Note whether it is connected, and keep trying when it is not."""
        while True:
            state = client.channel.get_state(try_to_connect=True)
            client.connected = state is grpc.ChannelConnectivity.READY
            self._sync(client.driver)
            await client.channel.wait_for_state_change(state)

    async def _watch(self, client: Client) -> None:
        while True:
            await client.watch(self._hear)
            await asyncio.sleep(self._behaviour.health_retry)

    def _sync(self, driver: str) -> None:
        """Plan the end of a driver's slices, or cancel it."""
        pending = self._wipes.get(driver)
        if any(client.connected for client in self._clients.get(driver, ())):
            if pending is not None:
                pending.cancel()
                del self._wipes[driver]
        elif pending is None:
            self._wipes[driver] = asyncio.get_running_loop().create_task(self._wipe_later(driver))

    async def _wipe_later(self, driver: str) -> None:
        await asyncio.sleep(self._behaviour.wipe)
        with contextlib.suppress(KeyError):
            del self._wipes[driver]
        await self._wipe(driver)


def _named(claims: Iterable[ClaimInfo]) -> list[api_pb2.Claim]:
    return [api_pb2.Claim(namespace=info.namespace, uid=info.uid, name=info.name) for info in claims]
