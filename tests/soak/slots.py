"""Late binding in a small agent: the real binder, with a kubelet that is a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent.config import Config, Resource
from agent.config.networks import Network
from agent.edits.cdi import SlotSpecs
from agent.kubelet.podresources import ContainerDevices, DeviceAssignment, PodDevices
from agent.ledger import Ledger
from agent.model.allocation import PodRef
from agent.model.device import Snapshot
from agent.offer.offer import Offer
from agent.offer.units import plain_offer
from agent.state import Latest
from cni.call import Grants
from cni.slots.binder import Binder
from cni.slots.bound import BoundSlots
from tests.cni.networks import network

SLOTS = "slots.json"
"""In the node's folder: the slots that kubelet says pods have, as {"pod": [slot, …]}."""
SPECS = "cdi"
LATE = Resource("late/vf", "vf", binding="late")


def stock_of(snapshot: Snapshot) -> Offer:
    """List what there is to choose from: all VFs of a snapshot."""
    return Offer(snapshot, pools=plain_offer((LATE,), snapshot).pools)


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


class _Grants(Grants):
    """What a kubelet says that is a file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def network_of(self, resource_name: str, device: str) -> Network:
        return network({"name": "late", "vlan": 9})

    def pod_devices(self, pod: PodRef) -> PodDevices | None:
        slots = told(self._folder).get(pod.name)
        if slots is None:
            return None
        return PodDevices(pod, (ContainerDevices("worker", (DeviceAssignment(LATE.name, tuple(slots)),)),))


def make_bound(folder: Path, ledger: Ledger) -> BoundSlots:
    """Join the books and the specs."""
    return BoundSlots(Latest(_config(folder)), ledger, SlotSpecs(folder / SPECS))


def make_binder(folder: Path, ledger: Ledger, bound: BoundSlots, stock: Latest[Offer]) -> Binder:
    """Join the parts."""
    return Binder(Latest(_config(folder)), ledger, bound, stock, _Grants(folder), busy_seconds=0.5)


def _config(folder: Path) -> Config:
    return Config(resources=(LATE,), kubelet_dir=folder / "kubelet")
