"""How a configuration names hardware and resources. A function says no with ValueError. Pure."""

from __future__ import annotations

import re
from typing import Any

from agent.config.networks import NETWORK_NAME
from agent.model.device import is_pci_address
from agent.model.pf_selector import PfSelector, parse_pf

RESOURCE_NAME = re.compile(
    r"(?:[a-z0-9](?:[a-z0-9-]*[a-z0-9])?\.)*[a-z0-9](?:[a-z0-9-]*[a-z0-9])?/"
    r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
)
KUBELETS_OWN = "is a name of Kubernetes' own, which kubelet refuses: take a domain of yours"
_PF = re.compile(r"[^\s/]{1,15}")
"""An interface, or a PCI address."""
NETWORK_SCHEMA = {
    "anyOf": [
        {"type": "string", "pattern": f"^(?:{NETWORK_NAME.pattern})$"},
        {"type": "object", "additionalProperties": {"type": "string", "pattern": f"^(?:{NETWORK_NAME.pattern})$"}},
    ]
}
_CLASS = re.compile(r"(?:0x)?([0-9a-f]{2}(?:[0-9a-f]{2}){0,2})")
_PKEY = re.compile(r"(?:0x)?[0-9a-fA-F]{1,4}")
_HEX_ID = re.compile(r"(?:0x)?[0-9a-fA-F]{4}")


def hex_id(text: str) -> int:
    """Read a PCI vendor or device ID."""
    if not _HEX_ID.fullmatch(text):
        raise ValueError(text)
    return int(text, 16)


def pci_class(text: str) -> str:
    """Read the first digits of a PCI class code."""
    found = _CLASS.fullmatch(text.lower())
    if not found:
        raise ValueError(text)
    return found[1]


def number(text: str) -> str:
    """Read a number of the firmware's, as text."""
    if not text.isascii() or not text.isdecimal() or len(text) > 10:
        raise ValueError(text)
    return text


def pkey(text: str) -> int:
    """Read a partition key."""
    if not _PKEY.fullmatch(text):
        raise ValueError(text)
    return int(text, 16)


def root_device(text: str) -> PfSelector:
    """Read a PF's PCI address, perhaps with VF indices."""
    found = parse_pf(text)
    return PfSelector(pci_address(found.pf), found.vf_indices)


def pci_address(text: str) -> str:
    """Read a PCI address."""
    if not is_pci_address(text.lower()):
        raise ValueError(text)
    return text.lower()


def is_extended(name: str) -> bool:
    """Tell whether kubelet takes a resource of this name from a plugin (core/v1/helper, IsExtendedResourceName)."""
    domain = name.partition("/")[0]
    return not domain.endswith("kubernetes.io") and not domain.startswith("requests.")


def is_network_name(value: Any) -> bool:
    """Tell whether a value is a network's name, or names one for each of some PFs."""
    if not isinstance(value, dict):
        return isinstance(value, str) and NETWORK_NAME.fullmatch(value) is not None
    return bool(value) and all(
        isinstance(pf, str) and _PF.fullmatch(pf) and isinstance(name, str) and is_network_name(name)
        for pf, name in value.items()
    )
