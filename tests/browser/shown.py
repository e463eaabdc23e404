"""A node for the page to show: recorded hardware, a real ledger, the real overview and endpoints, and no agent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from agent.ledger import Ledger
from agent.model.allocation import PodRef
from agent.model.device import PciDevice, Snapshot
from agent.model.health import HEALTHY, Health
from agent.offer.offer import Unit
from agent.report import page
from agent.report.endpoints import EndpointServer, Pages
from tests.agent.report.reported_node import ReportedNode
from tests.node import attach, granted, owner

KINDS = {"rdma/hca": "hca", "rdma/vf": "vf", "nvidia.com/gpu": "gpu"}
SHARES = 63


def offered(unit_id: str, resource_name: str, device: str, health: Health = HEALTHY, gpu: str = "") -> Unit:
    """Make one unit, as the device plugins offer it."""
    return Unit(unit_id, resource_name, "vf", device, health, 0, gpu=gpu)


class ShownNode(ReportedNode):
    """What the page shows, and how it changes."""

    def __init__(self, snapshot: Snapshot, ledger: Ledger) -> None:
        super().__init__(snapshot, offer(snapshot), KINDS, ledger)
        self.ledger = ledger
        self.server: EndpointServer | None = None
        for name in list(self.overview.conditions.found):
            self.overview.conditions.set(name, None)

    @property
    def url(self) -> str:
        assert self.server is not None
        return f"http://127.0.0.1:{self.server.port}/"

    def open(self, port: int = 0) -> None:
        """Answer the page's questions."""
        pages = Pages(lambda accept: ("text/plain", b""), self.overview.served, files=page.load())
        self.server = EndpointServer.open("127.0.0.1", port, pages)

    def close(self) -> None:
        """Be away."""
        assert self.server is not None
        self.server.close()

    def attach(self, vf: str, pod: PodRef, number: int = 1) -> None:
        """Put a VF into a pod, in the books."""
        self.ledger.grant(granted("rdma/vf", {vf: vf}))
        self.ledger.bind([vf], pod)
        row = attach(self.ledger, vf, owner(f"{number:012x}", "eth0", pod), ifname="net1")
        address = {"address": f"192.168.100.{number}/24", "interface": 0}
        self.ledger.finish_attach([row.attachment_id], {"interfaces": [{"name": "net1"}], "ips": [address]})

    def spoil(self, device: str, health: Health) -> None:
        """Give all units of a device another health."""
        before = self.units
        self.units = {
            name: tuple(replace(unit, health=health) if unit.device == device else unit for unit in units)
            for name, units in before.items()
        }
        self.overview.events.units_changed(before, self.units)


def offer(snapshot: Snapshot) -> dict[str, tuple[Unit, ...]]:
    """Offer what there is: VFs, GPUs, and shares of every adapter that has VFs."""
    hcas = [d for d in snapshot.devices if d.vfs]
    return {
        "rdma/hca": tuple(offered(f"hca-{d.address}-{n}", "rdma/hca", d.address) for d in hcas for n in range(SHARES)),
        "rdma/vf": tuple(offered(d.address, "rdma/vf", d.address) for d in snapshot.devices if d.is_vf),
        "nvidia.com/gpu": tuple(offered(gpu.uuid, "nvidia.com/gpu", gpu.uuid) for gpu in snapshot.gpus),
    }


def with_many_vfs(snapshot: Snapshot, count: int) -> Snapshot:
    """Give each PF so many VFs."""
    devices: list[PciDevice] = []
    for device in snapshot.devices:
        if device.is_vf:
            continue
        if not device.vfs:
            devices.append(device)
            continue
        pattern = snapshot.by_address[device.vfs[0]]
        stem = device.address[:-4]
        names = [f"{stem}{1 + n // 8:02x}.{n % 8}" for n in range(count)]
        devices.append(replace(device, vfs=tuple(names), sriov_totalvfs=count))
        devices += [
            replace(pattern, address=name, path=(*device.path[:-1], name), physfn=device.address, vf_index=n)
            for n, name in enumerate(names)
        ]
    return replace(snapshot, devices=tuple(sorted(devices, key=lambda d: d.address)))


@contextmanager
def showing(snapshot: Snapshot, folder: Path) -> Iterator[ShownNode]:
    """Show a snapshot with empty books."""
    ledger = Ledger.open(folder / "ledger.db", "boot")
    node = ShownNode(snapshot, ledger)
    node.open()
    try:
        yield node
    finally:
        node.close()
        ledger.close()
