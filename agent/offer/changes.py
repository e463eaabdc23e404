"""What became of units between two offers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from agent.offer.offer import Unit

Units = Mapping[str, Sequence[Unit]]
"""Resource name → its units, as offered at one moment."""


@dataclass(frozen=True, slots=True)
class HealthChange:
    """Units of one resource that became unhealthy for one reason, or healthy after it."""

    resource: str
    reason: str
    is_healthy: bool
    devices: tuple[str, ...]
    """One for each unit, so that units of one device name it again; the unit's ID for one without a device."""


def health_changes(before: Units, after: Units) -> Iterator[HealthChange]:
    """Tell which units became unhealthy, and then which healthy again: once for each resource and reason."""
    for resource, units in after.items():
        former = {unit.unit_id: unit.health for unit in before.get(resource, ())}
        worse: dict[str, list[str]] = {}
        better: dict[str, list[str]] = {}
        for unit in units:
            was = former.get(unit.unit_id)
            if not unit.health.healthy:
                if unit.health != was:
                    worse.setdefault(str(unit.health.reason), []).append(unit.device or unit.unit_id)
            elif was is not None and not was.healthy:
                better.setdefault(str(was.reason), []).append(unit.device or unit.unit_id)
        for reason, devices in worse.items():
            yield HealthChange(resource, reason, is_healthy=False, devices=tuple(devices))
        for reason, devices in better.items():
            yield HealthChange(resource, reason, is_healthy=True, devices=tuple(devices))
