"""`Health`: whether kubelet may hand a unit out, and if not, why not. Pure.

Facts become health in `nic_health` and `gpu_health`, on `terms` that tell what lasts long enough to count.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.model.reasons import Reason


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
