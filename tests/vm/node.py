"""A whole node in the machine: the agent and the kubelet stand-in as processes, with the real relay."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hack.sim.stage import Stage
from tests.vm.adapters import Pf, run

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RELAY = ROOT / "build" / "shim" / "amd64" / "nodefabric-cni"
FOLDER = Path("/run/node")
NETNS = Path("/run/netns")

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
        for name in ("cluster", "counter"):
            shutil.copy(HERE / f"plugin-{name}", FOLDER / "cni" / name)
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
    text = (HERE / "configuration.yaml").read_text()
    document: Mapping[str, Any] = yaml.safe_load(
        text.replace("FIRST_ADDRESS", f'"{first.address}"').replace("SECOND_NETDEV", second.netdev)
    )
    return document
