"""A node whose agent offers devices to claims: real processes and sockets, and an API server that takes its time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hack.sim.machine import SimulatedMachine
from hack.sim.stage import Stage, wait
from measure.agent_process import in_memory
from measure.dra.cluster import NODE, Cluster

Say = Callable[[str], None]


@dataclass(frozen=True)
class RunningNode:
    """What plays there."""

    stage: Stage
    cluster: Cluster
    machine: SimulatedMachine

    def start_agent(self, env: Mapping[str, str] | None = None) -> None:
        """Start the agent, which knows the cluster."""
        self.stage.start_agent("--kubeconfig", str(self.stage.folder / "kubeconfig"), env=env)


@contextmanager
def running_node(
    relay: Path,
    node: str,
    config: Mapping[str, Any],
    say: Say,
    *,
    with_links: bool,
    kubelet: Sequence[str] = (),
) -> Iterator[RunningNode]:
    """Have a modelled node with its agent. `kubelet`: options of the stand-in."""
    # In a socket's path are 107 characters: a folder with a short name.
    with tempfile.TemporaryDirectory(prefix="nf-bench-", dir="/var/tmp") as folder, ExitStack() as stack:
        stage = Stage(Path(folder), relay)
        try:
            machine = stage.build_node(node, with_links=with_links)
            stack.enter_context(in_memory(machine.root / "var/run"))
            stage.write_config(config)
            cluster = _cluster(stage)
            options = ("--api-server", f"http://127.0.0.1:{cluster.port}", "--node", NODE)
            stage.start_kubelet(*options, "--seed", "7", *kubelet)
            running = RunningNode(stage, cluster, machine)
            running.start_agent()
            stage.await_ready()
            wait("the slices", lambda: cluster.is_whole() or None)
            wait("kubelet to find the driver", lambda: registrations(stage) or None)
            cluster.answer_slowly()
            yield running
        except BaseException:
            say(stage.log_ends())
            raise
        finally:
            stage.close()


def registrations(stage: Stage) -> int:
    """Tell how often kubelet has registered the driver."""
    return stage.log("kubelet").count("registered DRA driver")


def _cluster(stage: Stage) -> Cluster:
    port, kubeconfig = stage.folder / "port", stage.folder / "kubeconfig"
    options = ["--port-file", str(port), "--kubeconfig", str(kubeconfig), "--node", NODE]
    stage.spawn("apiserver", ["-m", "hack.sim.cluster.apiserver", *options], {})
    wait("the API server", lambda: port.exists() or None)
    return Cluster(int(port.read_text()))
