"""Restarts of the agent under a steady stream of new pods: with the taint none fails.

The agent is a process; kubelet and API server are stand-ins in the test's own, and between them is a small scheduler.
It heeds taints, and believes that the node has all units all the time: what a real one is told of the Node's status is
up to ten seconds old.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from agent.cluster.node_taint import KEY
from hack.sim.cluster.apiserver import ApiServerStandIn
from hack.sim.stage import NODE, Stage
from tests.awaiting import until
from tests.hostile.updating import ADAPTERS, DEADLINE, RESOURCES, SHARES, Stream, node

UNITS = ADAPTERS * SHARES
OTHER = {"key": "example.com/maintenance", "effect": "PreferNoSchedule"}
PLANNED = {**RESOURCES, "restart": {"taint": True, "waitSeconds": 4}}
"""So long have pods that were placed before the taint to be admitted, also where this process has little of a CPU."""
EVERY_SECONDS = 0.05
MOST_WAITING = 4
"""A crowd that comes in at once would keep this process, which is kubelet and API server, too, from their answers."""
BINDING_SECONDS = 0.1
"""Between the scheduler's choice of a node and the moment when kubelet has the pod."""


@dataclass(kw_only=True)
class Cluster(Stream):
    """A node, a stream of pods that ask for its units, and who places them."""

    stage: Stage
    server: ApiServerStandIn
    waiting: int = 0
    """Pods that no node has been found for yet."""
    placed: set[str] = field(default_factory=set)

    def taints(self) -> list[dict[str, Any]]:
        found = self.server.state.get("Node", NODE)
        assert found is not None
        return list(found["spec"].get("taints", []))

    def set_taints(self, *wanted: dict[str, str]) -> None:
        found = self.server.state.get("Node", NODE)
        assert found is not None
        self.server.state.write("Node", NODE, {**found, "spec": {"taints": list(wanted)}}, "kubectl")

    def is_tainted(self) -> bool:
        return any(taint["effect"] == "NoSchedule" for taint in self.taints())

    async def stream(self) -> None:
        """Create pods for ever, and place them."""
        async with asyncio.TaskGroup() as lives:
            number = 0
            while True:
                self.waiting = min(self.waiting + 1, MOST_WAITING)
                while self.waiting and len(self.placed) < UNITS and not self.is_tainted():
                    self.waiting -= 1
                    number += 1
                    self.placed.add(f"pod-{number}")
                    lives.create_task(self._place(f"pod-{number}"))
                await asyncio.sleep(EVERY_SECONDS)

    async def _place(self, name: str) -> None:
        await asyncio.sleep(BINDING_SECONDS)
        await self.live(name)
        self.placed.remove(name)

    async def run_pods(self, count: int) -> None:
        """Wait until so many more pods have run."""
        wanted = self.ran + count
        await until(lambda: self.ran >= wanted, DEADLINE)

    async def restart(self) -> int:
        """End the agent as kubelet does, start it, and wait until pods run again. Returns its exit status."""
        process = self.stage.processes["agent"]
        await asyncio.to_thread(self.stage.end, "agent")
        self.start_agent()
        await until(lambda: self.is_offered() and not self.is_tainted() and not self.waiting, DEADLINE)
        await self.run_pods(10)  # those that came meanwhile are in, and the stream is steady again
        return int(process.returncode)

    def start_agent(self) -> None:
        self.stage.start_agent("--kubeconfig", str(self.stage.folder / "kubeconfig"))


@contextlib.asynccontextmanager
async def cluster(stage: Stage, document: dict[str, Any]) -> AsyncIterator[Cluster]:
    """Play, with pods coming and going."""
    async with contextlib.AsyncExitStack() as stack:
        server = stack.enter_context(ApiServerStandIn())
        kubelet = (await stack.enter_async_context(node(stage, document))).kubelet
        (stage.folder / "kubeconfig").write_text(server.kubeconfig())
        server.state.add_node(NODE)
        made = Cluster(kubelet, stage=stage, server=server)
        made.set_taints(OTHER, taint())  # as kubelet registers a new node that it was told to taint
        made.start_agent()
        await until(made.is_offered, DEADLINE)
        pods = asyncio.create_task(made.stream())
        stack.push_async_callback(_ended, pods)
        yield made


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def taint() -> dict[str, str]:
    return {"key": KEY, "effect": "NoSchedule"}


async def test_with_the_taint_no_pod_is_rejected_by_a_node_whose_agent_restarts(stage: Stage) -> None:
    async with cluster(stage, PLANNED) as made:
        await made.run_pods(20)  # so the start has taken away the taint of a new node
        for _ in range(3):
            assert await made.restart() == 0
        assert [(pod.reason, pod.message) for pod in made.failed] == []
        assert made.taints() == [OTHER]
        assert made.server.state.counts.merges == 7


async def test_a_taint_goes_with_a_start_whatever_became_of_who_put_it(stage: Stage) -> None:
    """The agent is killed while it waits for its end."""
    async with cluster(stage, {**PLANNED, "restart": {"taint": True, "waitSeconds": 5}}) as made:
        await made.run_pods(5)
        made.stage.processes["agent"].terminate()
        await until(made.is_tainted, DEADLINE)
        await asyncio.to_thread(made.stage.end, "agent", 9)
        made.start_agent()
        await made.run_pods(10)
        assert made.taints() == [OTHER]
