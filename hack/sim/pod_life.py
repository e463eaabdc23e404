"""One pod's life in the kubelet stand-in: admission, claims, sandbox, running, the DELs and the claims' end.

The order of calls is that of kubelet 1.36.2 with containerd 2.1.9, as it was seen. Source of the order in kubelet:
Kubernetes, pkg/kubelet/kubelet.go (SyncPod) and pkg/kubelet/kuberuntime.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hack.sim.devices import AdmissionFailed, DeviceManager
from hack.sim.dra.manager import DraFailed, DraManager
from hack.sim.pods import Container, PodSpec
from hack.sim.runtime import CniFailed, CniRunner, Sandbox, make_netns, remove_netns
from proto.deviceplugin.v1beta1 import api_pb2

if TYPE_CHECKING:
    from hack.sim.kubelet import Kubelet

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True)
class Pod:
    """One pod from admission to its last DEL."""

    uid: str
    spec: PodSpec
    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    active: bool = True
    """Counts for devices and PodResources."""
    sandbox: Sandbox | None = None
    result: Mapping[str, Any] | None = None
    attempts: int = 0
    deletes: int = 0
    timings: dict[str, float] = field(default_factory=dict)
    """Milliseconds."""
    ending: asyncio.Event = field(default_factory=asyncio.Event)


def describe(pod: Pod, devices: DeviceManager, dra: DraManager | None = None) -> dict[str, Any]:
    """Tell all about a pod, ready for JSON."""
    return {
        "namespace": pod.spec.namespace,
        "name": pod.spec.name,
        "uid": pod.uid,
        "phase": pod.phase,
        "reason": pod.reason,
        "message": pod.message,
        "containers": [
            *({**_container(pod, c, devices, dra), "init": True} for c in pod.spec.init_containers),
            *({**_container(pod, c, devices, dra), "init": False} for c in pod.spec.containers),
        ],
        "container_id": pod.sandbox.container_id if pod.sandbox else None,
        "netns": str(pod.sandbox.netns) if pod.sandbox else None,
        "cni_result": pod.result,
        "attempts": pod.attempts,
        "deletes": pod.deletes,
        "timings_ms": {name: round(value, 2) for name, value in pod.timings.items()},
    }


def _container(pod: Pod, container: Container, devices: DeviceManager, dra: DraManager | None) -> dict[str, Any]:
    """What the runtime would be told. The first of two equal keys wins, as in kubelet."""
    held = devices.of_container(pod.uid, container.name)
    answers = [api_pb2.ContainerAllocateResponse.FromString(h.answer) for h in held]
    envs: dict[str, str] = {}
    annotations: dict[str, str] = {}
    for answer in answers:
        envs = {**answer.envs, **envs}
        annotations = {**answer.annotations, **annotations}
    nodes = {
        d.container_path: {"container": d.container_path, "host": d.host_path, "permissions": d.permissions}
        for answer in reversed(answers)
        for d in answer.devices
    }
    mounts = {
        m.container_path: {"container": m.container_path, "host": m.host_path, "read_only": m.read_only}
        for answer in reversed(answers)
        for m in answer.mounts
    }
    return {
        "name": container.name,
        "devices": {h.resource_name: list(h.ids) for h in sorted(held, key=lambda h: h.resource_name)},
        "envs": dict(sorted(envs.items())),
        "annotations": dict(sorted(annotations.items())),
        "device_nodes": [nodes[path] for path in sorted(nodes)],
        "mounts": [mounts[path] for path in sorted(mounts)],
        "cdi_devices": [
            *(c.name for answer in answers for c in answer.cdi_devices),
            *(dra.cdi_ids(pod.spec, container) if dra is not None else ()),
        ],
        "claim_health": [
            {"name": s.resource, "resourceID": s.resource_id, "health": s.health, "message": s.message}
            for s in (dra.standings(pod.spec, container) if dra is not None else ())
        ],
    }


@contextmanager
def timed(pod: Pod, name: str) -> Iterator[None]:
    """Note the milliseconds spent inside."""
    began = time.monotonic()
    try:
        yield
    finally:
        pod.timings[name] = (time.monotonic() - began) * 1000


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Replace a file so that a reader sees the old or the new text, never half of one."""
    scratch = path.with_name(f".{path.name}")
    scratch.write_text(json.dumps(document, indent=2))
    scratch.replace(path)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. A real runtime retries a sandbox after 12 to 13 s, and repeats DEL after 4 to 8 s."""

    poll: float = 0.2
    sandbox_retry: float = 1.0
    later_delete: float = 0.3
    garbage: float = 1.0
    """To the end of the sandbox of a pod that kubelet has lost."""


DEFAULT_TIMING = Timing()


class PodLife:
    """Leads pods through their lives."""

    def __init__(
        self,
        node: Kubelet,
        netns_dir: Path,
        runner: CniRunner | None,
        timing: Timing,
        rng: random.Random,
        threads: Executor,
    ) -> None:
        self._node = node
        self._netns_dir = netns_dir
        self._runner = runner
        self._timing = timing
        self._rng = rng
        self._threads = threads

    async def live(self, pod: Pod) -> None:
        """Lead a pod from admission to its last DEL."""
        with timed(pod, "start"):
            await self._admit(pod)
            if pod.phase != "Failed":
                await self._set_up(pod)
            if pod.phase == "Pending" and not pod.ending.is_set():
                await self._start_containers(pod)
                pod.phase = "Running"
        self._node.write(pod)
        await pod.ending.wait()
        await self._end(pod)

    async def _admit(self, pod: Pod) -> None:
        """Admission is one pod at a time; whoever waits for a plugin holds up the node."""
        async with self._node.admission:
            with timed(pod, "admission"):
                try:
                    by_plugins = pod.spec.by_plugins
                    await self._node.devices.admit(
                        pod.uid, by_plugins(pod.spec.init_containers), by_plugins(pod.spec.containers)
                    )
                except AdmissionFailed as error:
                    pod.phase, pod.reason = "Failed", "UnexpectedAdmissionError"
                    pod.message = f"Allocate failed due to {error}, which is unexpected"
                    pod.active = False

    async def _set_up(self, pod: Pod) -> None:
        """Prepare the claims, then make the sandbox, both again until they work: no sandbox without its claims."""
        while not pod.ending.is_set():
            if not await self._prepare(pod):
                self._node.write(pod)
                await either(pod.ending, self._rng.uniform(*self._node.behaviour.retry))
            elif pod.ending.is_set() or not self._has_network(pod) or await self._make_sandbox(pod):
                return
            else:
                self._node.write(pod)
                await either(pod.ending, self._timing.sandbox_retry)

    async def _prepare(self, pod: Pod) -> bool:
        """Have the pod's claims prepared. Its deletion meanwhile changes nothing."""
        if not pod.spec.has_claims:
            return True
        try:
            if self._node.dra is None:
                raise DraFailed("there is no API server to read its claims from")
            with timed(pod, "prepare"):
                await self._node.dra.prepare(pod.uid, pod.spec)
        except DraFailed as error:
            pod.message = f"failed to prepare dynamic resources: {error}"
            log.warning("pod %s: %s", pod.spec.key, pod.message)
            return False
        pod.message = ""
        return True

    def _has_network(self, pod: Pod) -> bool:
        return self._runner is not None and not pod.spec.host_network

    async def _make_sandbox(self, pod: Pod) -> bool:
        """Make a sandbox with names of its own; one that failed is cleaned up at once."""
        runner = self._runner
        assert runner is not None
        pod.attempts += 1
        sandbox = self._new_sandbox(pod)
        try:
            await self._blocking(make_netns, sandbox.netns)
            with timed(pod, "add"):
                result = await self._blocking(runner.add, sandbox)
        except (CniFailed, OSError) as error:
            pod.message = f"failed to set up sandbox: {error}"
            log.warning("pod %s: %s", pod.spec.key, pod.message)
            await self._delete_sandbox(pod, runner, sandbox, str(sandbox.netns), None)
            await self._blocking(remove_netns, sandbox.netns)
            return False
        pod.sandbox, pod.result, pod.message = sandbox, result, ""
        return True

    async def _start_containers(self, pod: Pod) -> None:
        for container in (*pod.spec.init_containers, *pod.spec.containers):
            held = self._node.devices.of_container(pod.uid, container.name)
            for item in self._rng.sample(held, len(held)):
                client = self._node.registry.client(item.resource_name)
                if client is not None:
                    await client.pre_start(item.ids)

    async def _end(self, pod: Pod) -> None:
        """One DEL with the namespace, then the claims' end; later two DELs without it, when all may be another's."""
        sandbox, runner = pod.sandbox, self._runner
        await self._stop_sandbox(pod)
        while not await self._unprepare(pod):
            self._node.write(pod)
            if self._node.closing:
                break
            await asyncio.sleep(self._timing.sandbox_retry)
            if sandbox is not None and runner is not None:
                await self._delete_sandbox(pod, runner, sandbox, "", None)
        pod.active = False
        self._node.forget(pod)
        if sandbox is not None and runner is not None:
            for _ in range(2):
                await asyncio.sleep(self._timing.later_delete)
                await self._delete_sandbox(pod, runner, sandbox, "", None)

    async def clean_up(self, pod: Pod) -> None:
        """End the sandbox of a pod that kubelet has lost, when it comes upon it."""
        await asyncio.sleep(self._timing.garbage)
        await self._stop_sandbox(pod)

    async def _stop_sandbox(self, pod: Pod) -> None:
        sandbox, runner = pod.sandbox, self._runner
        if sandbox is None or runner is None:
            return
        while not await self._delete_sandbox(pod, runner, sandbox, str(sandbox.netns), pod.result):
            self._node.write(pod)
            if self._node.closing:
                break
            await asyncio.sleep(self._timing.sandbox_retry)
        await self._blocking(remove_netns, sandbox.netns)

    async def _unprepare(self, pod: Pod) -> bool:
        if self._node.dra is None or not pod.spec.has_claims:
            return True
        try:
            with timed(pod, "unprepare"):
                await self._node.dra.unprepare(pod.uid)
        except DraFailed as error:
            pod.message = f"failed to unprepare dynamic resources: {error}"
            log.warning("pod %s: %s", pod.spec.key, pod.message)
            return False
        return True

    async def _delete_sandbox(
        self, pod: Pod, runner: CniRunner, sandbox: Sandbox, netns: str, result: Mapping[str, Any] | None
    ) -> bool:
        pod.deletes += 1
        try:
            with timed(pod, "delete" if netns else "later_delete"):
                await self._blocking(runner.delete, sandbox, netns, result)
        except CniFailed as error:
            pod.message = f"failed to clean up sandbox: {error}"
            log.warning("pod %s: %s", pod.spec.key, pod.message)
            return False
        return True

    def _new_sandbox(self, pod: Pod) -> Sandbox:
        return Sandbox(
            container_id=f"{self._rng.getrandbits(256):064x}",
            netns=self._netns_dir / f"cni-{uuid.UUID(int=self._rng.getrandbits(128), version=4)}",
            namespace=pod.spec.namespace,
            name=pod.spec.name,
            uid=pod.uid,
            annotations=pod.spec.annotations,
        )

    async def _blocking(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)


async def either(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, but no longer than that."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
