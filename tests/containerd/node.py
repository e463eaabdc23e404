"""A simulated node whose sandboxes are a real containerd's.

The kubelet stand-in admits pods and answers PodResources; what kubelet does with the runtime is done here, call by
call, so that a test can stop between two of them.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.hardware.host import Link
from agent.model.device import Snapshot
from hack.sim.demo import not_back, still_attached
from hack.sim.machine import SimulatedMachine
from hack.sim.stage import Stage, settled, wait
from proto.cri.v1 import api_pb2
from tests.containerd import image, machine
from tests.containerd.cri import Done, container_config, sandbox_config
from tests.containerd.runtime import Containerd

NVIDIA_MAJOR = 195
SPECS = Path("/var/run/cdi")
CDI_SPEC = SPECS / "nvidia.json"


@dataclass(frozen=True)
class Pod:
    """A pod that was admitted, and what the runtime is told of it."""

    name: str
    config: api_pb2.PodSandboxConfig
    containers: Sequence[Mapping[str, Any]]
    """With all that device plugins answered."""

    def units(self, resource: str) -> list[str]:
        return [unit for container in self.containers for unit in container["devices"].get(resource, [])]


@dataclass(frozen=True)
class Node:
    """The stage, with a runtime."""

    stage: Stage
    runtime: Containerd

    def start_kubelet(self, *options: str) -> None:
        """Start the stand-in as one that leaves sandboxes alone."""
        places = {"dir": "kubelet", "manifests": "manifests", "status": "pods", "netns-dir": "netns"}
        words = [text for key, name in places.items() for text in (f"--{key}", str(self.stage.folder / name))]
        self.stage.spawn("kubelet", ["-m", "hack.sim.kubelet", *words, "--seed", "7", *options], {})

    def configure(self, document: Mapping[str, Any]) -> None:
        """Write the agent's configuration."""
        self.stage.write_config({**document, "runtimeSocket": str(self.runtime.socket), "cdiDir": str(SPECS)})

    def start_agent(self, *options: str) -> None:
        """Start the agent, and wait until it is ready."""
        self.stage.start_agent(*options)
        self.stage.await_ready()

    def lose_books(self) -> None:
        """Have the agent killed and its ledger lost, and start the next one."""
        self.stage.end("agent", signal.SIGKILL)
        for file in (self.stage.folder / "state").glob("ledger.db*"):
            file.unlink()
        self.start_agent()

    def unhealed(self, hardware: SimulatedMachine, before: Mapping[str, Link]) -> list[str]:
        """Say what is not as before any pod, after some time to heal: links, books, addresses and CDI specs."""
        leases = self.stage.folder / "leases-rails/rails"

        def look() -> list[str]:
            owed = [path.name for path in leases.glob("192.168.*")]
            return [*not_back(hardware, before), *still_attached(self.stage), *owed, *specs("")]

        return settled(look)

    def install(self, version: str) -> None:
        """Write the cluster network, and have our plugin installed and chained into it."""
        ptp = {"type": "ptp", "ipam": self.stage.ipam("cluster", "10.244.0.0/24")}
        document = {"cniVersion": version, "name": "cluster", "plugins": [ptp]}
        (self.runtime.net_d / "10-cluster.conflist").write_text(json.dumps(document))
        self.command("install-cni", "--relay", str(self.stage.relay), "--chain")
        wait("the runtime to read it", self._knows_network)

    def command(self, name: str, *options: str) -> None:
        """Run one of the commands that install the plugin and take it away."""
        places = ["--target", str(self.runtime.plugins), "--conf-dir", str(self.runtime.net_d)]
        subprocess.run([sys.executable, "-m", "agent", name, *places, *options], check=True, capture_output=True)

    def _knows_network(self) -> bool | None:
        return "not initialized" not in self.runtime.cri.conditions()["NetworkReady"][1] or None

    # --------------------------------------------------------------------- pods

    def admit(self, name: str, limits: Mapping[str, int]) -> Pod:
        """Have kubelet grant a pod its devices."""
        self.stage.create_pod(name, limits)
        return self.admitted(name)

    def admitted(self, name: str) -> Pod:
        """Wait until a pod has all that kubelet gets for it before its sandbox."""
        admitted = self.stage.await_pod(name)
        folder = self.runtime.folder / "logs" / name
        folder.mkdir(exist_ok=True)
        config = sandbox_config(name, admitted["uid"], logs=folder, cgroup=f"/{self.runtime.cgroups.name}")
        return Pod(name, config, admitted["containers"])

    def forget(self, pod: Pod) -> None:
        """Have kubelet forget a pod."""
        self.stage.delete_pod(pod.name)
        self.stage.await_no_pod(pod.name)

    def run(self, pod: Pod, attempt: int = 0) -> str:
        """Make a pod's sandbox. Raises RuntimeRefused."""
        pod.config.metadata.attempt = attempt
        return self.runtime.cri.run_sandbox(pod.config)

    def start_container(self, pod: Pod, sandbox: str, attempt: int = 0, name: str = "") -> str:
        """Create and start a pod's only container, or the one of this name."""
        (granted,) = [each for each in pod.containers if name in ("", each["name"])]
        config = container_config(granted, image.POD, image.SLEEP, attempt)
        container = self.runtime.cri.create_container(sandbox, config, pod.config)
        self.runtime.cri.start_container(container)
        return container

    def shell(self, container: str, script: str) -> Done:
        """Run a script in a container."""
        return self.runtime.cri.execute(container, "/bin/busybox", "sh", "-c", f"PATH=; alias b=/bin/busybox\n{script}")

    def end(self, sandbox: str) -> None:
        """Stop and remove a sandbox as kubelet was seen to: stopped once, and twice again before it is removed."""
        for _ in range(3):
            self.runtime.cri.stop_sandbox(sandbox)
        self.runtime.cri.remove_sandbox(sandbox)

    def links(self, sandbox: str) -> dict[str, dict[str, Any]]:
        """Look at the interfaces inside a sandbox, by name."""
        command = ["nsenter", f"--net={self.runtime.netns(sandbox)}", "ip", "-json", "address", "show"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return {link["ifname"]: link for link in json.loads(done.stdout)}


def specs(suffix: str = ".json") -> list[str]:
    """List the files of devices that were chosen for pods: their CDI specs, or with what lies beside these too."""
    kinds = "nodefabric-claim-", "nodefabric-slot-"
    return [path.name for path in SPECS.iterdir() if path.name.startswith(kinds) and path.name.endswith(suffix)]


def make_devices(snapshot: Snapshot, root: Path) -> None:
    """Make the device files that a simulated node's sysfs tells of, and the CDI spec of its GPUs.

    The runtime looks for specs where it always does, the agent below the node's own root.
    """
    rdma = {c.path for device in snapshot.devices for r in device.rdma_devices for c in r.char_devices}
    for name in (*rdma, "/dev/infiniband/rdma_cm"):
        machine.make_rdma_device(name)
    devices = []
    for gpu in snapshot.gpus:
        path = Path(f"/dev/nvidia{gpu.index}")
        machine.make_device(path, (NVIDIA_MAJOR, gpu.index))
        edits = {"deviceNodes": [{"path": str(path)}], "env": [f"GPU_BY_CDI={gpu.uuid}"]}
        devices.append({"name": gpu.uuid, "containerEdits": edits})
    for spec in (CDI_SPEC, root / CDI_SPEC.relative_to("/")):
        spec.parent.mkdir(parents=True)
        spec.write_text(json.dumps({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices}))
