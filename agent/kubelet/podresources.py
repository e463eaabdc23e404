"""kubelet's PodResources service: which pod holds which units.

The service names pods by namespace and name only, knows no UID and offers no watch. It answers
from memory, so a short time limit tells a dead kubelet from a live one.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import grpc
import grpc.aio

from agent.errors import Unavailable
from agent.kubelet import checkpoint
from agent.model.allocation import PodRef
from agent.state import Latest
from proto.podresources.v1 import api_pb2, api_pb2_grpc

if TYPE_CHECKING:
    from agent.kubelet.cri import ContainerRuntime, Sandbox

MAX_MESSAGE_BYTES = 16 << 20
ANSWER_SECONDS = 5.0
"""How long a thread waits for kubelet, or the runtime."""
MAX_ASKING = 64
"""So many calls wait for kubelet at once."""
FIRST_RETRY_SECONDS = 0.02

CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # kubelet restarts; without these the channel would soon wait up to two minutes to try again.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DeviceAssignment:
    """Units of one resource. kubelet sends one per unit, or one for several with the same topology."""

    resource_name: str
    device_ids: tuple[str, ...]
    numa_nodes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryBlock:
    memory_type: str
    """memory, hugepages-2Mi, hugepages-1Gi"""
    size: int
    numa_nodes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ClaimedDevice:
    """A device that a container has by a DRA claim."""

    namespace: str
    claim: str
    """Name of the claim. kubelet does not say its UID."""
    driver: str
    pool: str
    device_name: str
    cdi_names: tuple[str, ...] = ()
    """With their kind."""
    share_id: str = ""


@dataclass(frozen=True, slots=True)
class ContainerDevices:
    name: str
    devices: tuple[DeviceAssignment, ...] = ()
    cpu_ids: tuple[int, ...] = ()
    memory: tuple[MemoryBlock, ...] = ()
    claimed: tuple[ClaimedDevice, ...] = ()

    @property
    def units(self) -> tuple[tuple[str, str], ...]:
        """List resource name and ID of the container's units."""
        return tuple((d.resource_name, i) for d in self.devices for i in d.device_ids)

    @property
    def numa_nodes(self) -> Mapping[tuple[str, str], int]:
        """Map resource name and ID of units to their NUMA node, as far as their plugins reported one to kubelet."""
        return {
            (d.resource_name, i): d.numa_nodes[0] for d in self.devices if len(d.numa_nodes) == 1 for i in d.device_ids
        }

    def device_ids(self, resource_name: str) -> tuple[str, ...]:
        """List the container's units of a resource."""
        return tuple(i for d in self.devices if d.resource_name == resource_name for i in d.device_ids)


@dataclass(frozen=True, slots=True)
class PodDevices:
    """What kubelet gave to the app containers of one pod. An init container's units and claims are not listed."""

    pod: PodRef
    containers: tuple[ContainerDevices, ...] = ()
    cpu_ids: tuple[int, ...] = ()
    """Owned by the pod as a whole (pod-level resources), besides those of single containers."""
    memory: tuple[MemoryBlock, ...] = ()
    """Likewise."""

    @property
    def claimed(self) -> tuple[ClaimedDevice, ...]:
        """List what the pod's containers have by DRA claims, container after container."""
        return tuple(dict.fromkeys(device for c in self.containers for device in c.claimed))

    def device_ids(self, resource_name: str) -> tuple[str, ...]:
        """List the pod's units of a resource, container after container."""
        return tuple(dict.fromkeys(i for c in self.containers for i in c.device_ids(resource_name)))

    @property
    def all_device_ids(self) -> tuple[str, ...]:
        """List the pod's units of all resources, container after container."""
        return tuple(dict.fromkeys(i for c in self.containers for d in c.devices for i in d.device_ids))


@dataclass(frozen=True, slots=True)
class HeldUnit:
    """What kubelet says that a pod holds."""

    pod: PodRef
    resource_name: str
    unit_id: str
    container: str = ""
    """Its container that has the unit."""


def held_units(pods: Iterable[PodDevices]) -> tuple[HeldUnit, ...]:
    """List all that kubelet listed, one for each unit and container that has it."""
    return tuple(
        HeldUnit(pod.pod, device.resource_name, unit, container.name)
        for pod in pods
        for container in pod.containers
        for device in container.devices
        for unit in device.device_ids
    )


@dataclass(frozen=True)
class Listing:
    """What every pod of the node holds, by one answer of kubelet's."""

    asked_at: float
    """When it was asked for, by `PodResources.clock`: what has changed since may or may not be in it."""
    pods: tuple[PodDevices, ...] = ()

    @cached_property
    def names(self) -> frozenset[tuple[str, str]]:
        """Namespace and name of all pods, whatever they hold."""
        return frozenset(found.pod.names for found in self.pods)

    @cached_property
    def containers(self) -> Mapping[str, str]:
        """Unit → the container that has it. An init container's units are not listed."""
        return {held.unit_id: held.container for held in held_units(self.pods)}


@dataclass(frozen=True, slots=True)
class Allocatable:
    """What kubelet could give to pods, used or not: healthy devices, CPUs, memory."""

    devices: tuple[DeviceAssignment, ...] = ()
    cpu_ids: tuple[int, ...] = ()
    memory: tuple[MemoryBlock, ...] = ()


class PodResources:
    """A client that connects at the first call and again whenever it must."""

    def __init__(self, socket: Path, timeout: float = 2.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.socket = socket
        self.timeout = timeout
        self.clock = clock
        self.newest = Latest(Listing(-math.inf))
        """The newest answer about all pods; one without pods, asked for at no time, before the first."""
        self._asking = asyncio.Lock()
        """Held while all pods are asked for."""
        self._refused_at = -math.inf
        """When the last question about all pods was asked that had no answer."""
        self._channel: grpc.aio.Channel | None = None
        self._knows_get = True
        self.problem: str | None = None
        """Why the last call had no answer; None if it had one."""

    @classmethod
    def of_kubelet(cls, kubelet_dir: Path, timeout: float = 2.0) -> PodResources:
        """Make a client for the kubelet of this folder."""
        return cls(kubelet_dir / "pod-resources" / "kubelet.sock", timeout)

    @property
    def folder(self) -> Path:
        """kubelet's own folder."""
        return self.socket.parent.parent

    async def close(self) -> None:
        """Close the connection."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)

    async def get(self, pod: PodRef) -> PodDevices | None:
        """Return what one pod holds; None for a pod that kubelet does not know.

        Asks for the list where kubelet has no such call (before 1.27, or switched off).
        Raises Unavailable.
        """
        if self._knows_get:
            request = api_pb2.GetPodResourcesRequest(pod_name=pod.name, pod_namespace=pod.namespace)
            try:
                answer = await self._call("Get", lambda stub, left: stub.Get(request, timeout=left))
                return _pod_devices(answer.pod_resources, pod.uid)
            except _Refused as refused:
                if refused.means_not_found:
                    return None
                if not refused.means_no_such_call:
                    raise
                self._knows_get = False
        found = next((p for p in (await self.listing()).pods if p.pod.names == pod.names), None)
        return PodDevices(pod, found.containers) if found else None

    async def listing(self, not_before: float | None = None) -> Listing:
        """Return what all pods hold, not older than a moment by `clock`: than this call, if none is given.

        The one rule of staleness: an answer is as old as its question, and serves whoever wants none that is older. So
        the newest one is looked at, then the one that is being waited for; only where neither will do is kubelet asked,
        once for all who wait. Who follows `newest` has every answer that anybody got. Raises Unavailable, also where
        somebody else asked meanwhile in vain.
        """
        called_at = self.clock()
        wanted = called_at if not_before is None else not_before
        async with self._asking:
            if self.newest.value.asked_at >= wanted:
                return self.newest.value
            if self._refused_at >= called_at:
                raise Unavailable(self.problem or f"kubelet's PodResources.List on {self.socket} failed a moment ago")
            asked_at = self.clock()
            try:
                found = Listing(asked_at, await self.list())
            except Unavailable:
                self._refused_at = asked_at
                raise
            self.newest.set(found)
            return found

    async def list(self) -> tuple[PodDevices, ...]:
        """Ask what every pod of the node holds. Raises Unavailable. Readers take `listing`."""
        request = api_pb2.ListPodResourcesRequest()
        answer = await self._call("List", lambda stub, left: stub.List(request, timeout=left))
        return tuple(_pod_devices(p) for p in answer.pod_resources)

    async def allocatable(self) -> Allocatable:
        """Return what kubelet could give to pods. Raises Unavailable."""
        request = api_pb2.AllocatableResourcesRequest()
        answer = await self._call(
            "GetAllocatableResources", lambda stub, left: stub.GetAllocatableResources(request, timeout=left)
        )
        return Allocatable(
            tuple(_assignment(d) for d in answer.devices), tuple(answer.cpu_ids), tuple(map(_memory, answer.memory))
        )

    async def _call(
        self, name: str, call: Callable[[api_pb2_grpc.PodResourcesListerAsyncStub, float], Awaitable[T]]
    ) -> T:
        """Call within the time limit. Tries again where kubelet limits the rate or has just restarted.

        Raises Unavailable; `_Refused`, which is one, if kubelet answered with an error.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self.timeout
        wait = FIRST_RETRY_SECONDS
        lost = False
        while True:
            try:
                answer = await call(self._stub(), max(until - loop.time(), 0.001))
                self.problem = None
                return answer
            except grpc.aio.AioRpcError as error:
                code = error.code()
                limited = code is grpc.StatusCode.RESOURCE_EXHAUSTED and "rate limit" in (error.details() or "")
                stale = code is grpc.StatusCode.UNAVAILABLE and not lost
                if (limited or stale) and loop.time() + wait < until:
                    lost = lost or stale
                    await asyncio.sleep(wait)
                    wait *= 2
                    continue
                text = f"kubelet's PodResources.{name} on {self.socket} failed: {code.name}: {error.details()}"
                if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    self.problem = text
                    raise Unavailable(text) from error
                raise _Refused(text, code, (error.details() or "").lower()) from error

    def _stub(self) -> api_pb2_grpc.PodResourcesListerAsyncStub:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(f"unix:{self.socket}", options=CHANNEL_OPTIONS)
        return api_pb2_grpc.PodResourcesListerStub(self._channel)


class AsksKubelet(Protocol):
    """What `KubeletAsker` answers of pods, for kubelet and the runtime. Methods block; not for the event loop."""

    def pod(self, pod: PodRef) -> PodDevices | None:
        """Ask what a pod holds; None if kubelet does not know it. Raises Unavailable."""

    def pods(self) -> Sequence[PodDevices]:
        """Ask what every pod of the node holds. Raises Unavailable."""

    def files(self, pod: PodRef, container: str, resource_name: str) -> Sequence[str]:
        """List the device files that a resource's plugin gave to a container; none if that is not known."""

    def sandboxes(self) -> Sequence[Sandbox]:
        """List the runtime's sandboxes; none if it cannot be asked on this node. Raises Unavailable."""


class KubeletAsker:
    """Asks PodResources and the runtime for threads other than the event loop's, on which their clients live."""

    def __init__(
        self, kubelet: PodResources, loop: asyncio.AbstractEventLoop, runtime: ContainerRuntime | None = None
    ) -> None:
        self._kubelet = kubelet
        self._loop = loop
        self._runtime = runtime
        self._asking = threading.BoundedSemaphore(MAX_ASKING)

    def pod(self, pod: PodRef) -> PodDevices | None:
        """Ask what a pod holds, of any resource; None if kubelet does not know it. Not on the loop.

        Raises Unavailable.
        """
        if not self._asking.acquire(blocking=False):
            raise Unavailable(f"{MAX_ASKING} calls wait for kubelet to say what their pods hold: try again later")
        try:
            return self._wait(self._kubelet.get(pod), f"kubelet did not say what {pod} holds")
        finally:
            self._asking.release()

    def pods(self) -> Sequence[PodDevices]:
        """Ask what every pod of the node holds. Not on the loop; raises Unavailable."""
        return self._wait(self._kubelet.listing(), "kubelet did not list its pods").pods

    def files(self, pod: PodRef, container: str, resource_name: str) -> Sequence[str]:
        """List the device files that a resource's plugin gave to a container, as far as kubelet keeps its answer."""
        noted = checkpoint.containers_of(self._kubelet.folder, pod.uid) if pod.uid else ()
        return next((held.files(resource_name) for held in noted if held.container == container), ())

    def sandboxes(self) -> Sequence[Sandbox]:
        """Ask the runtime for its sandboxes; none if there is no runtime to be asked. Not on the loop.

        Raises Unavailable.
        """
        if self._runtime is None:
            return ()
        return self._wait(self._runtime.sandboxes(), "the container runtime did not list its sandboxes")

    async def listing(self) -> Listing:
        """Ask what every pod holds now. On the loop; raises Unavailable."""
        return await self._kubelet.listing()

    @property
    def newest(self) -> Listing:
        """The newest listing of all pods."""
        return self._kubelet.newest.value

    def _wait(self, asking: Coroutine[Any, Any, T], otherwise: str) -> T:
        asked = asyncio.run_coroutine_threadsafe(asking, self._loop)
        try:
            return asked.result(ANSWER_SECONDS)
        except concurrent.futures.TimeoutError as error:
            asked.cancel()
            raise Unavailable(f"{otherwise} within {ANSWER_SECONDS:g} s") from error


class _Refused(Unavailable):
    """kubelet answered, with an error."""

    def __init__(self, text: str, code: grpc.StatusCode, details: str) -> None:
        super().__init__(text)
        unknown = code is grpc.StatusCode.UNKNOWN
        self.means_not_found = code is grpc.StatusCode.NOT_FOUND or (unknown and "not found" in details)
        # "disabled": known to kubelet, but behind a feature gate that is off.
        self.means_no_such_call = code is grpc.StatusCode.UNIMPLEMENTED or (unknown and "disabled" in details)


def _pod_devices(message: api_pb2.PodResources, uid: str = "") -> PodDevices:
    return PodDevices(
        PodRef(message.namespace, message.name, uid),
        tuple(
            ContainerDevices(
                c.name,
                tuple(_assignment(d) for d in c.devices),
                tuple(c.cpu_ids),
                tuple(_memory(m) for m in c.memory),
                tuple(_claimed(c)),
            )
            for c in message.containers
        ),
        tuple(message.cpu_ids),
        tuple(_memory(m) for m in message.memory),
    )


def _claimed(message: api_pb2.ContainerResources) -> Iterator[ClaimedDevice]:
    for claim in message.dynamic_resources:
        for device in claim.claim_resources:
            yield ClaimedDevice(
                claim.claim_namespace,
                claim.claim_name,
                device.driver_name,
                device.pool_name,
                device.device_name,
                tuple(each.name for each in device.cdi_devices),
                device.share_id,
            )


def _assignment(message: api_pb2.ContainerDevices) -> DeviceAssignment:
    return DeviceAssignment(
        message.resource_name, tuple(message.device_ids), tuple(n.ID for n in message.topology.nodes)
    )


def _memory(message: api_pb2.ContainerMemory) -> MemoryBlock:
    return MemoryBlock(message.memory_type, message.size, tuple(n.ID for n in message.topology.nodes))
