"""The claims that kubelet knows, with what drivers said of their devices, and the file in which they outlive it.

The file is kubelet's own (`dra_manager_state`), byte for byte in the form of 1.34 and later (Kubernetes,
pkg/kubelet/cm/dra/state; recorded in tests/hostile/recorded). Whether a claim is prepared is not in it: after a restart
each is prepared again for the next sandbox that needs it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHECKPOINT = "dra_manager_state"
_HEAD = {"kind": "DRACheckpoint", "apiVersion": "checkpoint.dra.kubelet.k8s.io/v1"}


class ClaimUnfit(Exception):
    """The claim is not one that its pod may use now."""


@dataclass(frozen=True, slots=True)
class Device:
    """An allocated device, as its driver described it."""

    pool: str
    name: str
    request_names: tuple[str, ...] = ()
    cdi_ids: tuple[str, ...] = ()
    share_id: str = ""

    def is_for(self, request: str) -> bool:
        """Tell whether who names this request of the claim gets it; an empty one is all of the claim."""
        return not request or not self.request_names or request.split("/")[0] in self.request_names


@dataclass(slots=True)
class ClaimInfo:
    """A claim of which kubelet has asked for preparation, or is about to."""

    uid: str
    namespace: str
    name: str
    pods: set[str] = field(default_factory=set)
    """UIDs of those that use it."""
    drivers: dict[str, list[Device]] = field(default_factory=dict)
    """All drivers with results in the claim → what they said."""
    prepared: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.name

    def devices(self, request: str = "") -> Iterator[tuple[str, Device]]:
        """Go through (driver, device) of a request, or of all."""
        for driver, devices in self.drivers.items():
            for device in devices:
                if device.is_for(request):
                    yield driver, device


def info_of(document: Mapping[str, Any], pod_uid: str, must_own: bool) -> ClaimInfo:
    """Read what kubelet needs of a claim. Raises ClaimUnfit if the pod may not use it."""
    metadata = document["metadata"]
    name = metadata["name"]
    if must_own:
        owners = [o for o in metadata.get("ownerReferences", ()) if o.get("controller")]
        if not any(o.get("uid") == pod_uid for o in owners):
            raise ClaimUnfit(f"ResourceClaim {name} was not created for the pod: it is not its owner")
    status = document.get("status") or {}
    if not any(user.get("uid") == pod_uid for user in status.get("reservedFor") or ()):
        raise ClaimUnfit(f"the pod ({pod_uid}) is not allowed to use ResourceClaim {name} ({metadata['uid']})")
    allocation = status.get("allocation")
    if not allocation:
        raise ClaimUnfit(f"ResourceClaim {name}: is not allocated")
    results = (allocation.get("devices") or {}).get("results") or ()
    drivers: dict[str, list[Device]] = {result["driver"]: [] for result in results}
    return ClaimInfo(metadata["uid"], metadata["namespace"], name, drivers=drivers)


class ClaimCache:
    """All claims of the node, by namespace and name."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._infos: dict[tuple[str, str], ClaimInfo] = {}
        if checkpoint.exists():
            for info in _restored(checkpoint.read_text()):
                self._infos[info.key] = info

    def __iter__(self) -> Iterator[ClaimInfo]:
        return iter(list(self._infos.values()))

    def get(self, namespace: str, name: str) -> ClaimInfo | None:
        """Find a claim."""
        return self._infos.get((namespace, name))

    def add(self, info: ClaimInfo) -> None:
        """Take a claim up."""
        self._infos[info.key] = info

    def remove(self, info: ClaimInfo) -> None:
        """Forget a claim."""
        self._infos.pop(info.key, None)

    def of_pod(self, pod_uid: str) -> list[ClaimInfo]:
        """List the claims that a pod uses."""
        return [info for info in self._infos.values() if pod_uid in info.pods]

    def save(self) -> None:
        """Write the file anew."""
        scratch = self._checkpoint.with_name(f".{self._checkpoint.name}")
        scratch.write_text(_spelled(self._infos.values()))
        scratch.replace(self._checkpoint)


def _spelled(infos: Iterable[ClaimInfo]) -> str:
    entries = [
        {
            "ClaimUID": info.uid,
            "ClaimName": info.name,
            "Namespace": info.namespace,
            "PodUIDs": {uid: {} for uid in sorted(info.pods)},
            "DriverState": {
                driver: {
                    "Devices": [
                        {
                            "PoolName": device.pool,
                            "DeviceName": device.name,
                            "ShareID": device.share_id or None,
                            "RequestNames": list(device.request_names) or None,
                            "CDIDeviceIDs": list(device.cdi_ids) or None,
                        }
                        for device in devices
                    ]
                    or None
                }
                for driver, devices in sorted(info.drivers.items())
            },
        }
        for info in infos
    ]
    data = _json({**_HEAD, "ClaimInfoStateList": entries})
    return _json({"Data": data, "Checksum": zlib.crc32(data.encode())})


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _restored(text: str) -> Iterator[ClaimInfo]:
    document = json.loads(text)
    if zlib.crc32(document["Data"].encode()) != document["Checksum"]:
        raise ValueError(f"{CHECKPOINT} is damaged: its checksum is another")
    for entry in json.loads(document["Data"])["ClaimInfoStateList"]:
        yield ClaimInfo(
            entry["ClaimUID"],
            entry["Namespace"],
            entry["ClaimName"],
            set(entry["PodUIDs"]),
            {
                driver: [
                    Device(
                        d["PoolName"],
                        d["DeviceName"],
                        tuple(d["RequestNames"] or ()),
                        tuple(d["CDIDeviceIDs"] or ()),
                        d.get("ShareID") or "",
                    )
                    for d in state["Devices"] or ()
                ]
                for driver, state in entry["DriverState"].items()
            },
        )
