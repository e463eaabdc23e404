"""What tells of grants, with a kubelet, units and books that a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from types import SimpleNamespace
from typing import cast

from agent.config import Config
from agent.hardware.host import Host
from agent.kubelet.podresources import KubeletAsker, PodResources
from agent.ledger import Ledger
from agent.model.device import PciDevice, Snapshot
from agent.offer.offer import Offer, Unit
from agent.state import Latest
from cni.held import HeldDevices, PodClaims, Sources
from cni.node import Node
from cni.pods_file import PodsFile


def granted_of(
    config: Config,
    books: Ledger,
    kubelet: PodResources,
    loop: asyncio.AbstractEventLoop,
    *units: Unit,
    devices: tuple[PciDevice, ...] = (),
    noted: Collection[str] = (),
) -> HeldDevices:
    """Join the parts. `units` are offered, `devices` the node's, `noted` the UIDs of pods in kubelet's notes."""
    snapshot = Snapshot(devices=devices)
    names = dict.fromkeys(unit.resource_name for unit in units)
    offer = Offer(snapshot, {name: tuple(u for u in units if u.resource_name == name) for name in names})
    holders = cast(PodsFile, SimpleNamespace(noted=noted, is_settled=True, look=int))
    node = Node(cast(Host, None), books, Latest(snapshot))
    cell, asker = Latest(config), KubeletAsker(kubelet, loop)
    claims = PodClaims(cell, node, asker, Latest(None))
    return HeldDevices(cell, node, asker, Latest(offer), holders, Sources(claims))
