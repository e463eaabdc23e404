"""Where GPUs and NICs stand on hosts whose PCI tree does not tell. Pure.

Some clouds show a virtual machine each device on a PCI segment of its own, and no more than its NUMA node. Which of
them hang on one switch is in the topology files that these clouds ship for NCCL: the tables below are made of those for
known kinds of instances, another file can be named in the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

NOT_TOLD = -1
_VIRTUAL = re.compile(
    r"Microsoft Corporation Virtual Machine|Amazon EC2 (?!.*\bmetal)|Google|QEMU|KVM|VMware|Xen|OpenStack|Alibaba"
)
_BUS_ID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")

_Switches = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
_TABLES: Mapping[str, _Switches] = {
    # Azure/azhpc-images, topology/ndv4-topo.xml
    "Standard_ND96asr_v4": (
        ((0x3, 0x4), (0x103, 0x104)),
        ((0x1, 0x2), (0x101, 0x102)),
        ((0xD, 0xE), (0x107, 0x108)),
        ((0xB, 0xC), (0x105, 0x106)),
    ),
    # Azure/azhpc-images, topology/ndv5-topo.xml, which its components/setup_sku_customizations.sh takes for
    # Standard_ND96isr_H200_v5, too. For ND GB200, GB300 and MI300X it has none.
    "Standard_ND96isr_H100_v5": tuple(
        ((gpu,), (0x101 + number,)) for number, gpu in enumerate((0x1, 0x2, 0x3, 0x8, 0x9, 0xA, 0xB, 0xC))
    ),
}
"""Instance type → PCI segments of the GPUs and NICs on each switch."""


MOST_SWITCHES = 32
"""So many PCI devices may stand within each other in a file of NCCL's."""
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)


@dataclass(frozen=True)
class Places:
    """Where some devices stand, and who says so."""

    source: str = ""
    """A kind of instance, or the path of a file; empty if there is nothing to add to the PCI tree."""
    ways: tuple[tuple[str, tuple[str, ...], int], ...] = ()
    """PCI address, its way as in `PciDevice.path`, NUMA node or NOT_TOLD."""

    @cached_property
    def of(self) -> Mapping[str, tuple[tuple[str, ...], int]]:
        """Map PCI addresses to way and NUMA node."""
        return MappingProxyType({address: (way, numa_node) for address, way, numa_node in self.ways})


AS_SHOWN = Places()


def known_places(gpus: Iterable[str], flat: Iterable[str]) -> Places:
    """Find the table of a host by the addresses of its GPUs. `flat` are devices that hang on no bridge.

    GPUs may be missing, as a broken one is. More than half must be there, and fit into one table alone.
    """
    found, alone = frozenset(gpus), frozenset(flat)
    if not found <= alone:
        return AS_SHOWN
    fitting = [name for name, switches in _TABLES.items() if _fits(found, switches)]
    if len(fitting) != 1:
        return AS_SHOWN
    (name,) = fitting
    ways = (
        (address, (switch, switch, address), NOT_TOLD)
        for number, parts in enumerate(_TABLES[name])
        for switch in [f"{name} switch {number}"]
        for address in (_address(segment) for part in parts for segment in part)
        if address in alone
    )
    return Places(name, tuple(ways))


def nccl_places(text: str, source: str) -> Places:
    """Read NCCL's topology file (what `NCCL_TOPO_FILE` names). Raises ValueError if it is none."""
    from xml.etree import ElementTree  # only where a file is configured

    try:
        # Comments of such files have rows of dashes, which XML forbids there.
        document = ElementTree.fromstring(_COMMENT.sub("", text).lstrip())  # noqa: S314 -- of 1 MiB at most
    except ElementTree.ParseError as error:
        raise ValueError(f"is no topology file of NCCL's: {error}") from error
    root = next(document.iter("system"), None)
    if root is None:
        raise ValueError("is no topology file of NCCL's: it has no <system>")
    ways: dict[str, tuple[tuple[str, ...], int]] = {}

    def note(parent: ElementTree.Element, above: tuple[str, ...], numa_node: int) -> None:
        for device in parent.findall("pci"):
            own = device.get("busid", "").lower()
            if not _BUS_ID.fullmatch(own):
                raise ValueError(f"names a PCI device {own[:40]!r}, which is no address")
            ways[own] = _way(above, own), numa_node
            if len(above) > MOST_SWITCHES:
                raise ValueError(f"has more than {MOST_SWITCHES} PCI devices within each other")
            note(device, (*above, own), numa_node)

    for cpu in root.iter("cpu"):
        number = cpu.get("numaid", "")
        note(cpu, (), int(number) if number.isdecimal() else NOT_TOLD)
    if not ways:
        raise ValueError("is no topology file of NCCL's: it names no PCI device")
    return Places(source, tuple((address, *place) for address, place in ways.items()))


def is_virtual(machine: str) -> bool:
    """Tell whether a machine is a virtual one, by what it is called (DMI: vendor and product)."""
    return _VIRTUAL.search(machine) is not None


def _way(switches: Sequence[str], own: str) -> tuple[str, ...]:
    """Spell a way as the kernel would: an element is a whole switch, upstream port and downstream ports.

    The first switch stands for what is above it, too: of that the file tells no more than the NUMA node.
    """
    if not switches:
        return (own,)
    steps = zip(switches, (*switches[1:], own), strict=True)
    ports = [port for switch, below in steps for port in (switch, f"{switch} to {below}")]
    return (switches[0], *ports, own)


def _fits(found: frozenset[str], switches: _Switches) -> bool:
    whole = {_address(segment) for gpus, _ in switches for segment in gpus}
    return found <= whole and 2 * len(found) > len(whole)


def _address(segment: int) -> str:
    return f"{segment:04x}:00:00.0"
