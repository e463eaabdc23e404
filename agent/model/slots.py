"""Names of slots: the units of a resource whose devices are chosen late.

A slot is called `slot-<resource>-<NUMA node>-<number>`, such as `slot-rdma:vf-0-3`. The name depends on nothing that
a reboot changes, differs from every other unit's, and is good as the name of a CDI device and of a file: letters,
digits, `-`, `_`, `.` and `:` (CDI's SPEC.md, the device names). `any` stands for a NUMA node that the firmware did
not tell.
"""

from __future__ import annotations

import hashlib
import re

from agent.model.device import NO_NUMA_NODE

MAX_SLOT_ID = 63
CDI_VENDOR = "nodefabric.io"
ANY = "any"

_MAX_RESOURCE = MAX_SLOT_ID - len("slot-") - len("-9999-99999")
_SLOT = re.compile(r"slot-[A-Za-z0-9:._-]+-(?P<numa>[0-9]{1,4}|any)-(?P<number>[0-9]{1,5})")


def slot_id(resource_name: str, numa_node: int, number: int) -> str:
    """Name a resource's slot."""
    return f"{_prefix(resource_name)}{ANY if numa_node == NO_NUMA_NODE else numa_node}-{number}"


def is_slot_id(text: str) -> bool:
    """Tell whether a text is a slot's name, whatever its resource."""
    return text.startswith("slot-") and len(text) <= MAX_SLOT_ID and _SLOT.fullmatch(text) is not None


def is_slot_of(resource_name: str, text: str) -> bool:
    """Tell whether a text could be the name of one of this resource's slots."""
    found = _SLOT.fullmatch(text)
    return found is not None and text == f"{_prefix(resource_name)}{found['numa']}-{found['number']}"


def numa_node_of(slot: str) -> int:
    """Tell on which NUMA node kubelet takes a slot to be."""
    found = _SLOT.fullmatch(slot)
    return NO_NUMA_NODE if found is None or found["numa"] == ANY else int(found["numa"])


def number_of(slot: str) -> int:
    """Return the number of a slot on its NUMA node."""
    found = _SLOT.fullmatch(slot)
    return int(found["number"]) if found is not None else 0


def cdi_name(kind: str, slot: str) -> str:
    """Name the CDI device of a slot: nodefabric.io/vf=slot-rdma:vf-0-3."""
    return f"{cdi_kind(kind)}={slot}"


def cdi_kind(kind: str) -> str:
    """Name the CDI kind of all slots of a kind of resource: nodefabric.io/vf."""
    return f"{CDI_VENDOR}/{kind}"


def _prefix(resource_name: str) -> str:
    # No resource's name has a colon, so two names never become one.
    short = resource_name.replace("/", ":")
    if len(short) > _MAX_RESOURCE:
        digest = hashlib.sha256(resource_name.encode()).hexdigest()[:8]
        short = f"{short[: _MAX_RESOURCE - 9]}.{digest}"
    return f"slot-{short}-"
