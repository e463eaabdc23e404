"""Devices → whole ResourceSlice objects of the node's pool, within the API's limits. Pure.

Generation, owner and when taints began are the publisher's. Slices are divided in the same way whatever becomes of the
devices' health: a taint that came would otherwise move devices, and have all slices written anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from deviceplugin.dra.attributes import Attributes
from deviceplugin.dra.devices import DraDevice

API_VERSION, KIND = "resource.k8s.io/v1", "ResourceSlice"
MAX_DEVICES = 64
"""In one slice. 128 are allowed until one of them has a taint, or an attribute that is a list."""
MAX_NAME = 253
"""Characters of an object's name."""
TAINTS, CAPACITY, LISTS = "taints", "capacity", "listAttributes"
"""What clusters drop that do not have the feature."""
NOTHING: frozenset[str] = frozenset()

Document = Mapping[str, Any]


def slices_of(
    devices: Sequence[DraDevice], driver: str, node_name: str, dropped: Collection[str] = NOTHING
) -> tuple[Document, ...]:
    """Make the slices; none of no devices. Equal arguments give equal documents.

    `dropped` says what the cluster drops of what is written: without taints, devices that are not to be had are left
    out; without capacities, those that several claims have a part of; without lists, the first of each is told.
    """
    packs = _packs([device for device in devices if _can_be_told(device, dropped)])
    return tuple(
        {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": object_name(index, driver, node_name)},
            "spec": {
                "driver": driver,
                "nodeName": node_name,
                "pool": {"name": node_name, "resourceSliceCount": len(packs)},
                "devices": [_document(device, dropped) for device in pack],
            },
        }
        for index, pack in enumerate(packs)
    )


def object_name(index: int, driver: str, node_name: str) -> str:
    """Name a slice. The scheduler tries slices in the order of their names."""
    name = f"{index:05x}-{driver}-{node_name}"
    if len(name) > MAX_NAME:
        digest = hashlib.sha256(f"{driver}-{node_name}".encode()).hexdigest()[:32]
        name = f"{index:05x}-{digest}"
    return name


def _can_be_told(device: DraDevice, dropped: Collection[str]) -> bool:
    return not (device.taints and TAINTS in dropped) and not (device.allow_multiple and CAPACITY in dropped)


def _packs(devices: Sequence[DraDevice]) -> list[list[DraDevice]]:
    """Divide devices: all in one slice, by turns of their adapters, or else the slices of each adapter by themselves.

    The scheduler takes the first that fits, and so spreads over adapters where it can; one that fails costs one write.
    """
    by_adapter: dict[str, list[DraDevice]] = {}
    for device in devices:
        by_adapter.setdefault(device.adapter, []).append(device)
    if len(devices) <= MAX_DEVICES:
        return [list(_in_turns(list(by_adapter.values())))] if devices else []
    return [
        mine[start : start + MAX_DEVICES] for mine in by_adapter.values() for start in range(0, len(mine), MAX_DEVICES)
    ]


def _in_turns(lists: Sequence[Sequence[DraDevice]]) -> Iterator[DraDevice]:
    for turn in range(max(map(len, lists), default=0)):
        yield from (devices[turn] for devices in lists if turn < len(devices))


def _document(device: DraDevice, dropped: Collection[str]) -> Document:
    found: dict[str, Any] = {"name": device.name, "attributes": _attributes(device.attributes, dropped)}
    if device.capacity:
        found["capacity"] = device.capacity
    if device.allow_multiple:
        found["allowMultipleAllocations"] = True
    if device.taints:
        found["taints"] = [{"key": taint.key, "effect": taint.effect} for taint in device.taints]
    return found


def _attributes(attributes: Attributes, dropped: Collection[str]) -> Attributes:
    ordered = dict(sorted(attributes.items()))
    if LISTS not in dropped:
        return ordered
    return {name: _first(value) for name, value in ordered.items()}


def _first(value: Mapping[str, Any]) -> Mapping[str, Any]:
    [(form, said)] = value.items()
    return {form.removesuffix("s"): said[0]} if isinstance(said, list) else value
