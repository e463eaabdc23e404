"""A result with the device that stands for it, and what containers get for it. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent.config import Resource
from agent.edits.by_device import edits_by_device
from agent.edits.environment import variables_of_container
from agent.model.device import Snapshot
from agent.offer.offer import Unit
from deviceplugin.dra.allocation import Result


@dataclass(frozen=True, slots=True)
class Planned:
    """One result, with its device."""

    result: Result
    resource: Resource
    unit: Unit


def edits_of(
    planned: Sequence[Planned], snapshot: Snapshot, group_of: Mapping[str, Hashable]
) -> tuple[Mapping[str, Any], ...]:
    """Work out the containerEdits of each result.

    `group_of` maps each request to what is in one container together: there, variables name all devices. What is only
    looked at (admin access) brings its character devices alone. Raises UnitUnhealthy for a device that lacks what a
    container needs.
    """
    groups: dict[Hashable, list[Planned]] = {}
    for each in planned:
        if not each.result.admin:
            groups.setdefault(group_of[each.result.base], []).append(each)
    found: dict[tuple[Hashable, str], Mapping[str, Mapping[str, Any]]] = {}
    for group, mine in groups.items():
        held: dict[str, tuple[Resource, dict[str, Unit]]] = {}
        for each in mine:
            held.setdefault(each.resource.name, (each.resource, {}))[1][each.unit.device] = each.unit
        variables = variables_of_container([(of, tuple(units.values())) for of, units in held.values()], snapshot)
        for name, (resource, units) in held.items():
            found[group, name] = edits_by_device(resource, tuple(units.values()), snapshot, variables)
    return tuple(
        _nodes_of(each, snapshot)
        if each.result.admin
        else _said(
            {
                **found[group_of[each.result.base], each.resource.name][each.unit.device],
                "mounts": _mounts(each.resource),
            }
        )
        for each in planned
    )


def _nodes_of(each: Planned, snapshot: Snapshot) -> Mapping[str, Any]:
    edits = edits_by_device(each.resource, [each.unit], snapshot)[each.unit.device]
    return {key: value for key, value in edits.items() if key == "deviceNodes"}


def _mounts(resource: Resource) -> list[Mapping[str, Any]]:
    options = ["ro", "bind", "nosuid", "nodev"]
    return [{"hostPath": m.host_path, "containerPath": m.path, "options": options} for m in resource.mounts]


def _said(edits: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave out what is empty: a runtime refuses edits that change nothing."""
    return {key: value for key, value in edits.items() if value}
