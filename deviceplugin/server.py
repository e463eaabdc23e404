"""kubelet's DevicePlugin service for one resource: gRPC in front, our values behind.

Owns the translation between both and the table from our errors to gRPC statuses. An exception that
nobody foresaw fails its one request, with a traceback in the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import grpc
import grpc.aio

from agent.edits.cdi import ContainerEdits
from agent.errors import AgentError, AllocationError, LedgerError, UnitUnhealthy, UnknownUnit
from agent.model.device import NO_NUMA_NODE
from agent.offer.offer import Unit
from agent.state import Latest, first
from deviceplugin.allocation import Allocator
from proto.deviceplugin.v1beta1 import api_pb2, api_pb2_grpc

Observe = Callable[[str, str], AbstractContextManager[object]]
"""Times one operation of one resource, both named by its arguments; sees the exception when it fails."""
T = TypeVar("T")
Context = grpc.aio.ServicerContext[object, object]

log = logging.getLogger(__name__)

STATUS = (
    (UnknownUnit, grpc.StatusCode.NOT_FOUND),
    (UnitUnhealthy, grpc.StatusCode.FAILED_PRECONDITION),
    (AllocationError, grpc.StatusCode.FAILED_PRECONDITION),
    (LedgerError, grpc.StatusCode.UNAVAILABLE),
)


def unobserved(_operation: str, _resource: str) -> AbstractContextManager[object]:
    """Observe nothing."""
    return nullcontext()


Units = Latest[tuple[Unit, ...]]
"""The newest list of one resource's units."""


def post(units: Units, newer: tuple[Unit, ...]) -> None:
    """Replace a list if kubelet would read something else in the newer one: a slot that is bound changes nothing."""
    if list(map(_as_listed, newer)) != list(map(_as_listed, units.value)):
        units.set(newer)


def _as_listed(unit: Unit) -> tuple[str, bool, int]:
    return unit.unit_id, unit.health.healthy, unit.numa_node


class ResourceService(api_pb2_grpc.DevicePluginServicer):
    """Serves one resource on one socket. Made again whenever the socket is."""

    def __init__(self, resource_name: str, units: Units, allocator: Allocator, observe: Observe) -> None:
        self.resource_name = resource_name
        self.has_had_stream = False
        self.open_streams = 0
        """Those of ListAndWatch."""
        self.stream_changed = asyncio.Event()
        """Set when a stream begins or ends; whoever waits clears it."""
        self._units = units
        self._allocator = allocator
        self._observe = observe
        self._ending = asyncio.Event()

    def end_streams(self) -> None:
        """Let the open streams end by themselves: one that is cut off leaves a traceback."""
        self._ending.set()
        self.stream_changed.set()

    async def GetDevicePluginOptions(self, request: api_pb2.Empty, context: Context) -> api_pb2.DevicePluginOptions:
        return api_pb2.DevicePluginOptions(pre_start_required=False, get_preferred_allocation_available=True)

    async def ListAndWatch(
        self, request: api_pb2.Empty, context: Context
    ) -> AsyncIterator[api_pb2.ListAndWatchResponse]:
        self._count(1)
        try:
            while not self._ending.is_set():
                units = self._units.value
                yield list_message(units)
                await first(self._units.other_than(units), self._ending.wait())
        finally:
            self._count(-1)

    async def GetPreferredAllocation(
        self, request: api_pb2.PreferredAllocationRequest, context: Context
    ) -> api_pb2.PreferredAllocationResponse:
        return await self._answer("GetPreferredAllocation", context, self._prefer(request))

    async def Allocate(self, request: api_pb2.AllocateRequest, context: Context) -> api_pb2.AllocateResponse:
        return await self._answer("Allocate", context, self._allocate(request))

    async def PreStartContainer(
        self, request: api_pb2.PreStartContainerRequest, context: Context
    ) -> api_pb2.PreStartContainerResponse:
        return api_pb2.PreStartContainerResponse()

    def _count(self, more: int) -> None:
        self.has_had_stream = True
        self.open_streams += more
        self.stream_changed.set()

    async def _prefer(self, request: api_pb2.PreferredAllocationRequest) -> api_pb2.PreferredAllocationResponse:
        return api_pb2.PreferredAllocationResponse(
            container_responses=[
                api_pb2.ContainerPreferredAllocationResponse(
                    deviceIDs=self._allocator.prefer(
                        self.resource_name, c.available_deviceIDs, c.must_include_deviceIDs, c.allocation_size
                    )
                )
                for c in request.container_requests
            ]
        )

    async def _allocate(self, request: api_pb2.AllocateRequest) -> api_pb2.AllocateResponse:
        containers = [tuple(c.devices_ids) for c in request.container_requests]
        answers = await self._allocator.allocate(self.resource_name, containers)
        log.info("granted %s", containers, extra={"resource": self.resource_name})
        return api_pb2.AllocateResponse(container_responses=[edits_message(a) for a in answers])

    async def _answer(self, operation: str, context: Context, work: Awaitable[T]) -> T:
        try:
            with self._observe(operation, self.resource_name):
                return await work
        except AgentError as error:
            log.warning("%s failed: %s", operation, error, extra={"resource": self.resource_name})
            code = next((c for kind, c in STATUS if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
            await context.abort(code, f"{error.reason}: {error}")
        except Exception as error:
            log.exception("%s failed unexpectedly", operation, extra={"resource": self.resource_name})
            await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error} (see the agent's log)")


def list_message(units: tuple[Unit, ...]) -> api_pb2.ListAndWatchResponse:
    """Spell a full list for kubelet. A device whose NUMA node is unknown has no topology."""
    return api_pb2.ListAndWatchResponse(
        devices=[
            api_pb2.Device(
                ID=unit.unit_id,
                health="Healthy" if unit.health.healthy else "Unhealthy",
                topology=None
                if unit.numa_node == NO_NUMA_NODE
                else api_pb2.TopologyInfo(nodes=[api_pb2.NUMANode(ID=unit.numa_node)]),
            )
            for unit in units
        ]
    )


def edits_message(grants: ContainerEdits) -> api_pb2.ContainerAllocateResponse:
    """Spell what a container gets for kubelet."""
    return api_pb2.ContainerAllocateResponse(
        envs=dict(grants.envs),
        devices=[
            api_pb2.DeviceSpec(container_path=d.path, host_path=d.host_path or d.path, permissions=d.permissions)
            for d in grants.devices
        ],
        cdi_devices=[api_pb2.CDIDevice(name=name) for name in grants.cdi_devices],
        annotations=dict(grants.annotations),
        mounts=[api_pb2.Mount(container_path=m.path, host_path=m.host_path, read_only=True) for m in grants.mounts],
    )
