"""A whole node in the machine: the agent and the kubelet stand-in as processes, with the real relay."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.vm.adapters import Pf, run, wait_until

ROOT = Path(__file__).resolve().parent.parent.parent
RELAY = ROOT / "build" / "shim" / "amd64" / "nodefabric-cni"
FOLDER = Path("/run/node")
NETNS = Path("/run/netns")
START_SECONDS = 180.0
"""The emulated processor takes some 20 s to import what the agent needs."""

CLUSTER_PLUGIN = """\
#!/bin/sh
# Stands for the cluster's own network: the plugin that the relay is chained after.
[ "$CNI_COMMAND" != ADD ] || echo '{"cniVersion": "1.0.0", "interfaces": [{"name": "eth0"}]}'
"""

IPAM_PLUGIN = """\
#!/bin/sh
# One address for each container and interface, each a file. ADD stops while a file `hold` is there.
cd /run/node/addresses || exit 1
case $CNI_COMMAND in
ADD)
    n=1
    until (set -C; echo "$CNI_CONTAINERID $CNI_IFNAME" > "10.77.0.$n") 2> /dev/null; do n=$((n + 1)); done
    if [ -e hold ]; then : > held; fi
    while [ -e hold ]; do sleep 0.1; done
    echo "{\\"cniVersion\\": \\"1.0.0\\", \\"ips\\": [{\\"address\\": \\"10.77.0.$n/24\\"}]}"
    ;;
DEL)
    for file in 10.*; do
        if [ "$(cat "$file" 2> /dev/null)" = "$CNI_CONTAINERID $CNI_IFNAME" ]; then rm -f "$file"; fi
    done
    ;;
esac
exit 0
"""

CAPABILITIES = ("net_admin", "sys_admin")
"""Those of the agent's container in daemonset/base/daemonset.yaml."""
AS_A_CONTAINER = f"""\
mount -o remount,bind,ro /sys &&
exec setpriv --inh-caps=-all --bounding-set=-all,{",".join(f"+{name}" for name in CAPABILITIES)} "$0" "$@"
"""

CONFLIST = {
    "cniVersion": "1.0.0",
    "name": "cluster",
    "plugins": [{"type": "cluster"}, {"type": "nodefabric"}],
}


class Node:
    """Starts and stops the processes, runs pods, and tells what they see."""

    def __init__(self, config: str) -> None:
        self.plugins = FOLDER / "cni"
        self.addresses = FOLDER / "addresses"
        self.manifests = FOLDER / "manifests"
        self._status = FOLDER / "status"
        self._config = FOLDER / "config.yaml"
        self._agent: subprocess.Popen[bytes] | None = None
        self._kubelet: subprocess.Popen[bytes] | None = None
        for folder in (self.plugins, self.addresses, self.manifests, NETNS):
            folder.mkdir(parents=True, exist_ok=True)
        if not os.path.ismount(NETNS):
            run("mount", "--bind", str(NETNS), str(NETNS))
            run("mount", "--make-shared", str(NETNS))
        shutil.copy(RELAY, self.plugins / "nodefabric")
        for name, text in (("cluster", CLUSTER_PLUGIN), ("counter", IPAM_PLUGIN)):
            (self.plugins / name).write_text(text)
            (self.plugins / name).chmod(0o755)
        (FOLDER / "cluster.conflist").write_text(json.dumps(CONFLIST))
        self._config.write_text(config)

    # ---------------------------------------------------------------- processes

    def start_kubelet(self) -> None:
        """Start the kubelet stand-in. It is up when its socket is there."""
        words: list[str | Path] = ["--dir", "/var/lib/kubelet", "--manifests", self.manifests, "--status", self._status]
        words += ["--netns-dir", NETNS, "--conflist", FOLDER / "cluster.conflist", "--cni-path", self.plugins]
        self._kubelet = self._start("kubelet", "hack.sim.kubelet", *words)
        wait_until("kubelet's socket", Path("/var/lib/kubelet/device-plugins/kubelet.sock").exists, START_SECONDS)

    def start_agent(self) -> None:
        """Start the agent and wait until it is ready, with all resources registered.

        It has the rights of the DaemonSet's container: its capabilities, a /sys that cannot be written, and host
        mounts that show up later.
        """
        words = (sys.executable, "-m", "agent", "run", "--config", str(self._config))
        self._agent = self._spawn(
            "agent", "unshare", "--mount", "--propagation", "slave", "sh", "-c", AS_A_CONTAINER, *words
        )
        wait_until("the agent's readiness", self._ready, START_SECONDS)

    def stop_agent(self, number: signal.Signals) -> None:
        """Send the agent a signal and wait for its end."""
        assert self._agent is not None
        self._agent.send_signal(number)
        self._agent.wait(30)
        self._agent = None

    def close(self) -> None:
        """End all pods and processes."""
        for process in (self._kubelet, self._agent):
            if process is not None:
                process.terminate()
                process.wait(60)

    def _start(self, log: str, module: str, *words: str | Path) -> subprocess.Popen[bytes]:
        return self._spawn(log, sys.executable, "-m", module, *words)

    def _spawn(self, log: str, *words: str | Path) -> subprocess.Popen[bytes]:
        with (FOLDER / f"{log}.log").open("ab") as output:
            return subprocess.Popen(words, cwd=ROOT, stdout=output, stderr=output, stdin=subprocess.DEVNULL)

    def _ready(self) -> bool:
        assert self._agent is not None
        assert self._agent.poll() is None, "the agent ended"
        try:
            with urllib.request.urlopen("http://127.0.0.1:9808/readyz", timeout=10):
                return True
        except (OSError, urllib.error.HTTPError):
            return False

    # --------------------------------------------------------------------- pods

    def apply(self, name: str, *, host_network: bool = False, **limits: int) -> None:
        """Let kubelet run a pod; `vf=1` asks for one rdma/vf. In the host's network it has no sandbox."""
        resources = {f"rdma/{resource}": count for resource, count in limits.items()}
        pod = {
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {
                "hostNetwork": host_network,
                "containers": [{"name": "main", "resources": {"limits": resources}}],
            },
        }
        scratch = self.manifests / f".{name}"
        scratch.write_text(json.dumps(pod))
        scratch.rename(self.manifests / f"{name}.json")

    def remove(self, name: str) -> None:
        """Let kubelet end a pod, and wait until it did."""
        (self.manifests / f"{name}.json").unlink()
        wait_until(f"the end of pod {name}", lambda: self.pod(name) is None, 90)

    def pod(self, name: str) -> dict[str, Any] | None:
        """What kubelet shows of a pod."""
        try:
            shown: dict[str, Any] = json.loads((self._status / f"default_{name}.json").read_text())
        except FileNotFoundError:
            return None
        return shown

    def running(self, name: str) -> dict[str, Any]:
        """Wait until a pod runs and return what kubelet shows of it."""

        def runs() -> dict[str, Any] | None:
            pod = self.pod(name)
            assert pod is None or (pod["phase"] != "Failed" and pod["attempts"] < 10), pod
            return pod if pod is not None and pod["phase"] == "Running" else None

        found: dict[str, Any] = wait_until(f"pod {name} to run", runs, 90)
        return found

    def capacity(self) -> dict[str, int]:
        """What kubelet counts, healthy or not."""
        counts: dict[str, int] = json.loads((self._status / "node.json").read_text())["capacity"]
        return counts

    def allocatable(self) -> dict[str, int]:
        """What kubelet counts as healthy."""
        counts: dict[str, int] = json.loads((self._status / "node.json").read_text())["allocatable"]
        return counts

    # -------------------------------------------------------------------- looks

    def status(self) -> dict[str, Any]:
        """What the agent says of itself."""
        with urllib.request.urlopen("http://127.0.0.1:9808/status", timeout=30) as answer:
            document: dict[str, Any] = json.load(answer)
        return document

    def relay(self, command: str, container: str, netns: str, ifname: str, conf: Mapping[str, Any]) -> Any:
        """Call the relay as a runtime does, and return what it answered."""
        env = {
            **os.environ,
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": container,
            "CNI_NETNS": netns,
            "CNI_IFNAME": ifname,
            "CNI_ARGS": "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=direct",
            "CNI_PATH": str(self.plugins),
        }
        document = {"cniVersion": "1.0.0", "name": "direct", "type": "nodefabric", **conf}
        done = subprocess.run(
            [self.plugins / "nodefabric"],
            input=json.dumps(document).encode(),
            env=env,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, (done.stdout, done.stderr)
        return json.loads(done.stdout) if done.stdout else None

    def logs(self) -> str:
        """The end of what the processes said."""
        return "\n".join(
            f"--- {log.name}\n" + "\n".join(line[:400] for line in log.read_text(errors="replace").splitlines()[-30:])
            for log in sorted(FOLDER.glob("*.log"))
        )


def in_netns(netns: str, *command: str) -> str:
    return run("nsenter", f"--net={netns}", *command)


def ping(netns: str, address: str) -> None:
    """Ping from a namespace; fails without an answer within 20 s."""
    in_netns(netns, "/run/busybox", "ping", "-c", "1", "-w", "20", address)


def configuration(first: Pf, second: Pf) -> str:
    """The agent's configuration: VFs of both PFs in one VLAN, and soft RoCE on the second PF."""
    return f"""\
resources:
  - {{name: rdma/vf, kind: vf, select: {{pf: ["{first.address}"]}}, network: rails}}
  - {{name: rdma/storage, kind: vf, select: {{pf: ["{second.netdev}#0"]}}, network: storage}}
  - {{name: rdma/hca, kind: hca, shares: 8, select: {{rdmaDevices: [rxe0]}}}}
networks:
  - name: rails
    vlan: 100
    vlanQoS: 3
    trust: "on"
    spoofchk: "off"
    max_tx_rate: 200
    mtu: 1400
    ipam: {{type: counter}}
  - {{name: storage, vlan: 100, mac: "02:00:00:00:00:07", ipam: {{type: counter}}}}
cni: {{requireGrant: false}}  # tests take VFs by hand, too
"""
