"""Late binding in a small agent: the real binder, with a kubelet that is a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.cdi import SlotSpecs
from agent.clients.kubelet import ContainerDevices, DeviceAssignment, PodDevices
from agent.config import Resource
from agent.late.binder import Binder
from agent.ledger import Ledger
from agent.model.allocation import PodRef
from agent.model.device import Snapshot
from agent.placement import Terrain
from deviceplugin.assignment import assign
from deviceplugin.resources import list_all
from deviceplugin.unit import Unit

SLOTS = "slots.json"
"""In the node's folder: the slots that kubelet says pods have, as {"pod": [slot, …]}."""
SPECS = "cdi"
LATE = Resource("late/vf", "vf", binding="late")


@dataclass(frozen=True)
class Stock:
    """What there is to choose from: all VFs of a snapshot."""

    snapshot: Snapshot
    pools: Mapping[str, Sequence[Unit]]
    terrain: Terrain

    def find(self, resource_name: str, unit_id: str) -> Unit | None:
        return None


def stock_of(snapshot: Snapshot) -> Stock:
    """List the VFs."""
    return Stock(snapshot, list_all((LATE,), assign((LATE,), snapshot), snapshot).pools, Terrain(snapshot))


def told(folder: Path) -> Mapping[str, Sequence[str]]:
    """Read what kubelet says."""
    path = folder / SLOTS
    found: Mapping[str, Sequence[str]] = json.loads(path.read_text()) if path.exists() else {}
    return found


def tell(folder: Path, slots: Mapping[str, Sequence[str]]) -> None:
    """Set what kubelet says."""
    fresh = folder / f"{SLOTS}.new"
    fresh.write_text(json.dumps(slots))
    fresh.rename(folder / SLOTS)


def make_binder(folder: Path, ledger: Ledger, stock: Callable[[], Stock]) -> Binder:
    """Join the parts."""

    def ask(pod: PodRef) -> PodDevices | None:
        slots = told(folder).get(pod.name)
        if slots is None:
            return None
        return PodDevices(pod, (ContainerDevices("worker", (DeviceAssignment(LATE.name, tuple(slots)),)),))

    return Binder(
        folder / "kubelet",
        ledger,
        SlotSpecs(folder / SPECS),
        resources=lambda: (LATE,),
        stock=stock,
        ask_kubelet=ask,
        network_of=lambda name: {"name": "late", "vlan": 9},
        is_settled=lambda: True,
        busy_seconds=0.5,
    )
