"""What Data Direct needs of a node's kernel, rdma-core and PCIe switch, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from agent.model.data_direct import is_data_direct
from agent.model.device import PciDevice, Snapshot

REQUEST_REDIRECT, COMPLETION_REDIRECT = 1 << 2, 1 << 3
_SOURCE_VALIDATION, _UPSTREAM_FORWARDING = 1 << 0, 1 << 4


@dataclass(frozen=True, slots=True)
class AcsRule:
    """Which bits of a port's ACS control register must be set, and which not (rdma-core, kernel-boot/rdma_topo)."""

    on: int
    off: int
    words: str
    """The same as the kernel's parameter pci=config_acs= spells it."""


TOWARDS_DATA_DIRECT = AcsRule(
    _SOURCE_VALIDATION | COMPLETION_REDIRECT | _UPSTREAM_FORWARDING, REQUEST_REDIRECT, "xx110x1"
)
TOWARDS_GPU = AcsRule(_SOURCE_VALIDATION | REQUEST_REDIRECT | _UPSTREAM_FORWARDING, COMPLETION_REDIRECT, "xx101x1")


@dataclass(frozen=True, slots=True)
class Port:
    """A downstream port of the switch that a Data Direct function and a GPU have in common."""

    address: str
    towards: str
    """The PCI address of the function or GPU below it."""
    rule: AcsRule


@dataclass(frozen=True, slots=True)
class DataDirectFacts:
    kernel: str
    """Its release."""
    library: str = ""
    """Path of the host's libmlx5; empty if it has none."""
    library_knows: bool = False
    acs: tuple[tuple[Port, int | None], ...] = ()
    """The ACS control register of each port."""


def functions(snapshot: Snapshot) -> tuple[PciDevice, ...]:
    """List the Data Direct functions."""
    return tuple(device for device in snapshot.devices if is_data_direct(device.vendor, device.device))


def shared_ports(snapshot: Snapshot) -> tuple[Port, ...]:
    """List the ports of switches through which a Data Direct function and a GPU reach each other.

    The path has the host bridge first, then a root port, then the switch: ports that only a root port joins are none.
    """
    found: dict[str, Port] = {}
    gpus = [snapshot.by_address[g.pci_address] for g in snapshot.all_gpus if g.pci_address in snapshot.by_address]
    for function in functions(snapshot):
        for gpu in gpus:
            pairs = zip(function.path[:-1], gpu.path[:-1], strict=False)
            common = next((i for i, (one, other) in enumerate(pairs) if one != other), 0)
            if common > 2:
                for device, rule in ((function, TOWARDS_DATA_DIRECT), (gpu, TOWARDS_GPU)):
                    port = device.path[common]
                    found[port] = Port(port, device.address, rule)
    return tuple(found[address] for address in sorted(found))
