"""What a container gets for devices, or units, that it names one by one, in CDI specs: containerEdits for each. Pure.

The variables name all of the container's devices of the resource, as they do where kubelet hands units out, and stand
alike in the edits of each device; the device nodes are those of the device itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agent.config import Resource
from agent.edits.build import build
from agent.edits.container_edits import DeviceNode
from agent.edits.environment import helper_variables, rdma_devices_of, words_here
from agent.model.allocation import NO_SPECS, UnitSpec
from agent.model.device import Snapshot
from agent.offer.gpu_units import nic_resource
from agent.offer.offer import Unit


def edits_by_device(
    resource: Resource, units: Sequence[Unit], snapshot: Snapshot, variables: Sequence[tuple[str, str]] = ()
) -> Mapping[str, Mapping[str, Any]]:
    """Work out the edits for each of the devices that one container has of a resource: PCI address → edits.

    `variables` are helpers for libraries that speak of the whole container. Raises UnitUnhealthy.
    """
    early = replace(resource, binding="early", environment=())
    whole = build(early, units, snapshot)
    env = [f"{name}={value}" for name, value in (*whole.envs, *variables)]
    found: dict[str, Mapping[str, Any]] = {}
    for unit in units:
        own = build(early, [unit], snapshot)
        nodes = [_node(node) for node in own.devices]
        found[unit.device] = {"env": env, **({"deviceNodes": nodes} if nodes else {})}
    return found


def unit_specs(resource: Resource, units: Sequence[Unit], snapshot: Snapshot) -> Mapping[str, UnitSpec]:
    """Work out what the CDI specs say of the units that one container has of a resource: unit ID → spec.

    None has one whose container gets no file, or exactly what another project's plugin gives. Of a rail it tells the
    NICs: GPUs have names of their own. Addresses are told only where a unit is not called by its own: those that
    kubelet was answered hold else. Raises UnitUnhealthy.
    """
    if resource.compat is not None or resource.kind == "gpu":
        return NO_SPECS
    of_nics = nic_resource(resource) if resource.kind == "rail" else resource
    parts = [part for unit in units for part in unit.parts]
    variables = helper_variables(words_here(of_nics, snapshot), rdma_devices_of(parts, snapshot))
    found = edits_by_device(of_nics, parts, snapshot, variables)
    beside = tuple(unit.unit_id for unit in units)
    if all(unit.unit_id == unit.device for unit in units):
        found = {
            device: {**edits, "env": [f"{name}={value}" for name, value in variables]}
            for device, edits in found.items()
        }
    specs = {unit.unit_id: _spec(resource.kind, beside, unit, found) for unit in units}
    return {unit_id: spec for unit_id, spec in specs.items() if spec.edits.get("deviceNodes")}


def _spec(kind: str, beside: tuple[str, ...], unit: Unit, found: Mapping[str, Mapping[str, Any]]) -> UnitSpec:
    """Say the spec of a unit, by the edits of its devices, whose variables are alike."""
    spec = UnitSpec(kind, beside, found[unit.device])
    for device in unit.devices if unit.further else ():
        spec = spec.with_nodes(device, found[device].get("deviceNodes", ()))
    return spec


def _node(node: DeviceNode) -> Mapping[str, str]:
    found = {"path": node.path, "permissions": node.permissions}
    return {**found, "hostPath": node.host_path} if node.host_path else found
