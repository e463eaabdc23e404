"""A node for the page to show: recorded hardware, a real ledger, the real overview and endpoints, and no agent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from agent import page
from agent.endpoints import EndpointServer, Pages
from agent.ledger import Ledger
from agent.metrics import Facts
from agent.model.allocation import NetnsId, Owner, PodRef, Undo
from agent.model.device import PciDevice, Snapshot
from agent.model.health import HEALTHY, Health
from agent.overview import Overview

KINDS = {"rdma/hca": "hca", "rdma/vf": "vf", "nvidia.com/gpu": "gpu"}
SHARES = 63


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit, as the device plugins offer it."""

    unit_id: str
    resource_name: str
    device: str
    health: Health = HEALTHY
    numa_node: int = 0


@dataclass(frozen=True, slots=True)
class RailUnit(Unit):
    """A GPU with its NIC, which is the unit's device."""

    gpu: str = ""


@dataclass
class ShownNode:
    """What the page shows, and how it changes."""

    snapshot: Snapshot
    ledger: Ledger
    units: Mapping[str, Sequence[Unit]] = field(default_factory=dict)
    overview: Overview = field(init=False)
    server: EndpointServer | None = None

    def __post_init__(self) -> None:
        self.units = self.units or offer(self.snapshot)
        self.overview = Overview(
            self.facts,
            lambda: self.units,
            lambda: KINDS,
            lambda: self.snapshot.generation,
            node="node-1",
            version="1.2.3",
        )
        for name in list(self.overview.obstacles.found):
            self.overview.obstacles.set(name, None)
        self.overview.follow(self.ledger)

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

    def facts(self) -> Facts:
        books = self.ledger
        return Facts(
            self.snapshot,
            self.units,
            books.grants(),
            books.attachments(),
            books.quarantines(),
            1.0,
            books.owed_leases(),
        )

    def attach(self, vf: str, pod: PodRef, number: int = 1) -> None:
        """Put a VF into a pod, in the books."""
        self.ledger.grant("rdma/vf", {vf: vf})
        self.ledger.bind([vf], pod)
        owner = Owner(f"{number:012x}", "eth0", pod, NetnsId(4, 4026531840 + number))
        undo = Undo("ens1f0v0", "02:00:00:00:01:00", 1500, False)
        row = self.ledger.begin_attach(
            *(owner,), ifname="net1", device=vf, resource_name="rdma/vf", undo=undo, netns_path="/x", request={}
        )
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
        "rdma/hca": tuple(Unit(f"hca-{d.address}-{n}", "rdma/hca", d.address) for d in hcas for n in range(SHARES)),
        "rdma/vf": tuple(Unit(d.address, "rdma/vf", d.address) for d in snapshot.devices if d.is_vf),
        "nvidia.com/gpu": tuple(Unit(gpu.uuid, "nvidia.com/gpu", gpu.uuid) for gpu in snapshot.gpus),
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
