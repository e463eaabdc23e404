"""Updates of a node's agent as a DaemonSet with `maxSurge` makes them: the next agent waits beside the one that serves.

    python -m tests.hostile.updating [--updates 50] [--kill]

plays updates under pods that come four a second, or kills an agent at each part of their lists. The agents are
processes, each with its own socket for probes as in a pod of its own, and the same configuration, port and folders.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.operator import probe
from agent.process.standby import POD
from agent.sim.kubelet import Kubelet
from agent.sim.pod_life import Pod
from agent.sim.pods import Container, PodSpec
from agent.sim.stage import NODE, Stage, wait
from tests import sandbox
from tests.awaiting import until

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
RELAY = Path(__file__).parents[2] / "build/shim/native/nodefabric-cni"


@dataclass
class Agents:
    """The agents of one node, each with a name and a log of its own."""

    stage: Stage
    options: tuple[str, ...] = ()
    started: int = 0

    def start(self, program: str = "agent", **env: str) -> str:
        """Start one more, and return its name."""
        self.started += 1
        name = f"agent-{self.started}"
        words = ["-m", program, "run", "--config", str(self.stage.folder / "config.yaml"), *self.stage.host]
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
                lives.create_task(self._live(f"pod-{time.monotonic_ns()}"))
                await asyncio.sleep(EVERY_SECONDS)

    async def _live(self, name: str) -> None:
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


def figures(stream: Stream) -> Mapping[str, Any]:
    """Sum up."""
    gaps = sorted(round(gap * 1000) for gap in stream.gaps)
    return {
        "pods": stream.ran + len(stream.failed),
        "rejected": len(stream.failed),
        "reasons": sorted({pod.message for pod in stream.failed}),
        "gaps": len(gaps),
        "gap_ms": {"median": round(statistics.median(gaps)), "max": gaps[-1]},
    }


@contextlib.contextmanager
def own_stage() -> Iterator[Stage]:
    """A stage without pytest."""
    with sandbox.network(), tempfile.TemporaryDirectory(prefix="nf-") as folder:
        stage = Stage(Path(folder), RELAY)
        try:
            yield stage
        except BaseException:
            print(stage.log_ends(), file=sys.stderr)
            raise
        finally:
            stage.close()


def main(arguments: Sequence[str]) -> int:
    """Play the long form, and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.updating")
    parser.add_argument("--updates", type=int, default=50)
    options = parser.parse_args(arguments)
    sandbox.seal()
    with own_stage() as stage:
        print(json.dumps(figures(asyncio.run(play(stage, options.updates))), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
