"""The device manager of the kubelet stand-in: which devices exist, and which container holds them.

Behaves as kubelet 1.36 was seen to (pkg/kubelet/cm/devicemanager): admission is serial, a
container's resources come in random order, an init container's devices are used again before the
plugin is asked, a preference is followed only as far as it fits, answers are kept in the checkpoint
for every later start of the container, and devices are freed late: at the next allocation or the
next look by a PodResources client, not when the pod ends. The checkpoint's form is that of
tests/hostile/recorded/kubelet_internal_checkpoint-1.36.json.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from hack.sim.pods import Container
from proto.deviceplugin.v1beta1 import api_pb2

CHECKPOINT = "kubelet_internal_checkpoint"


class AdmissionFailed(Exception):
    """The pod can not be admitted; it has failed for good."""


class Plugin(Protocol):
    """A registered device plugin."""

    prefers: bool
    """It offers GetPreferredAllocation."""

    async def preferred(self, available: Iterable[str], must_include: Iterable[str], size: int) -> tuple[str, ...]:
        """Ask for a preference. Raises AdmissionFailed."""

    async def allocate(self, ids: Iterable[str]) -> api_pb2.ContainerAllocateResponse:
        """Allocate for one container. Raises AdmissionFailed."""


@dataclass(frozen=True, slots=True)
class Held:
    """What one container holds of one resource."""

    pod_uid: str
    container: str
    resource_name: str
    ids: tuple[str, ...]
    answer: bytes
    """The plugin's answer, serialised, for every start of the container."""


@dataclass(slots=True)
class Known:
    """A resource that a plugin has listed."""

    plugin: Plugin | None
    devices: dict[str, api_pb2.Device] = field(default_factory=dict)
    stopped: bool = False
    """The stream has ended: kubelet counts all devices as unhealthy."""

    @property
    def healthy(self) -> set[str]:
        return set() if self.stopped else {i for i, d in self.devices.items() if d.health == "Healthy"}


class DeviceManager:
    """Books of devices and containers. Not safe for use by two admissions at once; see `admit`'s caller."""

    def __init__(self, checkpoint: Path, rng: random.Random, active: Callable[[], set[str]]) -> None:
        self.resources: dict[str, Known] = {}
        self.held: list[Held] = []
        self._checkpoint = checkpoint
        self._rng = rng
        self._active = active
        """UIDs of the pods that still count."""
        self._restore()

    def capacity(self) -> dict[str, int]:
        """Count all devices per resource."""
        return {name: len(known.devices) for name, known in sorted(self.resources.items())}

    def allocatable(self) -> dict[str, int]:
        """Count the healthy devices per resource."""
        return {name: len(known.healthy) for name, known in sorted(self.resources.items())}

    def update(self, resource_name: str, devices: Iterable[api_pb2.Device]) -> None:
        """Replace a resource's list by the plugin's newest."""
        known = self.resources[resource_name]
        known.devices = {d.ID: d for d in devices}
        known.stopped = False
        self._save()

    def stop(self, resource_name: str) -> None:
        """Count all devices of a resource as unhealthy: its plugin is gone."""
        known = self.resources[resource_name]
        known.stopped = True
        known.plugin = None

    async def admit(self, pod_uid: str, init_containers: Iterable[Container], containers: Iterable[Container]) -> None:
        """Give a pod's containers their devices. Raises AdmissionFailed."""
        reusable: dict[str, set[str]] = {}
        for is_init, group in ((True, init_containers), (False, containers)):
            for container in group:
                limits = list(container.limits)
                self._rng.shuffle(limits)
                for resource_name, count in limits:
                    free = reusable.setdefault(resource_name, set())
                    ids = await self._give(pod_uid, container.name, resource_name, count, free)
                    if is_init:
                        free.update(ids)
                    else:
                        free.difference_update(ids)

    def free(self) -> None:
        """Forget what inactive pods held. kubelet does so only on the way to something else."""
        active = self._active()
        kept = [h for h in self.held if h.pod_uid in active]
        if len(kept) != len(self.held):
            self.held = kept
            self._save()

    def of_container(self, pod_uid: str, container: str) -> list[Held]:
        """List what a container holds, per resource."""
        return [h for h in self.held if (h.pod_uid, h.container) == (pod_uid, container)]

    async def _give(
        self, pod_uid: str, container: str, resource_name: str, count: int, reusable: set[str]
    ) -> tuple[str, ...]:
        known = self.resources.get(resource_name)
        if known is None:
            raise AdmissionFailed(f"cannot allocate unregistered device {resource_name}")
        self.free()
        ids = await self._select(known, resource_name, count, reusable)
        if known.plugin is None:
            raise AdmissionFailed(f"no endpoint for resource {resource_name}: its device plugin is gone")
        answer = await known.plugin.allocate(self._shuffled(ids))
        held = Held(pod_uid, container, resource_name, tuple(sorted(ids)), answer.SerializeToString())
        self.held.append(held)
        self._save()
        return held.ids

    async def _select(self, known: Known, resource_name: str, count: int, reusable: set[str]) -> set[str]:
        chosen = set(sorted(reusable & set(known.devices))[:count])
        if len(chosen) == count:
            return chosen
        used = {i for h in self.held if h.resource_name == resource_name for i in h.ids}
        available = known.healthy - used
        if len(available) < count - len(chosen):
            raise AdmissionFailed(
                f"requested number of devices unavailable for {resource_name}. Requested: {count - len(chosen)},"
                f" Available: {len(available)}"
            )
        if known.plugin is not None and known.plugin.prefers:
            answer = await known.plugin.preferred(self._shuffled(available | chosen), sorted(chosen), count)
            chosen.update([i for i in answer if i in available and i not in chosen][: count - len(chosen)])
        rest = self._shuffled(available - chosen)
        chosen.update(rest[: count - len(chosen)])
        return chosen

    def _shuffled(self, ids: Iterable[str]) -> list[str]:
        """Go's maps have no order."""
        mixed = sorted(ids)
        self._rng.shuffle(mixed)
        return mixed

    def _save(self) -> None:
        """Write the checkpoint as kubelet does, but for the checksum (pkg/kubelet/cm/devicemanager/checkpoint)."""
        data = {
            "PodDeviceEntries": [
                {
                    "PodUID": h.pod_uid,
                    "ContainerName": h.container,
                    "ResourceName": h.resource_name,
                    "DeviceIDs": {"-1": list(h.ids)},
                    "AllocResp": base64.b64encode(h.answer).decode(),
                }
                for h in self.held
            ],
            "RegisteredDevices": {name: sorted(known.devices) for name, known in self.resources.items()},
        }
        scratch = self._checkpoint.with_name(f".{self._checkpoint.name}")
        scratch.write_text(json.dumps({"Data": data, "Checksum": 0}))
        scratch.replace(self._checkpoint)

    def _restore(self) -> None:
        """Read the allocations back. Devices stay unknown until their plugin registers again."""
        if not self._checkpoint.exists():
            return
        data = json.loads(self._checkpoint.read_text())["Data"]
        self.held = [
            Held(
                e["PodUID"],
                e["ContainerName"],
                e["ResourceName"],
                tuple(e["DeviceIDs"]["-1"]),
                base64.b64decode(e["AllocResp"]),
            )
            for e in data["PodDeviceEntries"]
        ]
        self.resources = {name: Known(plugin=None) for name in data["RegisteredDevices"]}
