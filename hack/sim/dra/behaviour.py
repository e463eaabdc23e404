"""How the stand-in's DRA manager behaves: kubelet's own times, which tests shorten, and the faults of its version.

Source: Kubernetes 1.36.2, pkg/kubelet/cm/dra (manager.go, plugin/, healthinfo.go) and pkg/kubelet/pluginmanager.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Times are in seconds, and those of kubelet 1.36.2."""

    look: float = 1.0
    """Between two looks into the folder of plugins."""
    call: float = 45.0
    """Until a call to a driver is cancelled."""
    retry: tuple[float, float] = (79.0, 89.0)
    """From a failed Prepare to the next try, which comes with the pod's next sync."""
    reconcile: float = 60.0
    """Between two looks for claims of pods that are gone."""
    wipe: float = 30.0
    """From the end of a driver's last connection to the end of its slices."""
    health_retry: float = 5.0
    """Between two tries to watch a driver's health."""


SHORT = replace(Behaviour(), look=0.2, retry=(1.5, 1.7), reconcile=5.0, health_retry=1.0)
"""For a demo and whole pods: shorter where one only waits, kubelet's own where a driver's time is counted."""
