"""What the agent publishes of a node by DRA, and a scheduler's node made of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agent.config import Config, Dra, Resource, Select
from agent.model.device import Snapshot
from agent.offer.units import plain_offer
from deviceplugin.dra.attributes import Facts, StableFacts, stable_facts
from deviceplugin.dra.devices import Document, DraDevice, devices_of, slices_of
from hack.sim.cluster.allocator import LIMIT_SECONDS, Node
from hack.sim.cluster.claims_for_pairs import NIC_DRIVER, UUID, classes, gpu_slice

NODE, NIC = "node", "rdma/nic"


@dataclass(frozen=True)
class Published:
    """What there is of one resource of VFs."""

    snapshot: Snapshot
    devices: Mapping[str, DraDevice]
    """By their name."""
    slices: Sequence[Document]

    def node(self, limit: float = LIMIT_SECONDS) -> Node:
        """Make a node of it, with its GPUs, on which nothing is taken. `limit` is in seconds of the processor."""
        return Node(NODE, [gpu_slice(self.snapshot, NODE), *self.slices], classes(NIC), limit, time.thread_time)


def publish(snapshot: Snapshot, vfs: Sequence[str], binding: str, aliases: Sequence[str] = Dra().aliases) -> Published:
    """Publish VFs, bound early or late."""
    resource = Resource(NIC, "vf", Select(pci_addresses=tuple(vfs)), offer="dra", binding=binding)
    config = Config(resources=(resource,), dra=Dra(driver=NIC_DRIVER, aliases=tuple(aliases)))
    offer = plain_offer([resource], snapshot)
    return _published(snapshot, devices_of(config, offer, Facts(stable_facts(offer, StableFacts()))))


def with_all_aliases(published: Published) -> Published:
    """Let each VF name the GPU that it is nearest to, by which claims match, and not one a GPU alone."""
    told = [
        replace(d, attributes={**d.attributes, UUID: d.attributes["nearGpu"]} if "nearGpu" in d.attributes else {})
        for d in published.devices.values()
    ]
    return _published(published.snapshot, told)


def _published(snapshot: Snapshot, devices: Sequence[DraDevice]) -> Published:
    return Published(snapshot, {d.name: d for d in devices}, slices_of(devices, NIC_DRIVER, NODE))
