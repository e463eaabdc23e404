"""What network configurations may name: whoever writes one could otherwise take any device of the node."""

from __future__ import annotations

from dataclasses import dataclass

from agent.config.reader import Reader
from agent.model.device import is_pci_address
from agent.model.pf_selector import word


@dataclass(frozen=True, slots=True)
class CniSettings:
    require_grant: bool = True
    """A device that a resource offers comes only into the pod that kubelet gave it."""
    protect: tuple[str, ...] = ()
    """Interfaces and PCI addresses of adapters that the host keeps for itself."""


def read_cni(reader: Reader) -> CniSettings:
    """Read the section `cni`."""
    plain = CniSettings()
    return CniSettings(
        require_grant=reader.flag(
            "requireGrant",
            plain.require_grant,
            about="Devices that a resource offers come only into the pod that kubelet gave them, whatever a network"
            " names",
        ),
        protect=reader.strings(
            "protect",
            "an interface name or a PCI address",
            _adapter,
            about="Adapters by interface or PCI address that never come into a pod, nor carry a pod's interface",
        ),
    )


def _adapter(text: str) -> str:
    return text.lower() if is_pci_address(text.lower()) else word(text)
