"""GUIDs of InfiniBand VFs, and all of a VF that must be as before."""

from __future__ import annotations

from typing import Any

from cni.modes import guid
from tests.cni.tiny_node import PF_NETDEV, Rig, vf

GUID = "02:00:00:00:00:00:00:01"


def state(node: Rig, index: int = 0) -> tuple[Any, ...]:
    """All of a VF that must be as before; its GUIDs with zeros and ones counted the same."""
    link, device = node.machine.find_netdev(vf(index)), node.machine.find_rdma(vf(index))
    assert link is not None
    assert device is not None
    guids = node.machine.vf_control.guids(PF_NETDEV, index)
    assert guids is not None
    plain = tuple(guid.NONE if g == guid.ALL_ONES else g for g in guids)
    nodes = node.machine.rdma.char_device(device, "uverbs")
    return (link.name, link.mtu, link.up, device.name, plain, nodes, node.settings(index).link_state)
