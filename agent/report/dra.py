"""What people are told of the DRA driver. Whoever runs it keeps the newest in a cell."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DriverState:
    """How the driver stands with kubelet and with the cluster."""

    name: str
    problem: str = ""
    """Why kubelet does not know it; empty while it does."""
    slices: int | None = None
    """How many ResourceSlices the API server has as they should be; None as long as nobody knows."""
    dropped: frozenset[str] = frozenset()
    """Features that the cluster leaves out of them: taints, capacity, listAttributes."""
    devices: tuple[tuple[str, str, int], ...] = ()
    """(resource, `healthy` or the reason why not, how many), sorted."""

    @property
    def is_registered(self) -> bool:
        """Tell whether kubelet asks the driver for claims."""
        return not self.problem
