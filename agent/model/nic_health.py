"""Facts about adapters → Healthy or Unhealthy, with a reason word. Pure: the caller collects the facts."""

from __future__ import annotations

from collections.abc import Collection

from agent.model.device import LinkLayer, PciDevice, Snapshot
from agent.model.health import HEALTHY, Health, Reason, unhealthy
from agent.model.health_policy import PLAIN_POLICY, HealthPolicy


def judge_nic(
    device: PciDevice, snapshot: Snapshot, *, quarantined: str | None, policy: HealthPolicy = PLAIN_POLICY
) -> Health:
    """Judge a PF, VF or HCA that is present in the snapshot.

    Its own state comes first, then that of its PF, then the link.
    """
    if quarantined is not None:
        return unhealthy(Reason.QUARANTINED)
    if device.driver is None:
        return unhealthy(Reason.NO_DRIVER)
    if device.is_for_vfio and device.iommu_group is None:
        return unhealthy(Reason.NO_IOMMU_GROUP)
    if not device.is_vf:
        return policy.lasting(device.address, judge_link(device, for_vfs=False))
    pf = snapshot.parent(device)
    if pf is None or pf.driver is None:
        return unhealthy(Reason.PARENT_DOWN)
    if not policy.follow_link:
        return HEALTHY
    return policy.lasting(f"{pf.address} uplink", judge_link(pf, for_vfs=True))


def judge_link(uplink: PciDevice, *, for_vfs: bool) -> Health:
    """Judge the link of a function, for itself or for its VFs.

    A link that nobody brought up (administratively down) tells nothing about the cable and is not
    held against the device. Where there are RDMA ports they decide: one ACTIVE port is enough, as on
    a dual-port HCA with one cable, whatever an interface on top says (IPoIB has no carrier until it
    has joined its multicast group).
    """
    ports = [p for r in uplink.rdma_devices for p in r.ports]
    if any(p.state.startswith("ACTIVE") for p in ports):
        return HEALTHY
    # A RoCE port is also DOWN while nobody brought its interface up; an InfiniBand port is only
    # DOWN without a link, so that one counts against the VFs too.
    if ports and (not for_vfs or all(p.link_layer is LinkLayer.INFINIBAND for p in ports)):
        return unhealthy(Reason.PORT_DOWN)
    carriers = [n.carrier for n in uplink.netdevs if not n.is_representor and n.carrier is not None]
    if carriers and not any(carriers):
        return unhealthy(Reason.LINK_DOWN)
    return HEALTHY


def judge_missing(
    device: str, rdma_devices: Collection[str], drivers: Collection[str], snapshot: Snapshot
) -> Health | None:
    """Say why a device that was offered is no longer among those that its resource selects.

    `rdma_devices` are those that its unit cannot do without, `drivers` those that the resource
    selects, none for any. None: it left for another reason, such as an interface that was renamed.
    """
    found = snapshot.by_address.get(device)
    if found is None:
        return None if device in snapshot.gpu_by_uuid else unhealthy(Reason.DEVICE_GONE)
    if found.driver is None:
        return unhealthy(Reason.NO_DRIVER)
    if drivers and found.driver not in drivers:
        return unhealthy(Reason.WRONG_DRIVER)
    if not {r.name for r in found.rdma_devices if not r.absent}.issuperset(rdma_devices):
        return unhealthy(Reason.NO_RDMA_DEVICE)
    return None
