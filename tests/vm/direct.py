"""What attaches devices, in the test's own process: no kubelet, no relay, so that many cases take little time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.hardware.machine import Machine
from agent.ledger import Ledger
from agent.model.allocation import PodRef
from agent.state import Latest
from cni import netconf
from cni.attachment import Attachments
from cni.call import Call, GrantedDevice, Node
from tests.cni.stand_ins import FixedDevices, attachments_of
from tests.live import Live
from tests.vm.adapters import Pf, link, netdevs, wait_until

IPAM_PLUGINS = "/opt/cni/bin:/usr/lib/cni"


@dataclass
class Direct:
    """The agent's parts on the machine's hardware."""

    machine: Machine
    ledger: Ledger
    attachments: Attachments
    granted: list[GrantedDevice] = field(default_factory=list)
    """What each pod was given."""
    vfs: tuple[str, ...] = ()

    def do(self, verb: str, container_id: str, pod: str | None, ifname: str = "net1", /, **conf: Any) -> Any:
        """Make one call."""
        path = f"/run/netns/{pod}" if pod is not None else ""
        netns = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if pod is not None else None
        document = {"cniVersion": "1.1.0", "name": "rails", "type": "nodefabric", **conf}
        owner = PodRef("default", container_id, f"uid-{container_id}")
        try:
            read = netconf.from_document(document)
            return getattr(self.attachments, verb)(
                Call(container_id, ifname, netns, path, owner, "", IPAM_PLUGINS, read)
            )
        finally:
            if netns is not None:
                os.close(netns)

    def add(self, container_id: str, pod: str, device: str, ifname: str = "net1", /, **conf: Any) -> Any:
        """ADD a device."""
        return self.do("add", container_id, pod, ifname, deviceID=device, **conf)

    def check(self, container_id: str, pod: str, ifname: str = "net1", /, **conf: Any) -> None:
        """CHECK."""
        self.do("check", container_id, pod, ifname, **conf)

    def delete(self, container_id: str, pod: str | None, *ifnames: str) -> None:
        """DEL, of net1 or of several, and wait until everything is back, or withheld."""
        for ifname in ifnames or ("net1",):
            self.do("delete", container_id, pod, ifname)
        wait_until("the way back", lambda: not self._owns(container_id) or self.ledger.quarantines())

    def bring_home(self, container_id: str, pod: str | None, ifname: str = "net1", /, **conf: Any) -> None:
        """DEL of the last interface, and see that nothing was withheld."""
        self.do("delete", container_id, pod, ifname, **conf)
        self.await_back()

    def heal(self, device: str) -> str:
        """Wait until the reconciler finds something wrong and puts it right. Return what it was."""
        reason: str = wait_until(f"healing {device}", lambda: self.attachments.heal(device))
        return reason

    def await_back(self) -> None:
        """Wait until nothing is in a pod, and see that nothing was withheld."""
        wait_until("empty books", lambda: not self.ledger.attachments())
        assert self.ledger.quarantines() == ()

    def rdma_names(self, pod: str | None = None) -> list[str]:
        """Name the RDMA devices in a pod or in the host."""
        if pod is None:
            return [found.name for found in self.machine.rdma.devices()]
        with open(f"/run/netns/{pod}") as netns:
            return [found.name for found in self.machine.rdma.devices(netns.fileno())]

    def address(self, pod: str, cidr: str) -> None:
        """Give net1 of a pod an address, as IPAM would."""
        with open(f"/run/netns/{pod}") as inside:
            self.machine.links.configure("net1", inside.fileno(), (cidr,), ())

    def _owns(self, container_id: str) -> bool:
        return any(row.owner.container_id == container_id for row in self.ledger.attachments())


@contextmanager
def opened(folder: Path, *, follows: bool = False) -> Iterator[Direct]:
    """Open the parts on what the hardware is at this moment, or, if they follow it, at each: so make VFs before."""
    machine = Machine.open()
    ledger = Ledger.open(folder / "ledger.db", "boot")
    try:
        snapshot = Live(machine.scan) if follows else Latest(machine.scan())
        granted: list[GrantedDevice] = []
        parts = Direct(machine, ledger, attachments_of(Node(machine, ledger, snapshot), FixedDevices(granted)), granted)
        yield parts
        parts.attachments.close(seconds=30)
    finally:
        ledger.close()
        machine.close()


def look(*pfs: Pf) -> dict[str, Any]:
    """All that a pod could leave behind: PF settings, and all that `ip` shows of the VFs in the host."""
    found: dict[str, Any] = {}
    for pf, (index, address) in ((each, vf) for each in pfs for vf in enumerate(each.vfs())):
        found[f"{address} on its PF"] = pf.settings(index)
        for name in netdevs(address):
            shown = link(name)
            kept = ("ifname", "address", "mtu", "altnames", "promiscuity", "allmulti")
            flags = {flag for flag in shown["flags"] if flag not in ("LOWER_UP", "NO-CARRIER")}
            found[address] = ({key: shown.get(key) for key in kept}, flags, "xdp" in shown)
    return found
