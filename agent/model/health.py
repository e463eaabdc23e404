"""Facts about a device → Healthy or Unhealthy, with a reason word.

Pure: the caller collects the facts. Reasons are stable words, used as metric labels.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.model.device import PciDevice, Snapshot


@dataclass(frozen=True, slots=True)
class Health:
    healthy: bool
    reason: str = ""
    """Empty when healthy."""

    def __str__(self) -> str:
        return "Healthy" if self.healthy else f"Unhealthy ({self.reason})"


HEALTHY = Health(True)


def unhealthy(reason: str) -> Health:
    return Health(False, reason)


def judge_nic(device: PciDevice, snapshot: Snapshot, *, quarantined: str | None) -> Health:
    """Judge a PF, VF or HCA that is present in the snapshot.

    A VF follows its PF's link. A link that nobody brought up (administratively down) tells
    nothing about the cable and is not held against the device. An RDMA device is judged by
    its ports: one ACTIVE port is enough, as on a dual-port HCA with one cable.
    """
    if quarantined is not None:
        return unhealthy("Quarantined")
    if device.driver is None:
        return unhealthy("NoDriver")
    ports = [p for r in device.rdma_devices for p in r.ports]
    if ports and not device.is_vf and not any(p.state.startswith("ACTIVE") for p in ports):
        return unhealthy("PortDown")
    uplink = snapshot.pf_netdev(device)
    if uplink is not None and uplink.carrier is False:
        return unhealthy("LinkDown")
    return HEALTHY
