"""Updates of a node's agent as a DaemonSet with `maxSurge` makes them: the next agent waits beside the one that serves.

The agents are processes, each with its own socket for probes as in a pod of its own, and the same configuration, port
and folders.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.operator import probe
from agent.process.standby import POD
from hack.sim.demo import not_back, still_attached
from hack.sim.kubelet import Kubelet
from hack.sim.pod_life import Pod
from hack.sim.pods import Container, PodSpec
from hack.sim.stage import CONFIG, NODE, Stage, settled, wait
from tests.awaiting import until
from tests.hostile.dying_agent import DIE_AT

ADAPTERS, SHARES = 8, 8
RESOURCES = {
    "resources": [
        {"name": "rdma/hca", "kind": "hca", "shares": SHARES, "select": {"vendors": ["15b3"]}},
        {"name": "nvidia.com/gpu", "kind": "gpu"},
    ]
}
OFFERED = {"rdma/hca": ADAPTERS * SHARES, "nvidia.com/gpu": 8}
EVERY_SECONDS = 0.25
LIFE_SECONDS = 0.3
LOOK_SECONDS = 0.002
DEADLINE = 120.0


@dataclass
class Agents:
    """The agents of one node, each with a name and a log of its own."""

    stage: Stage
    options: tuple[str, ...] = ()
    started: int = 0

    def start(self, program: str = "hack.sim.agent", config: str = "config.yaml", **env: str) -> str:
        """Start one more, and return its name."""
        self.started += 1
        name = f"agent-{self.started}"
        words = ["-m", program, "run", "--config", str(self.stage.folder / config), *self.stage.host]
        known = {"NODE_NAME": NODE, probe.SOCKET: str(self._socket(name)), POD: f"nodefabric/{name}"}
        self.stage.spawn(name, [*words, "--log-format", "text", *self.options], {**known, **env})
        return name

    def readiness(self, name: str) -> str:
        """Ask as kubelet's probe does. Returns "ok", or what is wrong."""
        try:
            document: Mapping[str, Any] = json.loads(probe.ask(str(self._socket(name)), "readyz") or b"{}")
        except OSError as error:
            return str(error)
        return str(document.get("done") or document.get("error"))

    def await_ready(self, name: str) -> None:
        def look() -> bool | None:
            assert self.lives(name), f"{name} has ended"
            return self.readiness(name) == "ok" or None

        wait(f"{name} to be ready", look)

    def lives(self, name: str) -> bool:
        return self.stage.processes[name].poll() is None

    def end(self, name: str, number: int = signal.SIGTERM) -> int:
        """End one as kubelet does, and return its exit status."""
        process = self.stage.processes[name]
        self.stage.end(name, number)
        return int(process.returncode)

    def update(self, old: str) -> str:
        """Start the next agent, and end the old one when that is ready. Returns the next one's name."""
        new = self.start()
        self.await_ready(new)
        assert self.end(old) == 0
        return new

    def _socket(self, name: str) -> Path:
        return self.stage.folder / f"{name}.sock"


@dataclass
class Stream:
    """A kubelet, and pods that ask for units, four a second."""

    kubelet: Kubelet
    ran: int = 0
    failed: list[Pod] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """For how many seconds each a resource was not offered."""

    def is_offered(self) -> bool:
        return self.kubelet.devices.allocatable() == OFFERED

    async def until_offered(self) -> None:
        await until(self.is_offered, DEADLINE)

    async def watch(self) -> None:
        """Note the gaps, for ever."""
        while True:
            await until(lambda: not self.is_offered(), float("inf"))
            began = time.monotonic()
            while not self.is_offered():  # noqa: ASYNC110 -- kubelet is in this process
                await asyncio.sleep(LOOK_SECONDS)
            self.gaps.append(time.monotonic() - began)

    async def create(self) -> None:
        """Create pods, for ever."""
        async with asyncio.TaskGroup() as lives:
            while True:
                lives.create_task(self.live(f"pod-{time.monotonic_ns()}"))
                await asyncio.sleep(EVERY_SECONDS)

    async def live(self, name: str) -> None:
        """Have a pod come, and go if it runs."""
        pod = self.kubelet.create(PodSpec("default", name, containers=(Container("main", (("rdma/hca", 1),)),)))
        await until(lambda: pod.phase != "Pending", DEADLINE)
        if pod.phase == "Failed":
            self.failed.append(pod)
        else:
            self.ran += 1
            await asyncio.sleep(LIFE_SECONDS)
        await self.kubelet.delete(pod.spec.key)


@contextlib.asynccontextmanager
async def node(stage: Stage, document: Mapping[str, Any] = RESOURCES) -> AsyncIterator[Stream]:
    """Play a node without an agent."""
    stage.build_node("h100-8gpu", with_links=False)
    stage.write_config(document)
    async with contextlib.AsyncExitStack() as stack:
        kubelet = Kubelet(stage.folder / "kubelet", netns_dir=stage.folder / "netns", seed=7)
        await kubelet.start()
        stack.push_async_callback(kubelet.close)
        stack.push_async_callback(asyncio.to_thread, stage.close)
        yield Stream(kubelet)


@contextlib.asynccontextmanager
async def under_pods(stream: Stream) -> AsyncIterator[None]:
    """Have pods come, and gaps be noted, meanwhile."""
    tasks = [asyncio.create_task(stream.create()), asyncio.create_task(stream.watch())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def play(stage: Stage, count: int) -> Stream:
    """Update so many times under pods. Returns what came of them."""
    async with node(stage) as stream:
        agents = Agents(stage)
        agent = agents.start()
        await stream.until_offered()
        await asyncio.to_thread(agents.await_ready, agent)
        async with under_pods(stream):
            for _ in range(count):
                agent = await asyncio.to_thread(agents.update, agent)
                await stream.until_offered()
                await asyncio.to_thread(agents.await_ready, agent)
        return stream


@dataclass(frozen=True)
class Death:
    """Who dies in an update, and when."""

    victim: str
    """`old` or `new`."""
    at: str
    """As tests.hostile.dying_agent takes it."""


class DeadlyUpdates:
    """Updates on a node with real links, in which agents are killed. A pod has a VF all the time."""

    PROGRAM = "tests.hostile.dying_agent"

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._agents = Agents(stage)
        machine = stage.build_node("h100-8gpu")
        self._machine, self._before = machine, machine.links.by_device()
        stage.start_kubelet("--seed", "7")
        self._serving = self._served(self._agents.start(self.PROGRAM))
        stage.run_pod("keeps", {"rdma/vf": 1})
        self._pods = 0

    def play(self, death: Death) -> None:
        """Update, with a death, and a pod that ends meanwhile. Fails unless all is well after that."""
        self._pods += 1
        ends, begins = f"ends-{self._pods}", f"begins-{self._pods}"
        if death.victim == "old":
            self._replace({DIE_AT: death.at})
        self._stage.run_pod(ends, {"rdma/vf": 2})
        old, env = self._serving, {DIE_AT: death.at} if death.victim == "new" else {}
        new = self._agents.start(self.PROGRAM, **env)
        wait("the next agent to be ready, or dead", lambda: self._is_done(new) or None)
        self._stage.processes[old].terminate()
        self._stage.delete_pod(ends)
        victim = old if death.victim == "old" else new
        wait(f"the death {death.at}", lambda: not self._agents.lives(victim) or None)
        assert self._stage.processes[victim].returncode == -signal.SIGKILL, self._stage.log(victim)[-2000:]
        self._agents.end(old)
        self._serving = self._served(new if death.victim == "old" else self._agents.start(self.PROGRAM))
        self._stage.await_no_pod(ends)
        self._stage.run_pod(begins, {"rdma/vf": 2})
        rows = self._stage.status()["attachments"]
        devices = [row["device"] for row in rows if row["state"] == "attached"]
        assert len(devices) == len(set(devices)) == 3, rows
        self._stage.end_pods(begins)

    def finish(self) -> list[str]:
        """End the pod that is left. Returns what is not as it was before the first."""
        self._stage.end_pods("keeps")
        leases = self._stage.folder / "leases-rails/rails"
        return settled(
            lambda: [
                *not_back(self._machine, self._before),
                *still_attached(self._stage),
                *(str(path) for path in leases.glob("192.168.*")),
            ]
        )

    def _replace(self, env: Mapping[str, str]) -> None:
        """Have an agent serve that dies when it ends."""
        new = self._agents.start(self.PROGRAM, **env)
        self._agents.await_ready(new)
        self._agents.end(self._serving)
        self._serving = self._served(new)

    def _served(self, name: str) -> str:
        """Wait until an agent serves, and return its name."""
        resources = len(CONFIG["resources"])
        wait(f"{name} to serve", lambda: self._stage.log(name).count("registered with kubelet") >= resources or None)
        wait("its endpoints", lambda: self._agents.readiness(name) == "ok" or None)
        return name

    def _is_done(self, name: str) -> bool:
        return not self._agents.lives(name) or self._agents.readiness(name) == "ok"
