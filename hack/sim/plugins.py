"""kubelet's side of the device plugin protocol: registration, streams, calls. Part of the stand-in.

One client per resource, as kubelet up to 1.36 keeps them, with the same fault: when the stream of
an older registration ends, it is the newest client that gets closed. Source: Kubernetes 1.36,
pkg/kubelet/cm/devicemanager/plugin/v1beta1.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc
import grpc.aio

from hack.sim.devices import AdmissionFailed, DeviceManager, Known
from proto.deviceplugin.v1beta1 import api_pb2, api_pb2_grpc

DIAL_SECONDS = 10.0
CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 16 << 20),
)

Context = grpc.aio.ServicerContext[object, object]
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """One call to or from a plugin, for tests and for the curious."""

    name: str
    resource_name: str
    ids: tuple[str, ...] = ()
    must_include: tuple[str, ...] = ()
    size: int = 0


class PluginClient:
    """One registered plugin: its connection and its stream."""

    def __init__(self, resource_name: str, socket: Path, record: Callable[[Call], None]) -> None:
        self.resource_name = resource_name
        self.socket = socket
        self.prefers = False
        self.needs_pre_start = False
        self._record = record
        self._channel = grpc.aio.insecure_channel(f"unix:{socket}", options=CHANNEL_OPTIONS)
        self._stub: api_pb2_grpc.DevicePluginAsyncStub = api_pb2_grpc.DevicePluginStub(self._channel)

    async def dial(self) -> None:
        """Connect and ask for the options. Raises AioRpcError."""
        self._record(Call("GetDevicePluginOptions", self.resource_name))
        options = await self._stub.GetDevicePluginOptions(api_pb2.Empty(), timeout=DIAL_SECONDS, wait_for_ready=True)
        self.prefers = options.get_preferred_allocation_available
        self.needs_pre_start = options.pre_start_required

    async def watch(self, update: Callable[[Iterable[api_pb2.Device]], None]) -> None:
        """Follow the plugin's list until the stream ends, for whatever reason."""
        self._record(Call("ListAndWatch", self.resource_name))
        try:
            async for answer in self._stub.ListAndWatch(api_pb2.Empty()):
                update(answer.devices)
        except grpc.aio.AioRpcError as error:
            log.info("the stream of %s ended: %s %s", self.resource_name, error.code().name, error.details())

    async def preferred(self, available: Iterable[str], must_include: Iterable[str], size: int) -> tuple[str, ...]:
        """Ask for a preference."""
        request = api_pb2.ContainerPreferredAllocationRequest(
            available_deviceIDs=available, must_include_deviceIDs=must_include, allocation_size=size
        )
        self._record(
            Call(
                "GetPreferredAllocation",
                self.resource_name,
                tuple(request.available_deviceIDs),
                tuple(request.must_include_deviceIDs),
                size,
            )
        )
        asked = api_pb2.PreferredAllocationRequest(container_requests=[request])
        answer = await _answered("GetPreferredAllocation", self._stub.GetPreferredAllocation(asked))
        return tuple(i for c in answer.container_responses[:1] for i in c.deviceIDs)

    async def allocate(self, ids: Iterable[str]) -> api_pb2.ContainerAllocateResponse:
        """Allocate for one container."""
        request = api_pb2.ContainerAllocateRequest(devices_ids=ids)
        self._record(Call("Allocate", self.resource_name, tuple(request.devices_ids)))
        asked = api_pb2.AllocateRequest(container_requests=[request])
        answer = await _answered("Allocate", self._stub.Allocate(asked))
        if len(answer.container_responses) != 1:
            raise AdmissionFailed(f"Allocate answered for {len(answer.container_responses)} containers, not for one")
        return answer.container_responses[0]

    async def pre_start(self, ids: Iterable[str]) -> None:
        """Announce the start of a container, if the plugin asked for that."""
        if not self.needs_pre_start:
            return
        self._record(Call("PreStartContainer", self.resource_name, tuple(ids)))
        await self._stub.PreStartContainer(api_pb2.PreStartContainerRequest(devices_ids=ids), timeout=30)

    async def close(self) -> None:
        """Close the connection, and with it the stream."""
        await self._channel.close(None)


async def _answered(name: str, call: Awaitable[T]) -> T:
    """Await a plugin's answer. Raises AdmissionFailed."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise AdmissionFailed(
            f"{name} failed due to rpc error: code = {error.code().name} desc = {error.details()}"
        ) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # Its stream has ended meanwhile, and so the connection was closed.
        raise AdmissionFailed(f"{name} failed due to rpc error: the connection is closing") from None


class Registry(api_pb2_grpc.RegistrationServicer):
    """Takes registrations and keeps the device manager's lists."""

    def __init__(self, folder: Path, devices: DeviceManager, changed: Callable[[], None]) -> None:
        self.calls: list[Call] = []
        """Everything that went over the wire, oldest first."""
        self.on_call: Callable[[Call], None] | None = None
        self._folder = folder
        self._devices = devices
        self._changed = changed
        self._clients: dict[str, PluginClient] = {}
        self._streams: set[asyncio.Task[None]] = set()

    def client(self, resource_name: str) -> PluginClient | None:
        """Return the client of a resource."""
        return self._clients.get(resource_name)

    async def Register(self, request: api_pb2.RegisterRequest, context: Context) -> api_pb2.Empty:
        name = request.resource_name
        self._record(Call("Register", name, (request.endpoint,)))
        if request.version != "v1beta1":
            await context.abort(grpc.StatusCode.UNKNOWN, f"requested API version {request.version} is not supported")
        if "/" not in name or name.split("/")[0].endswith("kubernetes.io"):
            await context.abort(grpc.StatusCode.UNKNOWN, f"the ResourceName {name!r} is invalid")
        client = PluginClient(name, self._folder / request.endpoint, self._record)
        try:
            await client.dial()
        except grpc.aio.AioRpcError as error:
            await client.close()
            await context.abort(grpc.StatusCode.UNKNOWN, f"failed to dial device plugin: {error.details()}")
        self._clients[name] = client
        known = self._devices.resources.setdefault(name, Known(plugin=client))
        known.plugin = client
        stream = asyncio.get_running_loop().create_task(self._follow(client), name=f"stream of {name}")
        self._streams.add(stream)
        stream.add_done_callback(self._streams.discard)
        return api_pb2.Empty()

    async def close(self) -> None:
        """Drop all plugins, as the death of kubelet does."""
        streams, self._streams = list(self._streams), set()
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            await client.close()

    async def _follow(self, client: PluginClient) -> None:
        name = client.resource_name

        def update(devices: Iterable[api_pb2.Device]) -> None:
            self._devices.update(name, devices)
            self._changed()

        await client.watch(update)
        self._record(Call("stream ended", name))
        newest = self._clients.pop(name, None)
        self._devices.stop(name)
        self._changed()
        await client.close()
        if newest is not None and newest is not client:
            log.warning("an older stream of %s ended: closing the newer one, as kubelet up to 1.36 does", name)
            await newest.close()

    def _record(self, call: Call) -> None:
        self.calls.append(call)
        if self.on_call is not None:
            self.on_call(call)
