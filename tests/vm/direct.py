"""What attaches devices, in the test's own process: no kubelet, no relay, so that many cases take little time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.hardware.machine import Machine
from agent.ledger import Ledger
from agent.model.allocation import PodRef
from agent.state import Latest
from cni import netconf
from cni.attachment import Attachments
from cni.call import Call, Node
from tests.cni.stand_ins import attachments_of
from tests.vm.adapters import Pf, link, netdevs, wait_until

IPAM_PLUGINS = "/opt/cni/bin:/usr/lib/cni"


@dataclass
class Direct:
    """The agent's parts on the machine's hardware."""

    machine: Machine
    ledger: Ledger
    attachments: Attachments

    def add(self, container_id: str, pod: str, device: str, ifname: str = "net1", /, **conf: Any) -> Any:
        """ADD a device."""
        with self._call(container_id, pod, {"deviceID": device, **conf}, ifname) as call:
            return self.attachments.add(call)

    def check(self, container_id: str, pod: str, ifname: str = "net1", /, **conf: Any) -> None:
        """CHECK."""
        with self._call(container_id, pod, conf, ifname) as call:
            self.attachments.check(call)

    def delete(self, container_id: str, pod: str | None, *ifnames: str) -> None:
        """DEL, of net1 or of several, and wait until everything is back, or withheld."""
        for ifname in ifnames or ("net1",):
            with self._call(container_id, pod, {}, ifname) as call:
                self.attachments.delete(call)
        wait_until("the way back", lambda: not self._owns(container_id) or self.ledger.quarantines())

    def heal(self, device: str) -> str:
        """Wait until the reconciler finds something wrong and puts it right. Return what it was."""
        reason: str = wait_until(f"healing {device}", lambda: self.attachments.heal(device))
        return reason

    def _owns(self, container_id: str) -> bool:
        return any(row.owner.container_id == container_id for row in self.ledger.attachments())

    @contextmanager
    def _call(self, container_id: str, pod: str | None, conf: dict[str, Any], ifname: str) -> Iterator[Call]:
        path = f"/run/netns/{pod}" if pod is not None else ""
        netns = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if pod is not None else None
        document = {"cniVersion": "1.1.0", "name": "rails", "type": "nodefabric", **conf}
        try:
            read = netconf.from_document(document)
            yield Call(container_id, ifname, netns, path, PodRef("default", container_id), "", IPAM_PLUGINS, read)
        finally:
            if netns is not None:
                os.close(netns)


@contextmanager
def opened(folder: Path) -> Iterator[Direct]:
    """Open the parts on what the hardware is at this moment: make VFs and bind drivers before."""
    machine = Machine.open()
    ledger = Ledger.open(folder / "ledger.db", "boot")
    try:
        snapshot = machine.scan()
        parts = Direct(machine, ledger, attachments_of(Node(machine, ledger, Latest(snapshot))))
        yield parts
        parts.attachments.close(seconds=30)
    finally:
        ledger.close()
        machine.close()


def look(pf: Pf) -> dict[str, Any]:
    """All that a pod could leave behind: PF settings, and all that `ip` shows of the VFs in the host."""
    found: dict[str, Any] = {}
    for index, address in enumerate(pf.vfs()):
        found[f"{address} on its PF"] = pf.settings(index)
        for name in netdevs(address):
            shown = link(name)
            kept = ("ifname", "address", "mtu", "altnames", "promiscuity", "allmulti")
            flags = {flag for flag in shown["flags"] if flag not in ("LOWER_UP", "NO-CARRIER")}
            found[address] = ({key: shown.get(key) for key in kept}, flags, "xdp" in shown)
    return found
