"""kubelet's DRAResourceHealth service: the health of all DRA devices, which kubelet shows in the status of their pods.

kubelet takes what it was told as UNKNOWN when that is older than its timeout, and when the stream ends it forgets all
without telling anybody. So the whole list is sent when it changes and three times in a timeout, and before a planned
end every device is told as UNKNOWN.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence

import grpc
import grpc.aio

from agent.model.health import Health, Reason, text_of
from agent.state import Latest, first
from deviceplugin.dra.devices import DraDevice
from deviceplugin.server import Context
from proto.drahealth.v1 import api_pb2
from proto.drahealth.v1alpha1 import api_pb2 as v1alpha1

TIMEOUT_SECONDS = 30
MOST_MESSAGE = 1024
"""Bytes of one message that kubelet takes."""
MOST_MESSAGES = 2 << 20
"""Bytes of all messages of one list: kubelet takes 4 MiB in all."""


Catalog = Latest[tuple[DraDevice, ...]]
"""All devices that the driver offers."""


class HealthService:
    """Streams what the catalog says, to whoever watches."""

    def __init__(
        self,
        pool: str,
        catalog: Catalog,
        timeout: int = TIMEOUT_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.open = 0
        """Streams that are open."""
        self._pool = pool
        self._catalog = catalog
        self._timeout = timeout
        """Seconds."""
        self._clock = clock
        """Seconds since the epoch."""
        self._ending = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve both versions: their messages are the same on the wire."""
        handlers = {
            "NodeWatchResources": grpc.unary_stream_rpc_method_handler(
                self.watch,
                request_deserializer=api_pb2.NodeWatchResourcesRequest.FromString,
                response_serializer=api_pb2.NodeWatchResourcesResponse.SerializeToString,
            )
        }
        for version in (api_pb2, v1alpha1):
            name = version.DESCRIPTOR.services_by_name["DRAResourceHealth"].full_name
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))

    async def end(self, seconds: float) -> None:
        """Tell all devices as UNKNOWN, then let the streams end. Waits so long for those who listen."""
        self._ending.set()
        await first(self._ended.wait(), seconds=seconds)

    async def watch(
        self, request: api_pb2.NodeWatchResourcesRequest, context: Context
    ) -> AsyncIterator[api_pb2.NodeWatchResourcesResponse]:
        self.open += 1
        self._ended.clear()
        try:
            devices = self._catalog.value
            while not self._ending.is_set():
                devices = self._catalog.value
                yield health_list(devices, self._pool, int(self._clock()), self._timeout)
                changed, ending = self._catalog.other_than(devices), self._ending.wait()
                await first(changed, ending, seconds=self._timeout / 3)
            yield unknown_list(devices, self._pool, int(self._clock()), self._timeout)
        finally:
            self.open -= 1
            if not self.open:
                self._ended.set()


def health_list(
    devices: Sequence[DraDevice], pool: str, now: int, timeout: int = TIMEOUT_SECONDS
) -> api_pb2.NodeWatchResourcesResponse:
    """Spell the health of all devices for kubelet. `now` is in seconds since the epoch."""
    most = min(MOST_MESSAGE, MOST_MESSAGES // max(1, len(devices)))
    answer = api_pb2.NodeWatchResourcesResponse()
    for device in devices:
        status, message = _status(device.health), _message(device.health, most)
        answer.devices.append(_spelled(device, pool, now, timeout, status, message))
    return answer


def unknown_list(
    devices: Sequence[DraDevice], pool: str, now: int, timeout: int = TIMEOUT_SECONDS
) -> api_pb2.NodeWatchResourcesResponse:
    """Spell that nobody knows the devices' health from now on."""
    text = "the agent has stopped: nobody looks after it until it is back"
    return api_pb2.NodeWatchResourcesResponse(
        devices=[_spelled(device, pool, now, timeout, api_pb2.UNKNOWN, text) for device in devices]
    )


def _status(health: Health) -> api_pb2.HealthStatus.ValueType:
    if health.healthy:
        return api_pb2.HEALTHY
    # The device may be as good as ever; it is the books that fail.
    return api_pb2.UNKNOWN if health.reason == Reason.BOOKS_UNWRITABLE else api_pb2.UNHEALTHY


def _message(health: Health, most: int) -> str:
    """Say why, within some bytes: kubelet cuts what is longer, maybe within a letter."""
    if health.healthy:
        return ""
    text = f"{health.reason}: {text_of(health.reason)}"
    return text.encode()[:most].decode(errors="ignore")


def _spelled(
    device: DraDevice, pool: str, now: int, timeout: int, status: api_pb2.HealthStatus.ValueType, message: str
) -> api_pb2.DeviceHealth:
    return api_pb2.DeviceHealth(
        device=api_pb2.DeviceIdentifier(pool_name=pool, device_name=device.name),
        health=status,
        last_updated_time=now,
        health_check_timeout_seconds=timeout,
        message=message,
    )
