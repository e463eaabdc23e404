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
from agent.hardware.vf_control import PfNetlink
from agent.model.device import Snapshot

_RENAMES = 3
"""How often an interface may be renamed (by udev) between the list of names and the look at it."""


@dataclass(frozen=True)
class Machine:
    """The machine this process runs on."""

    root: Path
    links: Netlink
    vf_control: PfNetlink
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

        sysfs lists a function's interfaces by itself: no netlink dump of a thousand links to find one.
        """
        folder = f"{self.root}/sys/bus/pci/devices/{device}/net"
        for _ in range(_RENAMES):
            try:
                names = sorted(os.listdir(folder))
            except OSError:
                return None
            if not names:
                return None
            link = self.links.find_own(names, device)
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
