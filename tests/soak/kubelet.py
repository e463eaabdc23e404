"""Kubelet and the API server of a small node: one file says what they know of pods, and is read at each question."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agent.config import Resource
from agent.config.networks import Network
from agent.errors import Unavailable
from agent.kubelet.cri import Sandbox
from agent.kubelet.podresources import ClaimedDevice, ContainerDevices, DeviceAssignment, HeldUnit, PodDevices
from agent.model.allocation import ClaimRef, PodRef
from cni.call import GrantedDevice, Grants
from tests.cni.networks import network

AWAY, API_AWAY = "kubelet-away", "api-away"
"""Files of the node's folder: while one is there, kubelet or the API server answers nobody."""
FILE = "cluster.json"
RESOURCE = "rdma/vf"
LATE = Resource("late/vf", "vf", binding="late")
DRIVER, POOL = "nodefabric.io", "tiny"


@dataclass(frozen=True)
class Cluster:
    """What the API server has, and what kubelet says that its pods hold, by pod."""

    claims: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By UID, as the API server has them."""
    units: Mapping[str, Sequence[tuple[str, Mapping[str, Any] | None]]] = field(default_factory=dict)
    """Devices that a device plugin gave, each with the network of its resource."""
    slots: Mapping[str, Sequence[str]] = field(default_factory=dict)
    by_claim: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """UIDs of claims."""

    @classmethod
    def read(cls, folder: Path) -> Cluster:
        """Read what a node's folder says."""
        path = folder / FILE
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def write(self, folder: Path) -> None:
        """Have a node's folder say so."""
        fresh = folder / f"{FILE}.new"
        fresh.write_text(json.dumps(asdict(self)))
        fresh.rename(folder / FILE)


class Api:
    """The API server, for those who read claims."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, ref: ClaimRef) -> Mapping[str, Any] | None:
        return self._cluster().claims.get(ref.uid)

    def claim(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        return next((c for c in self._cluster().claims.values() if c["metadata"]["name"] == name), None)

    def pod(self, pod: PodRef) -> Mapping[str, Any] | None:
        return None

    def slices(self, driver: str) -> Sequence[Mapping[str, Any]]:
        return ()

    def _cluster(self) -> Cluster:
        if (self._folder / API_AWAY).exists():
            raise Unavailable("the API server is away")
        return Cluster.read(self._folder)


class Kubelet(Grants):
    """Says what pods hold, whoever prepared or granted it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def sandboxes(self) -> tuple[Sandbox, ...]:
        return ()

    def pods(self) -> Sequence[PodDevices]:
        return ()

    def files(self, pod: PodRef, container: str, resource_name: str) -> Sequence[str]:
        return ()

    def pod(self, pod: PodRef) -> PodDevices | None:
        """Return the slots and the claims of a pod."""
        cluster = Cluster.read(self._folder)
        slots, uids = cluster.slots.get(pod.name), cluster.by_claim.get(pod.name)
        if slots is None and uids is None:
            return None
        devices = (DeviceAssignment(LATE.name, tuple(slots)),) if slots is not None else ()
        names = [cluster.claims[uid]["metadata"]["name"] for uid in uids or () if uid in cluster.claims]
        claimed = tuple(ClaimedDevice(pod.namespace, name, DRIVER, POOL, "") for name in names)
        return PodDevices(pod, (ContainerDevices("worker", devices, claimed=claimed),))

    def pod_devices(self, pod: PodRef) -> PodDevices | None:
        return self.pod(pod)

    def network_of(self, resource_name: str, device: str) -> Network:
        return network({"name": "late", "vlan": 9})

    def granted(self, pod: PodRef) -> Sequence[GrantedDevice]:
        """List the devices that a device plugin gave to a pod."""
        found = Cluster.read(self._folder).units.get(pod.name, ())
        return tuple(
            GrantedDevice(device, RESOURCE, network(keys) if keys is not None else None) for device, keys in found
        )

    def held_units(self) -> Sequence[HeldUnit]:
        """List the units and slots of all pods."""
        if (self._folder / AWAY).exists():
            raise Unavailable("kubelet is away")
        cluster = Cluster.read(self._folder)
        held = [(pod, RESOURCE, device) for pod, found in cluster.units.items() for device, _ in found]
        held += [(pod, LATE.name, slot) for pod, found in cluster.slots.items() for slot in found]
        return tuple(HeldUnit(PodRef("default", pod), name, unit) for pod, name, unit in held)
