"""Books and CDI specs of granted units, on made-up nodes whose numbers change."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agent.config import Resource
from agent.config.resources import RailNic
from agent.edits.build import build, unit_specs
from agent.edits.specs import Specs
from agent.edits.unit_specs import UnitSpecs
from agent.ledger import Ledger
from agent.model.device import RdmaDevice, Snapshot
from agent.offer.units import plain_offer
from agent.state import Latest
from tests import node as books
from tests.node import change, granted, rdma

HCA = Resource("rdma/hca", "hca", shares=2, environment=("nccl",))
VF = Resource("rdma/vf", "vf", environment=("ucx",))
RAIL = Resource("rdma/rail", "rail", nic=RailNic("hca", shares=2))
VFIO = Resource("rdma/dpdk", "vf")


def permuted(snapshot: Snapshot) -> Snapshot:
    """Give each RDMA device and IOMMU group the number of the next one."""
    names = [r.name for d in snapshot.devices for r in d.rdma_devices]
    numbers = [re.sub(r"\D+\d?_", "", name) for name in names]
    following = dict(zip(numbers, [*numbers[1:], *numbers[:1]], strict=True))
    groups = sorted(d.iommu_group for d in snapshot.devices if d.iommu_group is not None)
    next_group = dict(zip(groups, [*groups[1:], *groups[:1]], strict=True))

    def moved(found: RdmaDevice) -> RdmaDevice:
        number = following[found.name.removeprefix("mlx5_")]
        files = tuple(replace(c, path=re.sub(r"\d+$", number, c.path)) for c in found.char_devices)
        return replace(found, name=f"mlx5_{number}", char_devices=files)

    devices = tuple(
        replace(
            d,
            rdma_devices=tuple(map(moved, d.rdma_devices)),
            iommu_group=next_group[d.iommu_group] if d.iommu_group is not None else None,
        )
        for d in snapshot.devices
    )
    return replace(snapshot, devices=devices, generation=snapshot.generation + 1)


def with_vf_rdma(snapshot: Snapshot, *addresses: str) -> Snapshot:
    for number, address in enumerate(addresses, 50):
        snapshot = change(snapshot, address, rdma_devices=(rdma(number, f"b83f:d203:00ff:{number:04x}"),))
    return snapshot


@dataclass
class Rig:
    """Books and specs, and what units are granted of."""

    ledger: Ledger
    specs: Specs
    units: UnitSpecs
    folder: Path
    settled: Latest[bool]
    resources: tuple[Resource, ...] = (HCA, VF)

    def grant(self, snapshot: Snapshot, resource: Resource, *unit_ids: str) -> tuple[str, ...]:
        """Grant units to one container, and return the CDI names that it is told."""
        offer = plain_offer(self.resources, snapshot)
        units = [found for i in unit_ids if (found := offer.find(resource.name, i)) is not None]
        specs = unit_specs(resource, units, snapshot)
        self.specs.grant(granted(resource.name, {u.unit_id: u.devices for u in units}, specs))
        answer = build(resource, units, snapshot, specs=specs)
        assert answer.devices == ()
        assert [name for name, _ in answer.envs] == (
            [f"PCIDEVICE_RDMA_{resource.name[5:].upper()}"] if resource.kind == "vf" else []
        )
        return answer.cdi_devices

    def renew(self, snapshot: Snapshot) -> tuple[str, ...]:
        return tuple(self.units.renew(plain_offer(self.resources, snapshot), self.resources))

    def said(self, unit_id: str) -> dict[str, Any]:
        """What a runtime reads of a unit."""
        document = json.loads((self.folder / f"nodefabric-unit-{unit_id}.json").read_text())
        (device,) = document["devices"]
        assert device["name"] == unit_id
        edits: dict[str, Any] = device["containerEdits"]
        return edits

    def files(self, unit_id: str) -> list[str]:
        return [n["path"] for n in self.said(unit_id)["deviceNodes"]]

    def there(self) -> set[str]:
        return {path.name.removeprefix("nodefabric-unit-").removesuffix(".json") for path in self.folder.glob("*")}


@contextmanager
def opened(folder: Path, settled: bool = True) -> Iterator[Rig]:
    cell = Latest(settled)
    with books.open_books(folder) as ledger:
        specs = Specs(ledger, folder / "cdi")
        yield Rig(ledger, specs, UnitSpecs(ledger, specs, cell), folder / "cdi", cell)


SHARE = "hca-b83fd20300a00001-0"
OTHER = "hca-b83fd20300a00002-1"
VF_UNIT = "0000:12:00.1"
