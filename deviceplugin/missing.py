"""Units whose devices are gone, which stay in the list for a while, with the reason. Pure.

A device that leaves without a word (VFs removed, an adapter off the bus, a driver unbound for which
its resource selects) is a fault to people and to the pods that held it; kubelet shows it in their
status only while it is listed. After a while it is no longer capacity of the node, unless a pod
still holds it. What left because the configuration changed, or went to another resource, is no fault.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agent.config import Resource, SharedPool
from agent.model.device import Snapshot
from agent.model.health import Health
from agent.model.nic_health import judge_missing
from deviceplugin.rails import nic_resource
from deviceplugin.unit import Unit


@dataclass(frozen=True, slots=True)
class Missing:
    """What is listed though it is not there."""

    since: Mapping[str, float] = field(default_factory=dict)
    """Unit ID → when it was first missed."""
    units: Mapping[str, tuple[Unit, ...]] = field(default_factory=dict)
    """Resource name → its units, unhealthy."""

    @property
    def devices(self) -> frozenset[str]:
        """The devices that are missed."""
        return frozenset(unit.device for units in self.units.values() for unit in units)

    def due(self, held: Collection[str], keep_seconds: float) -> float | None:
        """Tell when the next of them leaves the list: one that nobody holds any more."""
        waiting = (unit.unit_id for units in self.units.values() for unit in units if unit.device not in held)
        return min((self.since[unit_id] + keep_seconds for unit_id in waiting), default=None)


NOBODY_MISSED = Missing()


def miss(
    resources: Sequence[Resource],
    before: Mapping[str, Sequence[Unit]],
    now_listed: Mapping[str, Sequence[Unit]],
    missed: Missing,
    snapshot: Snapshot,
    held: Collection[str],
    now: float,
    keep_seconds: float,
) -> Missing:
    """Work out which units of the last offer, or missed earlier, are to be listed on. `held` are devices in use."""
    here = {unit.unit_id for units in now_listed.values() for unit in units}
    since: dict[str, float] = {}
    units: dict[str, tuple[Unit, ...]] = {}
    for resource in resources:
        if isinstance(resource.compat, SharedPool) or resource.binding == "late":
            continue
        kept = []
        for unit in before.get(resource.name, ()):
            if unit.unit_id in here or unit.is_slot:
                continue
            began = missed.since.get(unit.unit_id, now)
            if (now >= began + keep_seconds or _was_cut_out(unit, snapshot)) and unit.device not in held:
                continue
            health = _judge(resource, unit, snapshot)
            if health is not None:
                kept.append(replace(unit, health=health))
                since[unit.unit_id] = began
        if kept:
            units[resource.name] = tuple(kept)
    return Missing(since, units) if units else NOBODY_MISSED


def _judge(resource: Resource, unit: Unit, snapshot: Snapshot) -> Health | None:
    """Say why a unit is no longer listed; None if that is no fault. A rail is its GPU and its NIC."""
    if resource.kind == "rail" and unit.gpu not in snapshot.gpu_by_uuid:
        return judge_missing(unit.gpu, (), (), snapshot)
    half = nic_resource(resource) if resource.kind == "rail" else resource
    needs = unit.rdma_devices if "hca" in (unit.kind, half.kind) else ()
    drivers = half.select.drivers if resource.kind != "gpu" else ()
    return judge_missing(unit.device, needs, drivers, snapshot)


def _was_cut_out(unit: Unit, snapshot: Snapshot) -> bool:
    """Tell whether it is a slice of a GPU that somebody took away: a GPU that is lost keeps its slices."""
    return unit.kind == "gpu" and unit.device.startswith("MIG-") and bool(snapshot.gpus)
