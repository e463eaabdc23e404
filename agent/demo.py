"""`nodefabric demo`: the main job, shown on a simulated node.

The agent and the kubelet stand-in run as processes of their own, in network and mount namespaces
made for the demo, so that nothing of the machine is touched. An ordinary user gets a user namespace
around them. What is shown is read back from where it counts: the pods' namespaces, the agent's
status and metrics, the kernel's links.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import yaml

from agent import status
from agent.errors import AgentError, Unavailable
from agent.hardware.host import Link
from agent.model.device import Snapshot
from agent.model.topology import locality
from agent.sim import recorded
from agent.sim.machine import SimulatedMachine

CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
UNSHARE = "/usr/bin/unshare"
URL = "http://127.0.0.1:9808"
DEADLINE_SECONDS = 30.0
PODS = ("trainer-0", "trainer-1", "trainer-2")
SHOWN_METRICS = ("nodefabric_units{", "nodefabric_attachments{", "nodefabric_cni_duration_milliseconds_count")

T = TypeVar("T")


def enter_namespaces(arguments: Sequence[str]) -> None:
    """Become the same command in fresh namespaces. Does not return.

    Raises AgentError where the kernel does not let an ordinary user have them.
    """
    command = [UNSHARE, "--net", "--mount", "--propagation", "private"]
    if os.geteuid() != 0:
        command += ["--user", "--map-root-user"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode != 0:
        raise AgentError("this kernel gives no network namespace to an ordinary user: run the demo as root")
    os.execv(UNSHARE, [*command, sys.executable, "-m", "agent", "demo", "--inside", *arguments])  # noqa: S606


def run(node: str, relay: Path) -> int:
    """Play the demo and return 0 if all that it showed was as it must be."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nodefabric-demo-") as folder, ExitStack() as stack:
        stage = Stage(Path(folder), stack, relay)
        say(f"A simulated node: {node}")
        machine = stage.build_node(node)
        before = machine.links.by_device()
        snapshot = machine.scan()
        say(f"  {len(snapshot.gpus)} GPUs, {sum(d.is_pf for d in snapshot.devices)} SR-IOV adapters,")
        say(f"  {sum(d.is_vf for d in snapshot.devices)} VFs, each a real kernel link in a namespace of its own")
        say("Starting the kubelet stand-in and the agent, as two processes")
        stage.start()
        say(f"Creating pods from YAML: {', '.join(PODS)}")
        pods = stage.create_pods()
        say("")
        for line in what_each_got(pods, snapshot):
            say(line)
        for line in inside(pods):
            say(line)
        say("\nThe node's books (nodefabric status)\n")
        say(status.text(json.loads(fetch("/status"))))
        say("\nSome of its metrics\n")
        say("\n".join(line for line in fetch("/metrics").splitlines() if line.startswith(SHOWN_METRICS)))
        say("\nDeleting the pods")
        stage.delete_pods()
        wrong = await_return(machine, before)
        for line in wrong:
            say(f"  WRONG: {line}")
        left = await_empty_books()
        if not wrong and not left:
            say(f"  {len(before)} links are where they were, with name, MAC and MTU; no attachment is left")
        for line in left:
            say(f"  WRONG: {line}")
        stopped = stage.stop_agent()
        say(f"The agent ended {stopped * 1000:.0f} ms after SIGTERM. All in all {time.monotonic() - started:.1f} s.")
    return 1 if wrong or left else 0


class Stage:
    """The demo's processes and files."""

    def __init__(self, folder: Path, stack: ExitStack, relay: Path) -> None:
        self._folder = folder
        self._stack = stack
        self._relay = relay
        self._agent: subprocess.Popen[bytes]
        for name in ("cni", "manifests", "netns", "pods", "kubelet/device-plugins", "kubelet/pod-resources", "state"):
            (folder / name).mkdir(parents=True)

    def build_node(self, node: str) -> SimulatedMachine:
        """Lay the recorded node out and make its links."""
        self._stack.callback(SimulatedMachine.destroy, self._folder / "node")
        SimulatedMachine.create(self._folder / "node", recorded.load(recorded.find(node)))
        machine = SimulatedMachine.open(self._folder / "node")
        self._stack.callback(machine.close)
        return machine

    def start(self) -> None:
        """Start both processes and wait until kubelet knows every resource."""
        _run("/usr/sbin/ip", "link", "set", "lo", "up")
        config = self._write_configuration()
        folders = [self._folder / "cni", *(f for f in CNI_FOLDERS if f.is_dir())]
        env = {
            "NODEFABRIC_CNI_SOCKET": str(self._folder / "run/cni.sock"),
            "NODEFABRIC_CNI_SPOOL": str(self._folder / "state/spool"),
        }
        arguments = {
            "dir": self._folder / "kubelet",
            "manifests": self._folder / "manifests",
            "status": self._folder / "pods",
            "netns-dir": self._folder / "netns",
            "conflist": self._folder / "demo.conflist",
            "cni-path": ":".join(map(str, folders)),
        }
        options = [text for key, value in arguments.items() for text in (f"--{key}", str(value))]
        self._spawn("kubelet", ["-m", "agent.sim.kubelet", *options], env)
        run_agent = ["-m", "agent", "run", "--config", str(config), "--simulate", str(self._folder / "node")]
        self._agent = self._spawn("agent", [*run_agent, "--log-format", "text"], {"NODE_NAME": "demo-node"})
        wait("the agent and its three resources", lambda: _ready() or None)

    def _write_configuration(self) -> Path:
        for name in ("ptp", "host-local"):
            if not any((folder / name).is_file() for folder in CNI_FOLDERS):
                raise AgentError(f"the CNI plugin {name} is missing: install containernetworking-plugins")
        os.symlink(self._relay.resolve(), self._folder / "cni/nodefabric")
        conflist = {
            "cniVersion": "1.0.0",
            "name": "cluster",
            "plugins": [
                {"type": "ptp", "ipam": self._ipam("10.244.0.0/24", "cluster")},
                {"type": "nodefabric"},
            ],
        }
        (self._folder / "demo.conflist").write_text(json.dumps(conflist))
        config = {
            "resources": [
                {"name": "rdma/hca", "kind": "hca", "shares": 63, "select": {"vendors": ["15b3"]}},
                {"name": "rdma/vf", "kind": "vf", "select": {"vendors": ["15b3"]}, "network": "rails"},
                {"name": "nvidia.com/gpu", "kind": "gpu"},
            ],
            "networks": [{"name": "rails", "mtu": 4200, "ipam": self._ipam("192.168.100.0/24", "rails")}],
            "kubeletDir": str(self._folder / "kubelet"),
            "stateDir": str(self._folder / "state"),
            "runDir": str(self._folder / "run"),
        }
        path = self._folder / "config.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        return path

    def _ipam(self, subnet: str, name: str) -> dict[str, Any]:
        leases = str(self._folder / f"leases-{name}")
        return {"type": "host-local", "ranges": [[{"subnet": subnet}]], "dataDir": leases}

    def create_pods(self) -> list[dict[str, Any]]:
        """Write the manifests and wait for the pods to run."""
        for name in PODS:
            (self._folder / "manifests" / f"{name}.yaml").write_text(manifest(name))
        return [self._await_running(name) for name in PODS]

    def _await_running(self, name: str) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            pod = self._pod(name)
            if pod is not None and pod["phase"] == "Failed":
                raise AgentError(f"pod {name} failed: {pod['reason']}: {pod['message']}")
            return pod if pod is not None and pod["phase"] == "Running" else None

        return wait(f"pod {name} to run", look)

    def _pod(self, name: str) -> dict[str, Any] | None:
        try:
            pod: dict[str, Any] = json.loads((self._folder / "pods" / f"default_{name}.json").read_text())
        except (FileNotFoundError, ValueError):
            return None
        return pod

    def delete_pods(self) -> None:
        """Take the manifests away and wait until kubelet has forgotten the pods."""
        for name in PODS:
            (self._folder / "manifests" / f"{name}.yaml").unlink()
        wait("the pods to end", lambda: all(self._pod(name) is None for name in PODS) or None)

    def stop_agent(self) -> float:
        """Send SIGTERM and return how many seconds the agent took to end."""
        started = time.monotonic()
        self._agent.send_signal(signal.SIGTERM)
        if self._agent.wait(timeout=10) != 0:
            raise AgentError(f"the agent ended with status {self._agent.returncode}")
        return time.monotonic() - started

    def _spawn(self, name: str, arguments: list[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        log = self._stack.enter_context((self._folder / f"{name}.log").open("wb"))
        process = subprocess.Popen([sys.executable, *arguments], env={**os.environ, **env}, stdout=log, stderr=log)
        self._stack.callback(_end, process)
        self._stack.push(lambda kind, _error, _trace: _show_log(Path(log.name)) if kind is not None else None)
        return process


def manifest(name: str) -> str:
    """Return a pod as anybody would write it."""
    return f"""\
apiVersion: v1
kind: Pod
metadata: {{name: {name}, namespace: default}}
spec:
  containers:
    - name: worker
      image: pytorch
      resources:
        limits: {{rdma/hca: 1, rdma/vf: 1, nvidia.com/gpu: 1}}
"""


def what_each_got(pods: Sequence[Mapping[str, Any]], snapshot: Snapshot) -> list[str]:
    """Lay out each pod's devices, and how near its VF is to its GPU."""
    rows = []
    for pod in pods:
        held = {name: ids for c in pod["containers"] for name, ids in c["devices"].items()}
        gpu = snapshot.gpu_by_uuid[held["nvidia.com/gpu"][0]]
        vf = snapshot.by_address[held["rdma/vf"][0]]
        nodes = [n["host"] for c in pod["containers"] for n in c["device_nodes"] if "uverbs" in n["host"]]
        near = locality(snapshot.by_address[gpu.pci_address], vf).name
        rows.append(
            (pod["name"], f"GPU{gpu.index} {gpu.pci_address}", vf.address, near, held["rdma/hca"][0], " ".join(nodes))
        )
    return status.table(("POD", "GPU", "VF", "GPU-VF", "HCA SHARE", "CHARACTER DEVICES"), rows)


def inside(pods: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Show the interfaces inside the first pod's namespace, and a ping to the second pod over the VFs."""
    first, second = pods[0], pods[1]
    yield f"\nInside {first['name']}: ip -brief address\n"
    yield _run("/usr/bin/nsenter", f"--net={first['netns']}", "ip", "-brief", "address")
    address = next(ip["address"] for ip in second["cni_result"]["ips"] if ip["address"].startswith("192.168.100."))
    target = address.partition("/")[0]
    yield f"{first['name']} to {second['name']} over the VFs: ping {target}\n"
    yield _run("/usr/bin/nsenter", f"--net={first['netns']}", "ping", "-c", "3", "-i", "0.2", "-q", target)


def await_return(machine: SimulatedMachine, before: Mapping[str, Link]) -> list[str]:
    """Wait until all links are back as they were; tell what is not."""

    def wrong() -> list[str]:
        now = machine.links.by_device()
        return [
            f"{device} was {_shape(link)}, is {_shape(now[device]) if device in now else 'not in the host'}"
            for device, link in before.items()
            if device not in now or _shape(now[device]) != _shape(link)
        ]

    return _settled(wrong)


def await_empty_books() -> list[str]:
    """Wait until the agent has no attachment left; tell what there is."""
    return _settled(lambda: [f"{a['device']} is {a['state']}" for a in json.loads(fetch("/status"))["attachments"]])


def _settled(wrong: Callable[[], list[str]]) -> list[str]:
    deadline = time.monotonic() + 5
    while (found := wrong()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _shape(link: Link) -> tuple[str, str, int, bool]:
    return link.name, link.mac, link.mtu, link.up


def wait(what: str, look: Callable[[], T | None]) -> T:
    """Look until there is something. Raises Unavailable after the deadline."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        found = look()
        if found is not None:
            return found
        time.sleep(0.05)
    raise Unavailable(f"gave up waiting for {what} after {DEADLINE_SECONDS:g} s")


def fetch(path: str) -> str:
    """Ask the agent's endpoints."""
    with urllib.request.urlopen(URL + path, timeout=5) as answer:  # noqa: S310 -- http, as URL says
        return str(answer.read().decode())


def _ready() -> bool:
    try:
        return bool(json.loads(fetch("/status"))["ready"])
    except OSError:
        return False


def say(text: str) -> None:
    """Show a line at once."""
    print(text, flush=True)  # noqa: T201 -- the demo's output


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AgentError(f"{' '.join(command)} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _show_log(path: Path) -> None:
    say(f"--- the end of {path.name}")
    say("\n".join(path.read_text(errors="replace").splitlines()[-30:]))
