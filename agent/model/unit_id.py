"""`UnitId`: the IDs under which kubelet counts units, read and written here and nowhere else. Pure.

    0000:3b:02.1             a VF, a whole adapter or an accelerator, by its PCI address
    hca-0c42a10300651234-7   a share: an adapter of which many pods have a part, by its node GUID, or by its PCI
                             address where that says nothing, with a number
    hca-0c42a10300651234     such an adapter itself, where its shares are the capacity of one device (DRA)
    slot-rdma:vf-0-3         a slot: a resource, a NUMA node (`any` if the firmware did not tell) and a number; the
                             device is chosen late
    GPU-5c3a9f60-…           a GPU, or a slice of one (MIG-…), by its UUID; a replica has `::` and a number behind that
    rail-GPU-5c3a9f60-…      a GPU with its nearest NIC, by its GPU

An ID depends on nothing that a reboot changes, and differs from every other unit's. Those of other plugins are any
text; `agent.model.gpu_ids` knows which of them mean GPUs.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from agent.model.device import NO_NUMA_NODE, is_pci_address
from agent.model.gpu_ids import RAIL, UUID

MAX_UNIT_ID = 63
"""So long may an ID be that is also a name of a CDI device and of a file, as a slot's is (CDI's SPEC.md)."""
CDI_VENDOR = "nodefabric.io"
ANY = "any"
SLOT = "slot-"
"""What the ID of each slot begins with, and of no other unit of ours."""

_MAX_RESOURCE = MAX_UNIT_ID - len(SLOT) - len("-9999-99999")
_SLOT = re.compile(r"slot-[A-Za-z0-9:._-]+-(?P<numa>[0-9]{1,4}|any)-(?P<number>[0-9]{1,5})")
_ADDRESS = r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7](?:-[0-9]{1,2})?"
_SHARE = re.compile(rf"hca-(?P<adapter>[0-9a-f]{{16}}|{_ADDRESS})-(?P<number>[0-9]{{1,5}})")


class UnitKind(Enum):
    DEVICE = "device"
    SHARE = "share"
    SLOT = "slot"
    GPU = "gpu"
    RAIL = "rail"
    OTHER = "other"
    """No ID of ours, or a number in a pool that is shared as a whole."""


@dataclass(frozen=True, slots=True)
class UnitId:
    """What an ID says. `UnitId.parse` reads any text."""

    text: str
    kind: UnitKind
    device: str = ""
    """PCI address, GUID of a share's adapter, UUID of a GPU or of a rail's GPU; empty for a slot."""
    numa_node: int = NO_NUMA_NODE
    """Of a slot: where kubelet takes it to be."""
    number: int = 0
    """Of a share, a slot or a replica."""

    @classmethod
    def parse(cls, text: str) -> UnitId:
        """Read an ID. What is none of ours has the kind OTHER."""
        return _parsed(text)

    @property
    def is_slot(self) -> bool:
        """Tell whether it is a slot's, whatever its resource."""
        return self.kind is UnitKind.SLOT

    @property
    def is_share(self) -> bool:
        """Tell whether it is a share's, whatever its resource."""
        return self.kind is UnitKind.SHARE

    @property
    def is_rail(self) -> bool:
        """Tell whether it is a rail's."""
        return self.kind is UnitKind.RAIL

    def is_slot_of(self, resource_name: str) -> bool:
        """Tell whether it could be one of this resource's slots."""
        return self.is_slot and self.text == slot_id(resource_name, self.numa_node, self.number)


@lru_cache(maxsize=8192)
def _parsed(text: str) -> UnitId:
    if text.startswith(SLOT) and len(text) <= MAX_UNIT_ID and (found := _SLOT.fullmatch(text)):
        numa_node = NO_NUMA_NODE if found["numa"] == ANY else int(found["numa"])
        return UnitId(text, UnitKind.SLOT, "", numa_node, int(found["number"]))
    if text.startswith("hca-") and (found := _SHARE.fullmatch(text)):
        return UnitId(text, UnitKind.SHARE, found["adapter"], number=int(found["number"]))
    if text.startswith(RAIL):
        return UnitId(text, UnitKind.RAIL, text.removeprefix(RAIL))
    if is_pci_address(text):
        return UnitId(text, UnitKind.DEVICE, text)
    device, _, number = text.partition("::")
    if UUID.fullmatch(device):
        return UnitId(text, UnitKind.GPU, device, number=int(number) if _is_number(number) else 0)
    return UnitId(text, UnitKind.OTHER, device)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 9


def slot_id(resource_name: str, numa_node: int, number: int) -> str:
    """Name a resource's slot: slot-rdma:vf-0-3."""
    # No resource's name has a colon, so two names never become one.
    short = resource_name.replace("/", ":")
    if len(short) > _MAX_RESOURCE:
        digest = hashlib.sha256(resource_name.encode()).hexdigest()[:8]
        short = f"{short[: _MAX_RESOURCE - 9]}.{digest}"
    return f"{SLOT}{short}-{ANY if numa_node == NO_NUMA_NODE else numa_node}-{number}"


def share_id(adapter: str, number: int) -> str:
    """Name a share of an adapter: hca-0c42a10300651234-7."""
    return f"hca-{adapter}-{number}"


def adapter_id(adapter: str) -> str:
    """Name an adapter all of whose shares are one device: hca-0c42a10300651234."""
    return f"hca-{adapter}"


def rail_id(gpu_uuid: str) -> str:
    """Name the rail of a GPU: rail-GPU-5c3a9f60-…"""
    return f"{RAIL}{gpu_uuid}"


def replica_id(gpu_uuid: str, number: int) -> str:
    """Name a replica of a GPU or of a slice: GPU-5c3a9f60-…::2."""
    return f"{gpu_uuid}::{number}"


def cdi_name(kind: str, unit_id: str) -> str:
    """Name the CDI device of a unit: nodefabric.io/vf=slot-rdma:vf-0-3."""
    return f"{cdi_kind(kind)}={unit_id}"


def cdi_kind(kind: str) -> str:
    """Name the CDI kind of all units of a kind of resource: nodefabric.io/vf."""
    return f"{CDI_VENDOR}/{kind}"
