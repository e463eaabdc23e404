"""`Health`: whether kubelet may hand a unit out, and if not, for which `Reason`. Pure.

Facts become health in `device_health`, which also says what lasts long enough to count. Reasons are a closed list of
words, which are stable: they are metric labels, Event reasons, and what the status shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum


class Tempo(Enum):
    """How soon a reason counts, and how soon it no longer does."""

    AT_ONCE = "at once"
    """What it says is certain, both ways: a driver is bound or it is not."""
    SETTLED = "settled"
    """It may come and go within a moment, as links do: it counts, and ends, when it has lasted."""


class Reason(StrEnum):
    """A word, which is the member itself, with its sentence and its tempo."""

    text: str
    """A sentence's second half: `0000:3b:02.1: no driver is bound to it`."""
    tempo: Tempo

    def __new__(cls, word: str, text: str, tempo: Tempo = Tempo.AT_ONCE) -> Reason:
        member = str.__new__(cls, word)
        member._value_ = word
        member.text = text
        member.tempo = tempo
        return member

    # What becomes of the device as a whole.
    QUARANTINED = "Quarantined", "what its last pod left on it is not cleaned up yet; the agent keeps trying"
    BOOKS_UNWRITABLE = "BooksUnwritable", "the agent cannot write its ledger, so no container could be given it"
    DEVICE_GONE = "DeviceGone", "it is no longer on the node: VFs were removed, or the adapter or GPU has left the bus"
    NO_FREE_DEVICE = "NoFreeDevice", "no device of its resource is left to stand behind this slot"
    PARENT_DOWN = "ParentDown", "its PF has no driver, is gone, or is in a pod"
    NO_DRIVER = "NoDriver", "no driver is bound to it"
    WRONG_DRIVER = "WrongDriver", "another driver is bound to it than its resource selects"
    HELD = "Held", "a pod holds it under a name that it is no longer offered by: the configuration has changed"

    RENUMBERED = (
        "Renumbered",
        "a device file in kubelet's answer for a pod is another device's by now: recreate the pod",
    )

    # What a container would lack.
    NO_RDMA_DEVICE = "NoRdmaDevice", "its driver shows no RDMA device any more"
    NO_CHAR_DEVICE = "NoCharDevice", "it has no uverbs device: the module ib_uverbs is not loaded"
    NO_IOMMU_GROUP = "NoIommuGroup", "it is bound to vfio-pci, and the node's IOMMU is off"
    EXCLUSIVE_RDMA = (
        "ExclusiveRdma",
        "the RDMA devices of the node belong to one namespace each, so this HCA cannot be shared",
    )

    # Links and ports; those of the PF count for its VFs.
    LINK_DOWN = "LinkDown", "its link, or that of its PF, has no carrier", Tempo.SETTLED
    PORT_DOWN = "PortDown", "no port of its RDMA device, or of its PF's, is active", Tempo.SETTLED

    # GPUs. How long an error counts is decided in `device_health`.
    GPU_LOST = "GpuLost", "the driver has lost it, or it has fallen off the bus"
    RESET_REQUIRED = "ResetRequired", "the driver asks for a reset, of the GPU or of the node"
    ECC_UNCORRECTABLE = "EccUncorrectable", "uncorrectable memory errors since the last reset"
    ROW_REMAP_FAILED = "RowRemapFailed", "bad memory could not be replaced by spare rows"
    THERMAL_SLOWDOWN = "ThermalSlowdown", "the hardware keeps slowing it down for heat"
    MIG_UNFIT = (
        "MigUnfit",
        "it is cut into slices, and has none or others than its resource can offer: see `mig` in the configuration",
    )
    XID_FATAL = "XidFatal", "the driver reported an error that only a reset ends"
    XID_TRANSIENT = "XidTransient", "the driver reported an error a short while ago"


_BY_WORD = {reason.value: reason for reason in Reason}


def tempo_of(word: str) -> Tempo:
    """Return a reason's tempo; AT_ONCE for a word that is none of ours."""
    reason = _BY_WORD.get(word)
    return reason.tempo if reason is not None else Tempo.AT_ONCE


def text_of(word: str) -> str:
    """Return a reason's sentence; empty for a word that is none of ours."""
    reason = _BY_WORD.get(word)
    return reason.text if reason is not None else ""


@dataclass(frozen=True, slots=True)
class Health:
    healthy: bool
    reason: str = ""
    """A word of `Reason`; empty when healthy."""

    def __str__(self) -> str:
        return "Healthy" if self.healthy else f"Unhealthy ({self.reason})"


HEALTHY = Health(True)
_OF_REASON = {reason.value: Health(False, reason.value) for reason in Reason}


def unhealthy(reason: str) -> Health:
    """Return the verdict with this reason, which must be a word of `Reason`."""
    return _OF_REASON[reason]
