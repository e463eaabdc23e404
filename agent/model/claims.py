"""DRA claims as the books have them: which device each result of a claim got, for which pods, how far kubelet is.

prepare (rows, then the CDI spec) → attach (CNI ADD) → detach → unprepare (rows go when the device is home).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from agent.model.allocation import PodRef

PLACE = "slots-"
"""What the name of a place begins with: a device of the ResourceSlice that stands for several late-bound ones."""
_PLACE = re.compile(rf"{PLACE}[a-z0-9-]{{1,57}}")


def is_place(name: str) -> bool:
    """Tell whether a name is of a place, and not a device's of its own."""
    return _PLACE.fullmatch(name) is not None


class ClaimState(StrEnum):
    """How far kubelet has come with a claim on this node."""

    PREPARING = "preparing"
    PREPARED = "prepared"
    UNPREPARING = "unpreparing"


@dataclass(frozen=True, slots=True)
class ClaimRef:
    """A ResourceClaim, as kubelet names it."""

    uid: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class ClaimDevice:
    """One result of a claim's allocation, and what stands for it on this node."""

    request: str
    """As kubelet knows it: without its sub-request."""
    pool: str
    device_name: str
    """In the ResourceSlice."""
    resource_name: str
    kind: str
    """hca, vf or nic."""
    device: str
    """PCI address, in the boot of the claim's row."""
    cdi_name: str
    """Name of the device in the claim's CDI spec."""
    share_id: str = ""
    """Where the device may be allocated several times."""
    exclusive: bool = True
    """Nobody else may have the device."""
    admin: bool = False
    """Admin access: it is looked at, and stays where it is."""
    identity: str = ""
    """What finds the device again when a reboot has moved it (`agent.model.vf_identity`); empty if nothing does."""
    network: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Keys of a network (as in the configuration's `networks`, but for the name) that the device is set up with."""
    ifname: str = ""
    """Name of its interface in the pod, with %d where a number is to be; empty for the next free one."""
    edits: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """containerEdits, as they stand in the CDI spec."""
    shares: int = 1
    """How many of an adapter's shares it takes up."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim that kubelet has given to us to prepare."""

    ref: ClaimRef
    state: ClaimState
    devices: tuple[ClaimDevice, ...] = ()
    pods: tuple[PodRef, ...] = ()
    """Those that the claim was reserved for when it was last read."""
    only_pod: str = ""
    """UID of the pod that owns the claim (made from a template, or for extended resources)."""
    boot_id: str = ""
    since: float = 0.0
    """Seconds since the epoch."""

    def is_for(self, pod: PodRef) -> bool:
        """Tell whether a pod may use it. A runtime that tells no UID is believed in its names."""
        if pod.uid:
            return pod.uid == self.only_pod or any(p.uid == pod.uid for p in self.pods)
        return any((p.namespace, p.name) == (pod.namespace, pod.name) for p in self.pods)
