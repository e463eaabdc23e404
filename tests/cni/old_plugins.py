"""The replaced plugins, as far as a node shows that they were there: a VF in a pod, and their files."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent.model.allocation import VfSettings
from tests.cni.tiny_node import PF_NETDEV, Rig, mac_of, netdev, vf

CONTAINER = "c0ffee" * 10 + "cafe"
SETTINGS = VfSettings(vlan=100, vlan_qos=3, vlan_proto="802.1ad", trust=True, spoofchk=False, max_tx_rate=500)
PLUGIN: dict[str, Any] = {
    "cniVersion": "1.0.0",
    "name": "rails",
    "type": "sriov",
    "deviceID": vf(0),
    "pciBusID": vf(0),
    "vlan": 100,
    "vlanQoS": 3,
    "vlanProto": "802.1ad",
    "trust": "on",
    "spoofchk": "off",
    "max_tx_rate": 500,
}


class OldSriov:
    """The plugin of type sriov on a tiny node."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.state = rig.folder / "root/var/lib/cni"
        self.run = rig.folder / "root/var/run/cni"

    def add(
        self,
        pod: Path,
        container_id: str = CONTAINER,
        ifname: str = "net1",
        index: int = 0,
        ipam: Mapping[str, Any] | None = None,
    ) -> None:
        """Attach a VF, and write down what that plugin writes."""
        link = self.rig.home(index)
        before = self.rig.settings(index)
        self.rig.machine.vf_control.apply(PF_NETDEV, index, SETTINGS)
        subprocess.run(["ip", "link", "set", link.name, "netns", str(pod)], check=True)
        self.rig.run_in(pod, "ip", "link", "set", link.name, "name", ifname, "up")
        was = {
            "HostIFName": link.name,
            "SpoofChk": before.spoofchk,
            "Trust": before.trust,
            "AdminMAC": before.mac,
            "EffectiveMAC": mac_of(index),
            "Vlan": 0,
            "VlanQoS": 0,
            "VlanProto": 0x8100,
            "MinTxRate": 0,
            "MaxTxRate": 0,
            "LinkState": 0,
            "MTU": link.mtu,
        }
        own = {"DPDKMode": False, "Master": PF_NETDEV, "MAC": "", "VFID": index, "ContIFNames": ifname}
        # Go keeps of the IPAM section what its struct has: the type.
        kept = {"ipam": {"type": ipam["type"]} if ipam else {}, "runtimeConfig": {}, "dns": {}}
        document = {**PLUGIN, "deviceID": vf(index), **own, **kept, "OrigVfState": was}
        del document["pciBusID"]
        self.write(container_id, ifname, document)
        self.write_path(index, str(pod))

    def file(self, container_id: str = CONTAINER, ifname: str = "net1", kind: str = "sriov") -> Path:
        """Name the plugin's file for an attachment."""
        return self.state / kind / f"{container_id}-{ifname}"

    def write(self, container_id: str, ifname: str, document: object, kind: str = "sriov") -> Path:
        """Write the plugin's file for an attachment."""
        file = self.file(container_id, ifname, kind)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(document if isinstance(document, bytes) else json.dumps(document).encode())
        return file

    def write_path(self, index: int, path: str) -> Path:
        """Write which namespace has a VF."""
        file = self.state / "sriov/pci" / vf(index)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(path)
        return file

    def remember_call(
        self, plugin: Mapping[str, Any], result: Mapping[str, Any], *, folder: str = "results", ifname: str = "net1"
    ) -> Path:
        """Write what libcni keeps of a call for a network of two plugins."""
        network = {"cniVersion": "1.0.0", "name": "rails", "plugins": [dict(plugin), {"type": "tuning"}]}
        arguments = {"IgnoreUnknown": "1", "K8S_POD_NAMESPACE": "ns", "K8S_POD_NAME": "pod", "K8S_POD_UID": "uid"}
        document = {
            "kind": "cniCacheV1",
            "containerId": CONTAINER,
            "config": base64.b64encode(json.dumps(network).encode()).decode(),
            "ifName": ifname,
            "networkName": "rails",
            "cniArgs": [list(pair) for pair in arguments.items()],
            "result": dict(result),
        }
        file = self.state / folder / f"rails-{CONTAINER}-{ifname}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(document))
        return file

    def lease(self, pod: Path, conf: Mapping[str, Any]) -> None:
        """Lease addresses for a pod from the real host-local, as the plugin does."""
        with self.rig.call(CONTAINER, pod, conf) as call:
            path = call.cni_path
        program = shutil.which("host-local", path=path)
        assert program is not None
        variables = {"CNI_COMMAND": "ADD", "CNI_CONTAINERID": CONTAINER, "CNI_NETNS": str(pod), "CNI_IFNAME": "net1"}
        subprocess.run(
            [program],
            input=json.dumps({**conf, "name": "rails", "cniVersion": "1.0.0"}).encode(),
            env={**variables, "CNI_PATH": path},
            check=True,
            capture_output=True,
        )


def adopt(rig: Rig) -> tuple[str, ...]:
    """Adopt, as the agent does at its start."""
    return rig.attachments.adopter.adopt()


def but_up(found: tuple[Any, ...]) -> tuple[Any, ...]:
    """All but whether it is up: the replaced plugins leave a VF down, and never wrote how it was."""
    return (*found[:3], found[4])


def host_name(index: int = 0) -> str:
    """Return the name of a VF's interface in the host."""
    return netdev(index)
