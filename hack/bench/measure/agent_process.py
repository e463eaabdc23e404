"""The agent as a process on the node with 1,024 VFs: kubelet's calls, memory, idle processor time."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hack.sim.stage import Stage, wait
from measure import discovery, plugins
from measure.figures import Figures
from measure.footprint import cpu_percent, resident_mib
from measure.former import Version

RESOURCES: list[dict[str, Any]] = [
    {"name": "rdma/hca", "kind": "hca", "select": {"vendors": ["15b3"]}},
    {"name": "rdma/vf", "kind": "vf", "select": {"vendors": ["15b3"]}},
]
SETTLE_SECONDS = 5.0
PORT = 9808

Say = Callable[[str], None]


def measure(versions: Mapping[str, Version], calls: int, idle_seconds: float, say: Say) -> Figures:
    """Run the agent publishing its topology, as a node with schedulers' support does, and once without.

    `versions` are by the prefix of their figures.
    """
    with ExitStack() as stack:
        stages = running_agents(stack, versions, publish=True, say=say)
        figures = plugins.measure(stages, calls, say)
        for name, stage in stages.items():
            say(f"footprint: the {name.replace('_', ' ')}agent left alone for {idle_seconds:g} s")
            pid = stage.processes["agent"].pid
            cpu_percent(pid, SETTLE_SECONDS)
            figures[f"{name}idle_cpu_pct"] = cpu_percent(pid, idle_seconds)
            figures[f"{name}agent_rss_mib"] = resident_mib(pid)
    with running_agent(versions[""], publish=False, say=say) as stage:
        plugins.measure({"": stage}, calls, say)
        pid = stage.processes["agent"].pid
        cpu_percent(pid, SETTLE_SECONDS)
        figures["agent_rss_no_publish_mib"] = resident_mib(pid)
    return figures


def running_agents(stack: ExitStack, versions: Mapping[str, Version], *, publish: bool, say: Say) -> dict[str, Stage]:
    """Run an agent of each version until `stack` ends, by the prefix of its figures."""
    return {
        name: stack.enter_context(running_agent(version, publish=publish, say=say, port=PORT + number))
        for number, (name, version) in enumerate(versions.items())
    }


@contextmanager
def running_agent(version: Version, *, publish: bool, say: Say, port: int = PORT) -> Iterator[Stage]:
    say(f"the agent on {discovery.NODE}, {'publishing its topology' if publish else 'publishing nothing'}")
    # In a socket's path are 107 characters: a folder with a short name.
    with tempfile.TemporaryDirectory(prefix="nf-bench-", dir="/var/tmp") as folder, ExitStack() as stack:
        stage = Stage(Path(folder), version.relay, port, code=version.code)
        try:
            root = stage.build_node(discovery.NODE, with_links=False).root
            stack.enter_context(in_memory(root / "var/run"))
            stage.start_kubelet()
            topology = {"publish": publish, "startSpreadSeconds": 0, "kubeletConfig": f"{folder}/kubelet.yaml"}
            stage.write_config({"resources": RESOURCES, "topology": topology})
            stage.start_agent(*(_api_server(stage) if publish else ()))
            stage.await_ready()
            if publish:
                wait("the topology object to be written", lambda: _has_published(stage) or None)
            yield stage
        except BaseException:
            say(stage.log_ends())
            raise
        finally:
            stage.close()


@contextmanager
def in_memory(folder: Path) -> Iterator[None]:
    """Give a folder a tmpfs, as a host's /run is one: there are the files that tell Multus of granted VFs."""
    folder.mkdir(parents=True)
    subprocess.run(["/usr/bin/mount", "-t", "tmpfs", "nodefabric-bench", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["/usr/bin/umount", str(folder)], check=True)


def _api_server(stage: Stage) -> tuple[str, str]:
    kubeconfig = stage.folder / "kubeconfig"
    stage.spawn(
        "apiserver", ["-m", "hack.sim.cluster.apiserver", "--kubeconfig", str(kubeconfig), "--node", "sim-node"], {}
    )
    wait("the API server", lambda: kubeconfig.exists() or None)
    return "--kubeconfig", str(kubeconfig)


def _has_published(stage: Stage) -> bool:
    lines = stage.fetch("/metrics").splitlines()
    return any(line.startswith("nodefabric_api_writes_total{") and 'outcome="accepted"' in line for line in lines)
