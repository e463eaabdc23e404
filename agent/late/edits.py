"""What a container gets for a bound slot: containerEdits of its CDI spec. Pure.

The variables name all of the container's devices of the resource, as they do with early binding, and stand alike in
the spec of each of its slots; a slot's device nodes are those of its own device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agent.config import Resource
from agent.model.device import Snapshot
from deviceplugin.response import build
from deviceplugin.unit import Unit


def of_container(resource: Resource, units: Sequence[Unit], snapshot: Snapshot) -> Mapping[str, Mapping[str, Any]]:
    """Work out the edits for each of the devices that one container has of a resource: PCI address → edits.

    Raises UnitUnhealthy for a device that lacks what a container needs to use it.
    """
    early = replace(resource, binding="early")
    whole = build(early, units, snapshot)
    env = [f"{name}={value}" for name, value in whole.envs]
    found: dict[str, Mapping[str, Any]] = {}
    for unit in units:
        own = build(early, [unit], snapshot)
        nodes = [{"path": node.path, "permissions": node.permissions} for node in own.devices]
        found[unit.device] = {"env": env, **({"deviceNodes": nodes} if nodes else {})}
    return found
