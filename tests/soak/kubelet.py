"""Kubelet and the API server of a small node: one file says what they know of pods, and is read at each question."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agent.errors import Unavailable
from agent.kubelet.podresources import ClaimedDevice, ContainerDevices, DeviceAssignment, PodDevices, PodResources
from agent.model.allocation import ClaimRef, PodRef
from tests.soak.configured import DRIVER, GRANTED, LATE, POOL

AWAY, API_AWAY = "kubelet-away", "api-away"
"""Files of the node's folder: while one is there, kubelet lists no pods, or the API server answers nobody."""
FILE = "cluster.json"


@dataclass(frozen=True)
class Cluster:
    """What the API server has, and what kubelet says that its pods hold, by pod."""

    claims: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By UID, as the API server has them."""
    units: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Devices that a device plugin gave."""
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

    @property
    def pods(self) -> Sequence[str]:
        """List the pods that kubelet knows."""
        return tuple({**self.units, **self.slots, **self.by_claim})

    def pod(self, pod: PodRef) -> PodDevices:
        """Say what a pod holds."""
        held = {GRANTED.name: self.units, LATE.name: self.slots}
        devices = tuple(DeviceAssignment(name, tuple(of[pod.name])) for name, of in held.items() if pod.name in of)
        claims = [self.claims[uid] for uid in self.by_claim.get(pod.name, ()) if uid in self.claims]
        claimed = (ClaimedDevice(pod.namespace, claim["metadata"]["name"], DRIVER, POOL, "") for claim in claims)
        return PodDevices(pod, (ContainerDevices("worker", devices, claimed=tuple(claimed)),))


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


class Kubelet(PodResources):
    """Says what pods hold, whoever prepared or granted it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "kubelet/pod-resources/kubelet.sock")
        self._node = folder

    async def get(self, pod: PodRef) -> PodDevices | None:
        cluster = Cluster.read(self._node)
        return cluster.pod(pod) if pod.name in cluster.pods else None

    async def list(self) -> tuple[PodDevices, ...]:
        if (self._node / AWAY).exists():
            raise Unavailable("kubelet is away")
        cluster = Cluster.read(self._node)
        return tuple(cluster.pod(PodRef("default", name)) for name in cluster.pods)
