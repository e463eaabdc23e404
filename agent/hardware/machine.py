"""The real machine as a `Host`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from agent.hardware import sysfs
from agent.hardware.host import Link, Watch
from agent.hardware.netlink import Netlink
from agent.hardware.nvml import Nvml
from agent.hardware.rtnetlink import IFF_UP
from agent.hardware.uevents import Uevents
from agent.model.device import Snapshot


@dataclass(frozen=True)
class Machine:
    """The machine this process runs on."""

    root: Path
    links: Netlink
    vf_control: Netlink
    gpus: Nvml

    @classmethod
    def open(cls, root: Path = Path("/")) -> Machine:
        """Open the machine whose /sys, /proc and /dev are found under `root`."""
        netlink = Netlink()
        return cls(root, netlink, netlink, Nvml())

    def scan(self) -> Snapshot:
        """Read the hardware."""
        snapshot = sysfs.scan(self.root)
        gpus, problems = self.gpus.read()
        return replace(snapshot, gpus=gpus, problems=snapshot.problems + problems)

    def find_netdev(self, device: str) -> Link | None:
        """Find the interface of a PCI device in the host's namespace.

        Read from sysfs, which lists a function's interfaces by itself: no netlink dump of a
        thousand links to find one.
        """
        folder = self.root / "sys/bus/pci/devices" / device / "net"
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            return None
        for name in names:
            link = _read_link(folder / name, device)
            if link is not None:
                return link
        return None

    def watch(self, on_event: Callable[[str], None]) -> Watch:
        """Call `on_event` at kernel events about PCI, network and RDMA devices."""
        return Uevents(on_event)

    def close(self) -> None:
        """Let go of sockets and threads."""
        self.links.close()
        self.gpus.close()


def _read_link(folder: Path, device: str) -> Link | None:
    """Read one interface. None for a VF's representor, and for one that is renamed or moved just now."""

    def read(file: str) -> str:
        return (folder / file).read_text().strip()

    try:
        flags = int(read("flags"), 16)
        link = Link(
            name=folder.name,
            ifindex=int(read("ifindex")),
            mac=read("address"),
            mtu=int(read("mtu")),
            up=bool(flags & IFF_UP),
            carrier=flags & IFF_UP != 0 and read("carrier") == "1",
            device=device,
        )
    except (OSError, ValueError):
        return None
    try:
        return None if "vf" in read("phys_port_name") else link
    except OSError:
        return link  # most drivers have no such name
