"""A whole node in the machine: the agent and the kubelet stand-in as processes, with the real relay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hack.sim.stage import Stage
from tests.vm.adapters import Pf, run

ROOT = Path(__file__).resolve().parent.parent.parent
RELAY = ROOT / "build" / "shim" / "amd64" / "nodefabric-cni"
FOLDER = Path("/run/node")
NETNS = Path("/run/netns")

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
_BOUNDED = f"setpriv --inh-caps=-all --bounding-set=-all,{','.join(f'+{name}' for name in CAPABILITIES)}"
AS_A_CONTAINER = (
    *("unshare", "--mount", "--propagation", "slave", "sh", "-c"),
    f'mount -o remount,bind,ro /sys && exec {_BOUNDED} "$0" "$@"',
)


class Node(Stage):
    """A stage on the machine's own hardware, with plugins of the cluster's network and for addresses."""

    def __init__(self) -> None:
        FOLDER.mkdir()
        NETNS.mkdir(exist_ok=True)
        (FOLDER / "netns").symlink_to(NETNS)
        if not os.path.ismount(NETNS):
            run("mount", "--bind", str(NETNS), str(NETNS))
            run("mount", "--make-shared", str(NETNS))
        super().__init__(FOLDER, RELAY)
        self.addresses = FOLDER / "addresses"
        self.addresses.mkdir()
        for name, text in (("cluster", CLUSTER_PLUGIN), ("counter", IPAM_PLUGIN)):
            (FOLDER / "cni" / name).write_text(text)
            (FOLDER / "cni" / name).chmod(0o755)
        self.write_conflist([{"type": "cluster"}, {"type": "nodefabric"}])

    @property
    def relay_environment(self) -> dict[str, str]:
        """The agent's folders are where the relay looks by itself."""
        return {}

    def spawn(
        self, name: str, arguments: Sequence[str], env: Mapping[str, str], code: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a Python process.

        The agent has the rights of the DaemonSet's container: its capabilities, a /sys that cannot be written, and host
        mounts that show up later.
        """
        within = AS_A_CONTAINER if name == "agent" else ()
        with (self.folder / f"{name}.log").open("ab") as log:
            words = [*within, sys.executable, *arguments]
            process = subprocess.Popen(words, cwd=ROOT, env={**os.environ, **env}, stdout=log, stderr=log)
        self.processes[name] = process
        return process

    def allocatable(self) -> dict[str, int]:
        """What kubelet counts as healthy."""
        counts: dict[str, int] = json.loads((self.folder / "pods/node.json").read_text())["allocatable"]
        return counts


def in_netns(netns: str, *command: str) -> str:
    return run("nsenter", f"--net={netns}", *command)


def ping(netns: str, address: str) -> None:
    """Ping from a namespace; fails without an answer within 20 s."""
    in_netns(netns, "/run/busybox", "ping", "-c", "1", "-w", "20", address)


def configuration(first: Pf, second: Pf) -> Mapping[str, Any]:
    """The agent's configuration: VFs of both PFs in one VLAN, and soft RoCE on the second PF."""
    document: Mapping[str, Any] = yaml.safe_load(f"""\
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
stateDir: /var/lib/nodefabric
runDir: /run/nodefabric
cdiDir: /var/run/cdi
""")
    return document
