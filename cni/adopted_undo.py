"""How a device was before a replaced plugin gave it to a pod: what was written, completed by what is seen."""

from __future__ import annotations

import logging
from dataclasses import replace

from agent.hardware.host import Host, Link
from agent.model.allocation import Undo, VfSettings
from agent.model.device import Snapshot
from cni.foreign import Record
from cni.modes import choice, guid, pf, returning

log = logging.getLogger(__name__)


def undo_of(host: Host, snapshot: Snapshot, record: Record, link: Link | None, netns: int | None) -> Undo:
    """Say how the device was, from what was written, and from what is seen where that is missing."""
    undo = Undo(
        netdev="" if record.for_programs else _name(host, record, link),
        mac=record.mac or (link.mac if link is not None else ""),
        mtu=record.mtu or (link.mtu if link is not None else 0),
        up=False,
        altnames=tuple(name for name in link.altnames if name != record.netdev) if link is not None else (),
        mode="vfio" if record.for_programs else choice.name_for(record.conf, snapshot),
    )
    if record.for_programs:
        undo = replace(undo, mac="", mtu=0)
    if record.rdma is not None and netns is not None:
        undo = _with_rdma(host, undo, record.rdma, netns)
    # It writes the GUID before down also where it gave no other.
    is_given = undo.mode == "infiniband" and record.guid is not None and record.conf.guid is not None
    if record.before == VfSettings() and not is_given:
        return undo
    facts = snapshot.by_address.get(record.device)
    uplink = pf.interface(host, record.device)
    if facts is None or uplink is None or facts.vf_index != record.vf_index:
        log.warning("what the PF enforced before is not put back: %s has another place than it had", record)
        return undo
    if is_given:
        undo = guid.adopted(host, record.device, facts.vf_index, undo, str(record.guid))
    return replace(undo, pf_netdev=uplink.name, vf_index=facts.vf_index, settings=record.before)


def _name(host: Host, record: Record, link: Link | None) -> str:
    """Name the interface in the host. One that sits in a pod has a name for there."""
    at_home = host.find_netdev(record.device) if link is not None else None
    return record.netdev or (at_home.name if at_home is not None else returning.spare_name(record.device))


def _with_rdma(host: Host, undo: Undo, names: tuple[str, str], netns: int) -> Undo:
    """Add the RDMA device that is in the pod; one that is not needs no way back."""
    found = next((d for d in host.rdma.devices(netns) if d.name == names[1]), None)
    if found is None:
        return undo
    return replace(undo, rdma=names[0], extra={**undo.extra, "rdma_index": found.index})
