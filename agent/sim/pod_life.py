"""One pod's life in the kubelet stand-in: admission, sandbox, running, the DELs at its end."""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from agent.sim.devices import AdmissionFailed, DeviceManager
from agent.sim.plugins import Registry
from agent.sim.pod_status import Pod, timed
from agent.sim.runtime import CniFailed, CniRunner, Sandbox, make_netns, remove_netns

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. A real runtime retries a sandbox after 12 to 13 s, and repeats DEL after 4 to 8 s."""

    poll: float = 0.2
    sandbox_retry: float = 1.0
    later_delete: float = 0.3


DEFAULT_TIMING = Timing()


class Node(Protocol):
    """What a pod needs of its node. A restart of the stand-in replaces devices and registry."""

    devices: DeviceManager
    registry: Registry
    admission: asyncio.Lock
    closing: bool

    def write(self, pod: Pod) -> None:
        """Show a pod's newest state."""

    def forget(self, pod: Pod) -> None:
        """Drop a pod that needs its devices no more; another of its name may come."""


class PodLife:
    """Leads pods through their lives."""

    def __init__(
        self,
        node: Node,
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
        await self._admit(pod)
        if pod.phase != "Failed" and not pod.spec.host_network and self._runner is not None:
            await self._make_sandbox(pod, self._runner)
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
                    await self._node.devices.admit(pod.uid, pod.spec.init_containers, pod.spec.containers)
                except AdmissionFailed as error:
                    pod.phase, pod.reason = "Failed", "UnexpectedAdmissionError"
                    pod.message = f"Allocate failed due to {error}, which is unexpected"
                    pod.active = False

    async def _make_sandbox(self, pod: Pod, runner: CniRunner) -> None:
        """Try until it works: a failed sandbox is cleaned up, the next one has new names."""
        while not pod.ending.is_set():
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
                self._node.write(pod)
                await either(pod.ending, self._timing.sandbox_retry)
                continue
            pod.sandbox, pod.result, pod.message = sandbox, result, ""
            return

    async def _start_containers(self, pod: Pod) -> None:
        for container in (*pod.spec.init_containers, *pod.spec.containers):
            held = self._node.devices.of_container(pod.uid, container.name)
            for item in self._rng.sample(held, len(held)):
                client = self._node.registry.client(item.resource_name)
                if client is not None:
                    await client.pre_start(item.ids)

    async def _end(self, pod: Pod) -> None:
        """One DEL with the namespace; later two more without it, when the devices may be another pod's."""
        sandbox, runner = pod.sandbox, self._runner
        if sandbox is not None and runner is not None:
            while not await self._delete_sandbox(pod, runner, sandbox, str(sandbox.netns), pod.result):
                self._node.write(pod)
                if self._node.closing:
                    break
                await asyncio.sleep(self._timing.sandbox_retry)
            await self._blocking(remove_netns, sandbox.netns)
        pod.active = False
        self._node.forget(pod)
        if sandbox is not None and runner is not None:
            for _ in range(2):
                await asyncio.sleep(self._timing.later_delete)
                await self._delete_sandbox(pod, runner, sandbox, "", None)

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
