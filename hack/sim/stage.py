"""One node with its processes: recorded hardware, the agent, the kubelet stand-in, the relay.

The demo, the end-to-end tests and the benchmarks play on it. Everything lives in one folder and in
the network and mount namespace of this process, which should be fresh ones.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from agent.errors import AgentError, Unavailable
from agent.hardware import recorded
from hack.sim.machine import SimulatedMachine
from hack.sim.runtime import remove_netns

CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
DEADLINE_SECONDS = 100.0
"""Only what fails reaches it, so a machine with much to do may take its time."""
NODE = "sim-node"
LOG_LINES_SHOWN = 40
CONFIG: Mapping[str, Any] = {
    "resources": [
        {"name": "rdma/hca", "kind": "hca", "select": {"vendors": ["15b3"]}},
        {"name": "rdma/vf", "kind": "vf", "select": {"vendors": ["15b3"]}, "network": "rails"},
        {"name": "nvidia.com/gpu", "kind": "gpu"},
    ],
}
"""The resources of the demo; `Stage.write_config` adds folders and the network `rails`."""

T = TypeVar("T")


@dataclass
class Stage:
    """The folder, and what runs in it. `close` ends everything that was started."""

    folder: Path
    relay: Path
    port: int = 9808
    code: Path | None = None
    """The checkout whose agent plays; None for this one."""
    host: tuple[str, ...] = ()
    """How the agent finds its hardware: options of `nodefabric run`; set by `build_node`."""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _machine: SimulatedMachine | None = None
    _stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        for name in ("cni", "manifests", "netns", "pods", "kubelet/device-plugins", "kubelet/pod-resources", "state"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "cni/nodefabric").symlink_to(self.relay.resolve())
        subprocess.run(["/usr/sbin/ip", "link", "set", "lo", "up"], check=True)
        self.write_config()
        self.write_conflist()

    def close(self) -> None:
        """End the processes, pods and links. Kubelet does not end its pods first, which would take its time."""
        for name in list(self.processes):
            self.end(name, signal.SIGKILL if name == "kubelet" else signal.SIGTERM)
        for sandbox in (self.folder / "netns").iterdir():
            remove_netns(sandbox)
        self._stack.close()

    # ---------------------------------------------------------------- hardware

    def build_node(self, node: str | Path, *, with_links: bool = True) -> SimulatedMachine:
        """Lay a node file out, by its name or file, with real links for its Ethernet interfaces."""
        place = self.folder / "node"
        self._stack.callback(SimulatedMachine.destroy, place)
        file = node if isinstance(node, Path) else recorded.find(node)
        SimulatedMachine.create(place, recorded.load(file), with_links=with_links)
        self._machine = machine = SimulatedMachine.open(place)
        self._stack.callback(machine.close)
        self.host = ("--simulate", str(place))
        return machine

    def play(
        self,
        node: str | Path = "h100-8gpu",
        config: Mapping[str, Any] = CONFIG,
        *options: str,
        conflist: Sequence[Mapping[str, Any]] | None = None,
        seed: int = 7,
        with_links: bool = True,
    ) -> SimulatedMachine:
        """Build a node, start kubelet and an agent with these options, and wait until the agent is ready."""
        machine = self.build_node(node, with_links=with_links)
        self.run(config, *options, conflist=conflist, seed=seed)
        return machine

    def run(
        self,
        config: Mapping[str, Any] = CONFIG,
        *options: str,
        conflist: Sequence[Mapping[str, Any]] | None = None,
        seed: int = 7,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start kubelet and an agent with these options on the node that was built, and wait until it is ready."""
        self.write_config(config)
        self.write_conflist(conflist)
        self.start_kubelet("--seed", str(seed))
        self.start_agent(*options, env=env)
        self.await_ready()

    @property
    def machine(self) -> SimulatedMachine:
        """The hardware that `build_node` has laid out, which is closed with the stage."""
        assert self._machine is not None, "build_node comes before"
        return self._machine

    # ------------------------------------------------------------ configuration

    def ipam(self, name: str, subnet: str) -> dict[str, Any]:
        """Return IPAM configuration with leases in the stage's folder."""
        return {"type": "host-local", "ranges": [[{"subnet": subnet}]], "dataDir": str(self.folder / f"leases-{name}")}

    def configuration(self, document: Mapping[str, Any] = CONFIG) -> str:
        """Spell a configuration of the agent out. What is not said comes from the stage."""
        rails = {"name": "rails", "mtu": 4200, "ipam": self.ipam("rails", "192.168.100.0/24")}
        standard = {
            "networks": [rails],
            "endpoints": {"port": self.port},
            "kubeletDir": str(self.folder / "kubelet"),
            "stateDir": str(self.folder / "state"),
            "runDir": str(self.folder / "run"),
            "cdiDir": str(self.folder / "cdi-specs"),
        }
        return yaml.safe_dump({**standard, **document}, sort_keys=False)

    def write_config(self, document: Mapping[str, Any] = CONFIG) -> Path:
        """Write the agent's configuration."""
        path = self.folder / "config.yaml"
        path.write_text(self.configuration(document))
        return path

    def write_conflist(self, plugins: Sequence[Mapping[str, Any]] | None = None) -> Path:
        """Write the cluster network: by default ptp with our plugin chained after it."""
        cluster = {"type": "ptp", "ipam": self.ipam("cluster", "10.244.0.0/24")}
        document = {"cniVersion": "1.0.0", "name": "cluster", "plugins": plugins or [cluster, {"type": "nodefabric"}]}
        path = self.folder / "cluster.conflist"
        path.write_text(json.dumps(document))
        return path

    @property
    def cni_path(self) -> str:
        """Our plugin first, then those of the distribution."""
        return ":".join(str(folder) for folder in (self.folder / "cni", *CNI_FOLDERS) if folder.is_dir())

    @property
    def relay_environment(self) -> dict[str, str]:
        """What the relay must be told of this stage's folders."""
        return {
            "NODEFABRIC_CNI_SOCKET": str(self.folder / "run/cni.sock"),
            "NODEFABRIC_CNI_SPOOL": str(self.folder / "state/spool"),
        }

    def call(
        self,
        command: str,
        conf: Mapping[str, Any],
        container: str = "",
        netns: str | Path = "",
        ifname: str = "net1",
        pod: str | None = None,
        uid: str = "",
    ) -> tuple[int, dict[str, Any]]:
        """Call the relay as a container runtime does, for a pod of namespace default. Returns its status and answer."""
        document = {"cniVersion": "1.1.0", "name": "by-hand", "type": "nodefabric", **conf}
        of_pod = "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;"
        env = {
            **self.relay_environment,
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": container,
            "CNI_NETNS": str(netns),
            "CNI_IFNAME": ifname,
            "CNI_ARGS": f"{of_pod}K8S_POD_NAME={pod};K8S_POD_UID={uid}" if pod is not None else "",
            "CNI_PATH": self.cni_path,
        }
        data = json.dumps(document).encode()
        done = subprocess.run([self.relay], input=data, env={k: v for k, v in env.items() if v}, capture_output=True)
        return done.returncode, json.loads(done.stdout) if done.stdout else {}

    # ---------------------------------------------------------------- processes

    def start_agent(self, *options: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start the agent. `build_node` comes before. `env` is put into its environment."""
        config = self.folder / "config.yaml"
        former = self.code is not None and not (self.code / "hack/sim/agent.py").exists()
        program = "agent" if former else "hack.sim.agent"
        arguments = ["-m", program, "run", "--config", str(config), *self.host, "--log-format", "text", *options]
        return self.spawn("agent", arguments, {"NODE_NAME": NODE, **(env or {})}, self.code)

    def restart_agent(self, number: int = signal.SIGTERM) -> None:
        """End the agent, start the next one, and wait until that is ready."""
        self.end("agent", number)
        self.start_agent()
        self.await_ready()

    def start_kubelet(self, *options: str) -> subprocess.Popen[bytes]:
        """Start the kubelet stand-in."""
        arguments = {
            "dir": self.folder / "kubelet",
            "manifests": self.folder / "manifests",
            "status": self.folder / "pods",
            "netns-dir": self.folder / "netns",
            "conflist": self.folder / "cluster.conflist",
            "cni-path": self.cni_path,
        }
        words = [text for key, value in arguments.items() for text in (f"--{key}", str(value))]
        return self.spawn("kubelet", ["-m", "hack.sim.kubelet", *words, *options], self.relay_environment)

    def spawn(
        self, name: str, arguments: Sequence[str], env: Mapping[str, str], code: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a Python process whose output goes to `<name>.log`, with the modules of a checkout, or of this one."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments], cwd=code, env={**os.environ, **env}, stdout=log, stderr=log
            )
        self.processes[name] = process
        return process

    def end(self, name: str, number: int = signal.SIGTERM) -> float:
        """Send a signal to a process, wait for its end, and return how many seconds that took."""
        process = self.processes.pop(name)
        started = time.monotonic()
        if process.poll() is None:
            process.send_signal(number)
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return time.monotonic() - started

    def log(self, name: str) -> str:
        """Return what a process has written so far."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def log_ends(self) -> str:
        """Return the last lines of every log, for a failure's report."""
        parts = []
        for path in sorted(self.folder.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
            parts.append("\n".join([f"--- the end of {path.name}", *lines]))
        return "\n".join(parts)

    # --------------------------------------------------------------------- pods

    def create_pod(self, name: str, limits: Mapping[str, int]) -> None:
        """Write the manifest of a pod with one container."""
        (self.folder / "manifests" / f"{name}.yaml").write_text(manifest(name, limits))

    def delete_pod(self, name: str) -> None:
        """Take a pod's manifest away."""
        (self.folder / "manifests" / f"{name}.yaml").unlink()

    def pod(self, name: str) -> dict[str, Any] | None:
        """Return what kubelet says of a pod; None if it does not know it."""
        try:
            pod: dict[str, Any] = json.loads((self.folder / "pods" / f"default_{name}.json").read_text())
        except (FileNotFoundError, ValueError):
            return None
        return pod

    def await_pod(self, name: str, phase: str = "Running") -> dict[str, Any]:
        """Wait until a pod is in a phase. Raises AgentError if it fails instead."""

        def look() -> dict[str, Any] | None:
            pod = self.pod(name)
            if pod is not None and pod["phase"] == "Failed" != phase:
                raise AgentError(f"pod {name} failed: {pod['reason']}: {pod['message']}")
            return pod if pod is not None and pod["phase"] == phase else None

        return wait(f"pod {name} to be {phase}", look)

    def await_no_pod(self, *names: str) -> None:
        """Wait until kubelet has forgotten some pods."""

        def are_gone() -> bool | None:
            return all(self.pod(name) is None for name in names) or None

        wait(f"{', '.join(names)} to end", are_gone)

    def run_pod(self, name: str, limits: Mapping[str, int], phase: str = "Running") -> dict[str, Any]:
        """Create a pod, and wait until it runs. Returns its status."""
        self.create_pod(name, limits)
        return self.await_pod(name, phase)

    def end_pods(self, *names: str) -> None:
        """Delete pods, and wait until they are gone."""
        for name in names:
            self.delete_pod(name)
        self.await_no_pod(*names)

    def files_of(self, container: Mapping[str, Any]) -> list[str]:
        """List the host's device files that a container of a pod gets now."""
        return files_of(container, self.folder / "cdi-specs")

    # ---------------------------------------------------------------- endpoints

    def fetch(self, path: str) -> str:
        """Ask the agent's endpoints. Raises OSError."""
        url = f"http://127.0.0.1:{self.port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=20) as answer:
                return str(answer.read().decode())
        except http.client.HTTPException as error:  # the agent ended while it answered
            raise OSError(str(error)) from error

    def status(self) -> dict[str, Any]:
        """Return the agent's status document. Raises OSError."""
        document: dict[str, Any] = json.loads(self.fetch("/status"))
        return document

    def await_ready(self) -> None:
        """Wait until nothing keeps the agent from its work, and kubelet, if it runs, has its lists."""

        def look() -> bool | None:
            if self.processes["agent"].poll() is not None:
                raise AgentError(f"the agent ended with status {self.processes['agent'].returncode}")
            try:
                status = self.status()
            except OSError:
                return None
            return (status["ready"] and self._is_offered(status["resources"])) or None

        wait("the agent to be ready", look)

    def _is_offered(self, resources: Sequence[Mapping[str, Any]]) -> bool:
        """Tell whether kubelet has read what the agent offers. That is a moment after it has opened its streams."""
        if "kubelet" not in self.processes:
            return True
        try:
            node = json.loads((self.folder / "pods/node.json").read_text())
        except FileNotFoundError:
            return False
        config = yaml.safe_load((self.folder / "config.yaml").read_text())
        for_claims = {resource["name"] for resource in config["resources"] if resource.get("offer") == "dra"}
        return all(
            node["allocatable"].get(found["name"], 0) == found["healthy"]
            for found in resources
            if found["name"] not in for_claims
        )


def manifest(name: str, limits: Mapping[str, int]) -> str:
    """Return a pod as anybody would write it."""
    shown = ", ".join(f"{resource}: {count}" for resource, count in limits.items())
    return f"""\
apiVersion: v1
kind: Pod
metadata: {{name: {name}, namespace: default}}
spec:
  containers:
    - name: worker
      image: pytorch
      resources:
        limits: {{{shown}}}
"""


def spec_edits(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Read the agent's CDI specs as a runtime does: qualified name → containerEdits."""
    documents = [json.loads(path.read_text()) for path in folder.glob("nodefabric-*.json")]
    return {f"{spec['kind']}={one['name']}": one["containerEdits"] for spec in documents for one in spec["devices"]}


def files_of(container: Mapping[str, Any], folder: Path) -> list[str]:
    """List the host's device files that a container gets now, by their paths and by CDI names of the agent's."""
    specs = spec_edits(folder)
    edits = [specs[name] for name in container["cdi_devices"] if name.startswith("nodefabric.io/")]
    by_name = {node.get("hostPath", node["path"]) for each in edits for node in each.get("deviceNodes", ())}
    return sorted(by_name | {node["host"] for node in container["device_nodes"]})


def in_pod(pod: Mapping[str, Any], *command: str) -> str:
    """Run a command in a pod's network, and return what it says. Raises AgentError if it fails."""
    entered = ("/usr/bin/nsenter", f"--net={pod['netns']}", *command)
    done = subprocess.run(entered, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AgentError(f"{' '.join(entered)} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def wait(what: str, look: Callable[[], T | None], seconds: float = DEADLINE_SECONDS) -> T:
    """Look until there is something. Raises Unavailable after the deadline."""
    deadline = time.monotonic() + seconds
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise Unavailable(f"gave up waiting for {what} after {seconds:g} s")
        time.sleep(0.05)
    return found


def settled(wrong: Callable[[], list[str]], seconds: float = DEADLINE_SECONDS) -> list[str]:
    """Look until nothing is wrong; return what still is after the deadline."""
    deadline = time.monotonic() + seconds
    while (found := wrong()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found
