"""Feature gates: the fields of one that is off are dropped without a word, unless they are stored already.

Source: Kubernetes 1.36, pkg/features/kube_features.go, and pkg/registry/resource/*/strategy.go for what each drops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

TAINTS = "DRADeviceTaints"
CAPACITY = "DRAConsumableCapacity"
LISTS = "DRAListTypeAttributes"
PARTITIONS = "DRAPartitionableDevices"
DEVICE_STATUS = "DRAResourceClaimDeviceStatus"
EXTENDED = "DRAExtendedResource"
GRANULAR = "DRAResourceClaimGranularStatusAuthorization"
DEFAULT = frozenset({TAINTS, CAPACITY, PARTITIONS, DEVICE_STATUS, EXTENDED, GRANULAR})
"""Those that Kubernetes 1.36 has on."""
LIST_KEYS = ("bools", "ints", "strings", "versions")


def drop(kind: str, document: dict[str, Any], old: Mapping[str, Any] | None, on: frozenset[str]) -> None:
    """Take the fields of gates that are off out of a document."""
    for gate, of, is_used, take in _FIELDS:
        if of == kind and gate not in on and not (old is not None and is_used(old)):
            take(document)


def _devices(document: Mapping[str, Any]) -> Iterator[Any]:
    yield from document.get("spec", {}).get("devices") or ()


def _has_taints(document: Mapping[str, Any]) -> bool:
    return any(device.get("taints") for device in _devices(document))


def _drop_taints(document: dict[str, Any]) -> None:
    for device in _devices(document):
        device.pop("taints", None)


def _has_capacity(document: Mapping[str, Any]) -> bool:
    return any("allowMultipleAllocations" in device for device in _devices(document))


def _drop_capacity(document: dict[str, Any]) -> None:
    for device in _devices(document):
        device.pop("allowMultipleAllocations", None)
        for amount in device.get("capacity", {}).values():
            amount.pop("requestPolicy", None)


def _has_lists(document: Mapping[str, Any]) -> bool:
    return any(
        key in value for d in _devices(document) for value in d.get("attributes", {}).values() for key in LIST_KEYS
    )


def _drop_lists(document: dict[str, Any]) -> None:
    for device in _devices(document):
        for value in device.get("attributes", {}).values():
            for key in LIST_KEYS:
                value.pop(key, None)


def _has_partitions(document: Mapping[str, Any]) -> bool:
    return "sharedCounters" in document.get("spec", {}) or any("consumesCounters" in d for d in _devices(document))


def _drop_partitions(document: dict[str, Any]) -> None:
    document.get("spec", {}).pop("sharedCounters", None)
    for device in _devices(document):
        device.pop("consumesCounters", None)


def _wishes(document: Mapping[str, Any]) -> Iterator[Any]:
    """List what a claim or a template of claims asks for."""
    spec = document.get("spec", {})
    for request in spec.get("spec", spec).get("devices", {}).get("requests") or ():
        yield from (request["exactly"],) if "exactly" in request else request.get("firstAvailable") or ()


def _tolerates(document: Mapping[str, Any]) -> bool:
    return any(wish.get("tolerations") for wish in _wishes(document))


def _drop_tolerations(document: dict[str, Any]) -> None:
    for wish in _wishes(document):
        wish.pop("tolerations", None)


def _asks_for_capacity(document: Mapping[str, Any]) -> bool:
    return any("capacity" in wish for wish in _wishes(document))


def _drop_asked_capacity(document: dict[str, Any]) -> None:
    for wish in _wishes(document):
        wish.pop("capacity", None)


def _has_device_status(document: Mapping[str, Any]) -> bool:
    return bool(document.get("status", {}).get("devices"))


def _drop_device_status(document: dict[str, Any]) -> None:
    document.get("status", {}).pop("devices", None)


def _has_extended(document: Mapping[str, Any]) -> bool:
    return "extendedResourceName" in document.get("spec", {})


def _drop_extended(document: dict[str, Any]) -> None:
    document.get("spec", {}).pop("extendedResourceName", None)


_FIELDS: tuple[tuple[str, str, Callable[[Mapping[str, Any]], bool], Callable[[dict[str, Any]], None]], ...] = (
    (TAINTS, "ResourceSlice", _has_taints, _drop_taints),
    (CAPACITY, "ResourceSlice", _has_capacity, _drop_capacity),
    (LISTS, "ResourceSlice", _has_lists, _drop_lists),
    (PARTITIONS, "ResourceSlice", _has_partitions, _drop_partitions),
    (TAINTS, "ResourceClaim", _tolerates, _drop_tolerations),
    (TAINTS, "ResourceClaimTemplate", _tolerates, _drop_tolerations),
    (CAPACITY, "ResourceClaim", _asks_for_capacity, _drop_asked_capacity),
    (CAPACITY, "ResourceClaimTemplate", _asks_for_capacity, _drop_asked_capacity),
    (DEVICE_STATUS, "ResourceClaim", _has_device_status, _drop_device_status),
    (EXTENDED, "DeviceClass", _has_extended, _drop_extended),
)
