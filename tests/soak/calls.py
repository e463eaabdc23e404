"""The real relay, called as a runtime calls it, and what its answers promise."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.soak.world import Promise, Settings
from tests.waiting import SECONDS

RELAY = Path(__file__).resolve().parents[2] / "build/shim/native/nodefabric-cni"
NETWORK = "rails"


@dataclass(frozen=True)
class Answer:
    """What the relay told the runtime."""

    status: int
    document: Mapping[str, Any]

    @property
    def succeeded(self) -> bool:
        return self.status == 0


@dataclass(frozen=True)
class Pod:
    """A pod's sandbox."""

    container_id: str
    netns: Path
    inode: int

    @property
    def name(self) -> str:
        return f"pod-of-{self.container_id}"

    @property
    def uid(self) -> str:
        """As the API server gave it."""
        return f"uid-of-{self.container_id}"


@dataclass
class Call:
    """A relay at work."""

    command: str
    process: subprocess.Popen[bytes]
    answer: Answer | None = None

    def finish(self, seconds: float = SECONDS) -> Answer:
        """Wait for the answer."""
        if self.answer is None:
            stdout, stderr = self.process.communicate(timeout=seconds)
            assert stderr == b"", stderr.decode()
            self.answer = Answer(self.process.returncode, json.loads(stdout) if stdout.strip() else {})
        return self.answer


def start(
    folder: Path, command: str, pod: Pod | None, conf: Mapping[str, Any], ifname: str, env: Mapping[str, str]
) -> Call:
    """Start a relay on a node's folder. `env` may take the place of what the runtime says by itself."""
    document = {"cniVersion": "1.1.0", "name": NETWORK, "type": "nodefabric", **conf}
    variables = {
        "CNI_COMMAND": command,
        "CNI_PATH": str(folder / "bin"),
        "NODEFABRIC_CNI_SOCKET": str(folder / "cni.sock"),
        "NODEFABRIC_CNI_SPOOL": str(folder / "spool"),
    }
    if pod is not None:
        variables |= {
            "CNI_CONTAINERID": pod.container_id,
            "CNI_IFNAME": ifname,
            "CNI_NETNS": str(pod.netns),
            "CNI_ARGS": ";".join(
                ("IgnoreUnknown=1", "K8S_POD_NAMESPACE=default", f"K8S_POD_NAME={pod.name}", f"K8S_POD_UID={pod.uid}")
            ),
        }
    pipe = subprocess.PIPE
    process = subprocess.Popen([RELAY], env={**variables, **env}, stdin=pipe, stdout=pipe, stderr=pipe)
    assert process.stdin is not None
    process.stdin.write(json.dumps(document).encode())
    process.stdin.close()
    process.stdin = None
    return Call(command, process)


def promised(answer: Answer, pod: Pod, conf: Mapping[str, Any], ifname: str) -> tuple[Promise, ...]:
    """Read out of the answer to an ADD what each device in the pod must be like from now on."""
    found = []
    for index, interface in enumerate(answer.document.get("interfaces", [])):
        if (device := interface.get("pciID")) is None:
            continue
        ips = answer.document.get("ips", [])
        found.append(
            Promise(
                device=device,
                container_id=pod.container_id,
                cni_ifname=ifname,
                ifname=interface["name"],
                netns=str(pod.netns),
                mac=interface.get("mac"),
                mtu=interface.get("mtu"),
                settings=wanted_settings(conf),
                addresses=tuple(ip["address"].partition("/")[0] for ip in ips if ip.get("interface") == index),
            )
        )
    return tuple(found)


def names(promises: Iterable[Promise]) -> Iterator[str]:
    """List the devices and addresses that were promised."""
    for promise in promises:
        yield promise.device
        yield from promise.addresses


def wanted_settings(conf: Mapping[str, Any]) -> Settings:
    """Say which settings a netconf asks for, in the ledger's words."""
    words = {"vlan": "vlan", "vlanQoS": "vlan_qos", "vlanProto": "vlan_proto", "max_tx_rate": "max_tx_rate"}
    flags = {"trust": "trust", "spoofchk": "spoofchk"}
    found = {setting: conf[key] for key, setting in words.items() if key in conf}
    found |= {setting: conf[key] == "on" for key, setting in flags.items() if key in conf}
    if "mac" in conf:
        found["mac"] = conf["mac"]
    return found
