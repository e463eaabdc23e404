"""Data Direct: adapters whose traffic with GPUs takes another PCI function than their PF. Pure.

On GB300, Vera Rubin and some GB200 hosts a ConnectX-8's PF hangs below a root port of the CPU, while a second function
of the same adapter (15b3:2100) stands with a GPU below the adapter's own switch, in another PCI segment. Keyword V3 of
both functions' vital product data joins them, and nothing else does (rdma-core, kernel-boot/rdma_topo).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent.model.device import PciDevice

VENDOR = 0x15B3
"""The vendor of adapters that have such functions."""
_FUNCTION = 0x2100


@dataclass(frozen=True, slots=True)
class DataDirect:
    """Which function of an adapter stands with the GPUs."""

    of: Mapping[str, str]
    """PF → its Data Direct function; PFs without one are left out."""
    unknown: frozenset[str]
    """PFs that may have such a function, but nothing says which: how near they are to a GPU is not known."""
    unpaired: tuple[str, ...]
    """Data Direct functions whose PF is not known."""

    @property
    def is_here(self) -> bool:
        """Whether the host has such functions: its PCI tree alone does not show what is near to what."""
        return bool(self.of or self.unknown or self.unpaired)


NO_DATA_DIRECT = DataDirect(MappingProxyType({}), frozenset(), ())


def is_data_direct(vendor: int, device: int) -> bool:
    """Report whether these PCI IDs are those of a Data Direct function."""
    return vendor == VENDOR and device == _FUNCTION


def may_have_adapter_id(device: PciDevice) -> bool:
    """Report whether a PCI function's vital product data may tell which adapter it belongs to."""
    return device.vendor == VENDOR and not device.is_vf


def pair_functions(devices: Iterable[PciDevice], adapter_ids: Mapping[str, str]) -> DataDirect:
    """Pair PFs with their Data Direct functions by keyword V3.

    `adapter_ids` maps the functions whose vital product data was read to their V3, or to "" where it has none; Data
    Direct functions that have left the bus, too. A PF without a partner surely has none only if it was read, if each
    function has found its PF, and if no PF of its model has one.
    """
    own = {device.address: device for device in devices if may_have_adapter_id(device)}
    functions = [address for address, d in own.items() if is_data_direct(d.vendor, d.device)]
    gone = {adapter_ids[address] for address in adapter_ids.keys() - own.keys()} - {""}
    if not functions and not gone:
        return NO_DATA_DIRECT
    pfs = [address for address in own if address not in functions]
    by_id: dict[str, list[str]] = {}
    for function in functions:
        by_id.setdefault(adapter_ids.get(function, ""), []).append(function)
    by_id.pop("", None)
    found = {pf: by_id[adapter_ids[pf]] for pf in pfs if adapter_ids.get(pf) in by_id}
    of = {pf: partners[0] for pf, partners in found.items() if len(partners) == 1}
    paired = set(of.values())
    unpaired = tuple(function for function in functions if function not in paired)
    models = {own[pf].device for pf in of}
    unknown = frozenset(
        pf
        for pf in pfs
        if pf not in of and (unpaired or own[pf].device in models or pf not in adapter_ids or adapter_ids[pf] in gone)
    )
    return DataDirect(MappingProxyType(of), unknown, unpaired)
