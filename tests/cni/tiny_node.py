"""A node of one PF with a few VFs on real kernel links, pods to attach them to, and the parts that do it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agent.errors import AgentError
from agent.hardware.host import Host, Link
from agent.hardware.recorded import Node
from agent.ledger import Ledger
from agent.model.allocation import LONGEST_PAUSE_SECONDS, PodRef, VfSettings
from agent.model.device import LinkLayer, Netdev, PciDevice, Snapshot
from agent.state import Latest
from cni import netconf
from cni.attachment import MAX_ADDING, Attachments, Settings
from cni.call import Call, GrantedDevice
from cni.call import Node as CniNode
from cni.heal import HEAL_SECONDS
from cni.ipam.leases import LeaseBook
from cni.server import CniServer
from hack.sim.machine import SimulatedMachine
from tests.cni.stand_ins import FixedDevices, NoFacts, attachments_of
from tests.waiting import until

PF = "0000:3b:00.0"
PF_NETDEV = "ens1f0"
TIMEOUT_SECONDS = 30.0
ASKED: dict[str, Any] = {"mac": "02:00:00:00:00:77", "mtu": 1400, "vlan": 100, "trust": "on"}
"""Settings that a netconf may ask for, none of which a VF has by itself."""


def vf(index: int) -> str:
    """Return the address of a VF."""
    return f"0000:3b:{(index + 2) // 8:02x}.{(index + 2) % 8}"


def netdev(index: int) -> str:
    """Return the name of a VF's interface in the host."""
    return f"{PF_NETDEV}v{index}"


def tiny_node(vfs: int) -> Node:
    """Describe the node's sysfs."""
    bridge: dict[str, Any] = {PF: _function(PF_NETDEV, 10, "02:00:00:00:00:01")}
    bridge[PF] |= {"sriov_totalvfs": "64\n", "sriov_numvfs": f"{vfs}\n"}
    for index in range(vfs):
        bridge[vf(index)] = _function(netdev(index), 11 + index, mac_of(index)) | {"physfn": [f"../{PF}"]}
        bridge[PF][f"virtfn{index}"] = [f"../{vf(index)}"]
    folder = "devices/pci0000:3a/0000:3a:00.0"
    names = {address: next(iter(function["net"])) for address, function in bridge.items()}
    sysfs = {
        "bus": {"pci": {"devices": {a: [f"../../../{folder}/{a}"] for a in bridge}, "drivers": {"mlx5_core": {}}}},
        "class": {"net": {name: [f"../../{folder}/{a}/net/{name}"] for a, name in names.items()}},
        "devices": {"pci0000:3a": {"0000:3a:00.0": bridge}},
    }
    boot = {"sys": {"kernel": {"random": {"boot_id": "boot\n"}}}}
    return Node("tiny", "", {"sys": sysfs, "proc": boot, "dev": {}})


def tiny_snapshot(
    vfs: int,
    *,
    in_pods: Sequence[int] = (),
    names: Mapping[int, str] = MappingProxyType({}),
    boot_id: str = "boot",
    bus: str = "3b",
) -> Snapshot:
    """Say what a scan of the node sees. Some VFs may be in pods, have other names, or sit on another bus."""

    def address(text: str) -> str:
        return text.replace("0000:3b:", f"0000:{bus}:")

    def netdevs(name: str, mac: str) -> tuple[Netdev, ...]:
        return (Netdev(name, 1, mac, 1500, "up", True, LinkLayer.ETHERNET, None),)

    base = PciDevice(address(PF), (), 0x020000, 0x15B3, 0x101D, "mlx5_core", 0, None, sriov_totalvfs=64)
    mine = tuple(
        replace(
            base,
            address=address(vf(index)),
            physfn=base.address,
            vf_index=index,
            sriov_totalvfs=0,
            netdevs=() if index in in_pods else netdevs(names.get(index, netdev(index)), mac_of(index)),
        )
        for index in range(vfs)
    )
    parent = replace(base, vfs=tuple(d.address for d in mine), netdevs=netdevs(PF_NETDEV, "02:00:00:00:00:01"))
    return Snapshot(devices=(parent, *mine), boot_id=boot_id, generation=1)


def mac_of(index: int) -> str:
    """Return the MAC that a VF has in the host."""
    return f"02:00:00:00:01:{index:02x}"


def _function(name: str, ifindex: int, mac: str) -> dict[str, Any]:
    ids = {"class": "0x020000", "vendor": "0x15b3", "device": "0x101e", "numa_node": "0"}
    interface = {"ifindex": str(ifindex), "address": mac, "mtu": "1500", "flags": "0x1002", "type": "1"}
    return {
        **{key: f"{value}\n" for key, value in ids.items()},
        "driver": ["../../../../bus/pci/drivers/mlx5_core"],
        "net": {name: {**{key: f"{value}\n" for key, value in interface.items()}, "device": ["../.."]}},
    }


def bind_to_vfio(folder: Path, index: int = 0) -> None:
    """Give a VF's device to programs, before the node is opened. The kernel then has no interface for it."""
    device = folder / "root/sys/bus/pci/devices" / vf(index)
    (folder / "root/sys/bus/pci/drivers/vfio-pci").mkdir()
    (device / "driver").unlink()
    (device / "driver").symlink_to("../../../../bus/pci/drivers/vfio-pci")
    shutil.rmtree(device / "net")


@dataclass
class Rig:
    """The node, opened, with what attaches its VFs."""

    folder: Path
    machine: SimulatedMachine
    ledger: Ledger
    attachments: Attachments
    open_parts: Callable[[], tuple[Ledger, Attachments]]
    granted: list[GrantedDevice] = field(default_factory=list)
    """What kubelet gave to whichever pod asks."""

    def close(self) -> None:
        """End the agent's parts."""
        self.attachments.close(seconds=TIMEOUT_SECONDS)
        self.ledger.close()

    def restart(self) -> None:
        """Open the agent's parts anew: another agent has written the books, and they have one writer at a time."""
        self.close()
        self.ledger, self.attachments = self.open_parts()

    def server(self, path: Path = Path("/unused")) -> CniServer:
        """Make a CNI server over the node, to which nobody listens yet."""
        return CniServer(path, self.attachments, condition=lambda: None, observe=lambda command: nullcontext())

    def pod(self, name: str = "pod") -> Path:
        """Make a pod's network namespace and return its path."""
        return make_pod(self.folder / f"{name}.netns")

    def remove(self, pod: Path) -> None:
        """Remove a pod's network namespace, as a runtime does."""
        subprocess.run(["umount", "--lazy", pod], check=True)
        pod.unlink()

    @contextmanager
    def call(
        self, container_id: str, pod: Path | None, conf: Mapping[str, Any], ifname: str = "net1"
    ) -> Iterator[Call]:
        """Make a CNI call as the server does."""
        netns = os.open(pod, os.O_RDONLY | os.O_CLOEXEC) if pod is not None else None
        try:
            yield Call(
                container_id=container_id,
                ifname=ifname,
                netns=netns,
                netns_path=str(pod) if pod is not None else "",
                pod=PodRef("default", f"pod-of-{container_id}"),
                cni_args="",
                cni_path=f"{self.folder}:/opt/cni/bin:/usr/lib/cni",
                conf=netconf.from_document({"cniVersion": "1.1.0", "name": "rails", **conf}),
            )
        finally:
            if netns is not None:
                os.close(netns)

    def add(self, container_id: str, pod: Path, ifname: str = "net1", **conf: Any) -> Mapping[str, Any]:
        """ADD a VF (the first one, if no deviceID is given)."""
        chained = "prevResult" in conf
        with self.call(container_id, pod, conf if chained else {"deviceID": vf(0), **conf}, ifname) as call:
            return self.attachments.add(call)

    def delete(self, container_id: str, pod: Path | None, ifname: str = "net1", **conf: Any) -> None:
        """DEL, as runtimes do it: with or without a namespace."""
        with self.call(container_id, pod, conf, ifname) as call:
            self.attachments.delete(call)

    def detach(self, container_id: str, pod: Path | None, ifname: str = "net1", **conf: Any) -> None:
        """DEL, and wait until all is back."""
        self.delete(container_id, pod, ifname, **conf)
        until(lambda: all(row.owner.container_id != container_id for row in self.ledger.attachments()))

    def check(self, container_id: str, pod: Path, ifname: str = "net1", **conf: Any) -> None:
        """CHECK."""
        with self.call(container_id, pod, conf, ifname) as call:
            self.attachments.check(call)

    def collect(self, *valid: tuple[str, str], name: str = "rails") -> None:
        """GC with the attachments that the runtime still knows, until what is to leave is back or in quarantine."""
        kept = [{"containerID": c, "ifname": i} for c, i in valid]
        with self.call("", None, {"name": name, "cni.dev/valid-attachments": kept}) as call:
            self.attachments.collect(call)
        until(lambda: not any(row in self.attachments.detacher.leaving for row in self.ledger.attachments()))

    def in_pod(self, pod: Path, ifname: str = "net1") -> Link | None:
        """Look an interface up in a pod."""
        with open(pod) as file:
            return self.machine.links.find(ifname, file.fileno())

    def link(self, pod: Path, ifname: str = "net1") -> Link:
        """Look up an interface that must be in a pod."""
        found = self.in_pod(pod, ifname)
        assert found is not None
        return found

    def home(self, index: int = 0) -> Link:
        """Look up the interface of a VF that must be in the host."""
        found = self.machine.find_netdev(vf(index))
        assert found is not None
        return found

    def run_in(self, pod: Path, *command: str) -> str:
        """Run a program in a pod's network."""
        return subprocess.run(["nsenter", f"--net={pod}", *command], check=True, capture_output=True, text=True).stdout

    def found(self, index: int = 0) -> tuple[Any, ...]:
        """Say all that a VF must have again when it is back."""
        link = self.machine.find_netdev(vf(index))
        settings = self.machine.vf_control.read(PF_NETDEV, index)
        return (link.name, link.mac, link.mtu, link.up, settings) if link is not None else (None, settings)

    def settings(self, index: int = 0) -> VfSettings:
        """Read what the PF enforces on a VF."""
        return self.machine.vf_control.read(PF_NETDEV, index)

    def await_back(self, *indices: int) -> None:
        """Wait until VFs are in no pod any more."""
        until(lambda: all(self.ledger.attachment_on(vf(i)) is None for i in indices or (0,)))

    def await_healed(self, index: int = 0) -> None:
        """Wait until a VF is in no pod any more, and look after it as the agent does: its namespace may end late."""

        def is_back() -> bool:
            with suppress(AgentError):
                self.attachments.heal(vf(index))
            return self.ledger.attachment_on(vf(index)) is None

        until(is_back)

    def await_withheld(self) -> str:
        """Wait until a device is in quarantine and nobody is at it any more. Return why it is there."""
        until(lambda: bool(self.ledger.quarantines()))
        until(lambda: not any(row in self.attachments.detacher.leaving for row in self.ledger.attachments()))
        (withheld,) = self.ledger.quarantines()
        return withheld.reason

    def leases(self) -> list[str]:
        """List the addresses that host-local has leased for the network of `ipam`."""
        folder = self.folder / "leases/rails"
        return sorted(p.name for p in folder.glob("*") if p.name != "lock" and not p.name.startswith("last_"))

    def ipam(self, **more: Any) -> dict[str, Any]:
        """Configure addresses from the real host-local plugin."""
        return {
            "type": "host-local",
            "dataDir": str(self.folder / "leases"),
            "ranges": [[{"subnet": "10.9.0.0/24"}], [{"subnet": "fd09::/64"}]],
            "routes": [{"dst": "10.10.0.0/16"}, {"dst": "fd10::/64", "gw": "fd09::77"}],
            **more,
        }

    def stub_ipam(self, script: str) -> dict[str, Any]:
        """Configure addresses from a shell script. `$CNI_COMMAND` is ADD or DEL."""
        file = self.folder / "stub"
        fresh = self.folder / "stub.new"
        fresh.write_text(f"#!/bin/sh\n{script}\n")
        fresh.chmod(0o755)
        fresh.rename(file)
        return {"type": "stub"}

    def settle_later(self) -> tuple[int, int]:
        """Give back what is owed, after the pause that follows a failure."""
        with closing(LeaseBook(self.ledger, clock=lambda: time.time() + LONGEST_PAUSE_SECONDS)) as later:
            return later.settle()

    def unplug(self, index: int = 0) -> None:
        """Take a VF off the PCI bus, as a lower sriov_numvfs does."""
        (self.machine.root / "sys/bus/pci/devices" / vf(index)).unlink()


@contextmanager
def open_rig(
    folder: Path,
    *,
    host: Callable[[SimulatedMachine], Host] = lambda machine: machine,
    seen: Callable[[Snapshot], Snapshot] = lambda snapshot: snapshot,
    boot_id: str = "boot",
    heal_seconds: float = HEAL_SECONDS,
    busy_seconds: float = 0.3,
    max_adding: int = MAX_ADDING,
    held: FixedDevices | None = None,
    facts: NoFacts | None = None,
    vfs: int = 3,
) -> Iterator[Rig]:
    """Open the agent's parts on a node, as at an agent's start; make one of so many VFs if none was created before.

    `host` may put something between the machine and what attaches, `seen` change what the scan saw; `heal_seconds` is
    how long healing waits, `busy_seconds` how long an ADD waits for the device's former owner, `max_adding` how many
    ADDs with a device may be under way, `held` what resources offer and kubelet gave, `facts`
    what containers were promised.
    """
    if not (folder / "root").exists():
        create(folder, vfs)
    machine = SimulatedMachine.open(folder)
    snapshot = seen(machine.scan())
    granted: list[GrantedDevice] = []
    held = held or FixedDevices()
    held.given = granted

    def open_parts() -> tuple[Ledger, Attachments]:
        ledger = Ledger.open(folder / "ledger.db", boot_id)
        settings = Settings(busy_seconds, heal_seconds, max_adding)
        node = CniNode(host(machine), ledger, Latest(snapshot))
        return ledger, attachments_of(node, held, facts=facts, settings=settings)

    rig = Rig(folder, machine, *open_parts(), open_parts, granted)
    try:
        yield rig
    finally:
        rig.close()
        machine.close()


def create(folder: Path, vfs: int = 3) -> None:
    """Make the node and its links, in the network namespace of the caller."""
    SimulatedMachine.create(folder, tiny_node(vfs))


def make_pod(path: Path) -> Path:
    """Make a network namespace, as a runtime does for a pod, at a path."""
    path.touch()
    subprocess.run(["unshare", f"--net={path}", "ip", "link", "set", "lo", "up"], check=True)
    return path


def stub_answer(*addresses: str, **more: Any) -> str:
    """Write the shell command by which a stub answers."""
    return f"echo '{json.dumps({'ips': [{'address': a} for a in addresses], **more})}'"
