"""Facts about a device → Healthy or Unhealthy, with a reason word.

Pure: the caller collects the facts. Reasons are stable words, used as metric labels.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.model.device import LinkLayer, PciDevice, Snapshot


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
    nothing about the cable and is not held against the device. Where there are RDMA ports they
    decide: one ACTIVE port is enough, as on a dual-port HCA with one cable, whatever an interface
    on top says (IPoIB has no carrier until it has joined its multicast group).
    """
    if quarantined is not None:
        return unhealthy("Quarantined")
    if device.driver is None:
        return unhealthy("NoDriver")
    if device.is_for_vfio and device.iommu_group is None:
        return unhealthy("NoIommuGroup")
    uplink = snapshot.parent(device) or device
    ports = [p for r in uplink.rdma_devices for p in r.ports]
    if any(p.state.startswith("ACTIVE") for p in ports):
        return HEALTHY
    # A RoCE port is also DOWN while nobody brought its interface up; an InfiniBand port is only
    # DOWN without a link, so that one counts against the VFs too.
    if ports and (not device.is_vf or all(p.link_layer is LinkLayer.INFINIBAND for p in ports)):
        return unhealthy("PortDown")
    carriers = [n.carrier for n in uplink.netdevs if not n.is_representor and n.carrier is not None]
    if carriers and not any(carriers):
        return unhealthy("LinkDown")
    return HEALTHY
