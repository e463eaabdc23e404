"""How near the NICs of pods stand to their GPUs, when the scheduler chooses by what is published of them.

The same pods come and go for each way of asking. A pair counts as attained if its NIC is as near as the free NICs
could have been to the GPUs that the pod got; pairs of a pod that finds no room count as not attained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from agent.model.device import Snapshot
from agent.placement import Distances
from deviceplugin.dra.planner import LateWish, choose_late
from hack.sim.cluster.allocator import Node, extended_claim
from hack.sim.cluster.claims_for_pairs import (
    AMD,
    GPU_CLASS,
    NIC_DRIVER,
    NUMA_NODE,
    PCI_BUS_ID,
    PCIE_ROOT,
    UUID,
    claim,
    pairs,
)
from hack.sim.cluster.selectable import Document
from measure.alignment.score import attained, matched
from measure.alignment.stream import EVEN, Step, steps
from measure.dra.published import NIC, Published, publish

Claims = Mapping[str, Document]


@dataclass(frozen=True, slots=True)
class Way:
    """A way of asking for GPUs and as many NICs."""

    figure: str
    binding: str
    claims: Callable[[int, Published], Claims]
    any_vendor: bool = False
    """Whether it is played on nodes with AMD's GPUs, too."""

    def is_for(self, snapshot: Snapshot) -> bool:
        """Tell whether it can be played on a node: one with VFs, and GPUs that the way can ask for."""
        gpus = snapshot.all_gpus if self.any_vendor else snapshot.gpus
        return bool(gpus) and any(device.is_vf for device in snapshot.devices)


def _matched(attribute: str) -> Callable[[int, Published], Claims]:
    return lambda size, published: {"pairs": pairs(size, attribute, GPU_CLASS if published.snapshot.gpus else AMD)}


def _unchanged(size: int, published: Published) -> Claims:
    """Ask as a pod does that names resources only; for its GPUs it has a claim."""
    gpus = claim([{"name": "gpus", "exactly": {"deviceClassName": GPU_CLASS, "count": size}}])
    container = {"name": "c", "resources": {"limits": {NIC: str(size)}}}
    made = extended_claim({"metadata": {"name": "p"}, "spec": {"containers": [container]}}, published.node().classes)
    assert made is not None
    return {"gpus": gpus, "nics": made}


WAYS = (
    Way("near_gpu_attained_pct", "late", _matched(UUID)),
    Way("near_address_attained_pct", "late", _matched(PCI_BUS_ID), any_vendor=True),
    Way("pcie_root_attained_pct", "early", _matched(PCIE_ROOT)),
    Way("numa_attained_pct", "early", _matched(NUMA_NODE)),
    Way("late_dra_attained_pct", "late", _unchanged),
    Way("first_fit_attained_pct", "early", _unchanged),
)


@dataclass
class Share:
    """Pairs so far."""

    pairs: int = 0
    attained: int = 0

    @property
    def percent(self) -> float:
        return 100 * self.attained / self.pairs

    def add(self, other: Share) -> None:
        self.pairs += other.pairs
        self.attained += other.attained


def play(snapshot: Snapshot, way: Way, pods: int, seed: int, truth: Distances | None = None) -> Share:
    """Let pods come and go on a node, for its GPUs and VFs. `truth`: distances to judge by, if not the agent's."""
    vfs = [device.address for device in snapshot.devices if device.is_vf]
    played = _Play(publish(snapshot, vfs, way.binding), way, Distances(snapshot), set(vfs), truth)
    for step in steps(EVEN, len(snapshot.all_gpus), len(vfs), pods, seed):
        played.take(step)
    return played.share


class _Play:
    def __init__(
        self, published: Published, way: Way, distances: Distances, free: set[str], truth: Distances | None = None
    ) -> None:
        self.share = Share()
        self._published = published
        self._way = way
        self._distances = distances
        self._truth = truth or distances
        self._node: Node = published.node()
        self._free = free
        self._gpus = {f"gpu-{gpu.index}": gpu.uuid for gpu in published.snapshot.all_gpus}
        self._running: dict[str, tuple[list[str], tuple[str, ...]]] = {}
        """Pod → its claims and NICs."""

    def take(self, step: Step) -> None:
        """Let a pod come, or go."""
        if not step.comes:
            claims, nics = self._running.pop(step.pod, ([], ()))
            for name in claims:
                self._node.release(name)
            self._free |= set(nics)
            return
        self.share.pairs += step.gpus
        claims_of = {f"{step.pod}-{n}": c for n, c in self._way.claims(step.gpus, self._published).items()}
        results = self._node.allocate(claims_of)
        if results is None:
            return
        devices = [result for mine in results.values() for result in mine]
        gpus = [self._gpus[result["device"]] for result in devices if result["driver"] != NIC_DRIVER]
        nics = self._nics([str(r["device"]) for r in devices if r["driver"] == NIC_DRIVER], gpus)
        could = matched(self._truth, [(gpus, len(gpus))], sorted(self._free))
        self.share.attained += attained(matched(self._truth, [(gpus, len(gpus))], nics), could)
        self._free -= set(nics)
        self._running[step.pod] = list(claims_of), nics

    def _nics(self, names: Iterable[str], gpus: list[str]) -> tuple[str, ...]:
        """Tell which VFs the results stand for; on the node, where they are places."""
        chosen = [self._published.devices[name] for name in names]
        if self._way.binding == "early":
            return tuple(device.units[0].device for device in chosen)
        is_pinned = self._way.claims is not _unchanged
        wishes = [LateWish(tuple(unit.device for unit in device.units), is_pinned) for device in chosen]
        free = {u.device: u for device in self._published.devices.values() for u in device.units}
        found = choose_late(self._distances, wishes, [free[nic] for nic in sorted(self._free)], {None: gpus}, {})
        assert found is not None, "the scheduler counts no more units than there are"
        return found
