"""Node files made of what other tools write about a machine: rdma-core's `rdma_topo dump`, hwloc's `lstopo --of xml`.

Neither has all that a recording has. VFs are left out, since nothing tells which PF they belong to; interfaces count as
up and ports as active; MAC addresses, GUIDs and the numbers of device files are made up; NUMA nodes have neither CPUs
nor memory where the file does not tell.
"""

from __future__ import annotations

import json
import re
import tempfile
from base64 import b64decode
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from zlib import decompress
from zlib import error as ZlibError

from agent.errors import ConfigError, HardwareError
from agent.hardware import recorded
from agent.hardware.adapter_ids import read_adapter_id
from agent.hardware.sysfs.pci import PCI_DEVICES
from agent.model.device import NO_NUMA_NODE, is_data_direct, is_pci_address
from hack.node_tree import Ids, NodeTree, guid, mac

LEFT_OUT = "VFs; the state of links, MAC addresses, GUIDs and numbers of device files are made up"
_MOST_NUMA_NODES = 1024
"""The most that Linux is built for (CONFIG_NODES_SHIFT)."""
_MODALIAS = re.compile(r"pci:v0{4}(\w{4})d0{4}(\w{4})sv0{4}(\w{4})sd0{4}(\w{4})bc(\w\w)sc(\w\w)i(\w\w)")
_PCI_TYPE = re.compile(r"([0-9a-f]{4}) \[(\w{4}):(\w{4})\](?: \[(\w{4}):(\w{4})\])?")
_HOST = re.compile(r"(?:[0-9a-f]{4,8}):[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class _Function:
    """A PCI function, as a file has it."""

    address: str
    parent: str
    """Address of the bridge above, or the name of the host bridge (`pci0000:3a`)."""
    ids: Ids
    numa_node: int = NO_NUMA_NODE
    netdevs: tuple[str, ...] = ()
    rdma: tuple[str, ...] = ()
    vpd: str | None = None


def from_rdma_topo(text: str, name: str, description: str) -> recorded.Node:
    """Read what `rdma_topo dump` writes: a JSON list of PCI functions. Raises ConfigError with all that is wrong."""
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise ConfigError("rdma_topo", [f"is not JSON: {error}"]) from error
    if not isinstance(entries, list):
        raise ConfigError("rdma_topo", ["must be a JSON list, as `rdma_topo dump` writes it (not `rdma_topo topo -j`)"])
    problems: list[str] = []
    found = [function for entry in entries if (function := _of_dump(entry, problems)) is not None]
    if problems:
        raise ConfigError("rdma_topo", problems)
    return _node(found, {}, name, description)


def from_hwloc(text: str, name: str, description: str) -> recorded.Node:
    """Read hwloc's XML, version 2 or later. Raises ConfigError if it is none."""
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ConfigError("hwloc", [f"is not XML: {error}"]) from error
    if root.tag != "topology":
        raise ConfigError("hwloc", ["has no <topology>: write it with `lstopo --of xml`"])
    cpulists: dict[int, str] = {}
    found = list(_of_hwloc(root, "", NO_NUMA_NODE, cpulists))
    if not found:
        raise ConfigError("hwloc", ["names no PCI device: write it with `lstopo --of xml`, as root"])
    return _node(found, cpulists, name, description)


def _of_dump(entry: Any, problems: list[str]) -> _Function | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("realpath"), str):
        problems.append(f"must have a realpath: {str(entry)[:80]}")
        return None
    above, address = entry["realpath"].rstrip("/").split("/")[-2:] if "/" in entry["realpath"] else ("", "")
    told = _MODALIAS.match(str(entry.get("modalias", "")))
    if not is_pci_address(address) or told is None:
        problems.append(f"{entry['realpath']}: must be a PCI function with its modalias, is {entry.get('modalias')!r}")
        return None
    try:
        config, vpd = (_unpacked(entry.get(key)) for key in ("config", "vpd"))
    except (ValueError, ZlibError) as error:
        problems.append(f"{address}: config and vpd must be zlib in base64: {error}")
        return None
    if config[:2] == b"\xff\xff":
        return None  # a VF: its own configuration space has no vendor (PCI Express, SR-IOV: 9.3.4.1)
    vendor, device, sub_vendor, sub_device, *classes = (part.lower() for part in told.groups())
    ids = Ids("".join(classes), vendor, device, f"{sub_vendor}:{sub_device}")
    numa_node = entry.get("numa_node")
    subsystems = entry.get("subsystems") or {}
    return _Function(
        address,
        above,
        ids,
        numa_node if isinstance(numa_node, int) and numa_node < _MOST_NUMA_NODES else NO_NUMA_NODE,
        tuple(map(str, subsystems.get("net", ()))),
        tuple(map(str, subsystems.get("infiniband", ()))),
        _adapter_id(address, vpd),
    )


def _unpacked(value: object) -> bytes:
    return decompress(b64decode(value, validate=True)) if isinstance(value, str) else b""


def _adapter_id(address: str, vpd: bytes) -> str | None:
    """Read keyword V3, by the agent's own reader. None if the file has no such data, or broken ones."""
    if not vpd:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(f"{folder}{PCI_DEVICES}/{address}")
        path.mkdir(parents=True)
        (path / "vpd").write_bytes(vpd)
        try:
            return read_adapter_id(Path(folder), address)
        except HardwareError:
            return None


def _of_hwloc(
    element: ElementTree.Element, above: str, numa_node: int, cpulists: dict[int, str]
) -> Iterator[_Function]:
    kind = element.get("type")
    if kind == "NUMANode":
        cpulists[int(element.get("os_index", "0"))] = _cpulist(element.get("cpuset", ""))
    own = _bits(element.get("nodeset", ""))
    if len(own) == 1:
        (numa_node,) = own
    address, host = element.get("pci_busid", ""), _HOST.match(element.get("bridge_pci", "").replace("[", ""))
    if kind == "Bridge" and not address and host is not None:
        above = f"pci{host[0]}"
    told = _PCI_TYPE.match(element.get("pci_type", ""))
    if kind in ("Bridge", "PCIDev") and is_pci_address(address) and told is not None:
        pci_class, vendor, device, sub_vendor, sub_device = told.groups()
        ids = Ids(f"{pci_class}00", vendor, device, f"{sub_vendor or '0000'}:{sub_device or '0000'}")
        names: dict[str, list[str]] = {"2": [], "3": []}  # network and OpenFabrics (HWLOC_OBJ_OSDEV_…)
        for below in element.findall("object[@type='OSDev']"):
            names.setdefault(below.get("osdev_type", ""), []).append(below.get("name", ""))
        if not any("Virtual Function" in (info.get("value") or "") for info in element.findall("info")):
            yield _Function(
                address, above or f"pci{address[:-5]}", ids, numa_node, tuple(names["2"]), tuple(names["3"])
            )
        above = address
    for child in element.findall("object"):
        yield from _of_hwloc(child, above, numa_node, cpulists)


def _bits(mask: str) -> list[int]:
    """List the bits of hwloc's masks: 32 at a time, the highest first, `0xf...f` for all further ones left out here."""
    words = [word for word in mask.split(",") if word != "0xf...f"]
    value = 0
    for word in words:
        value = value << 32 | (int(word, 16) if word else 0)
    return [bit for bit in range(value.bit_length()) if value >> bit & 1]


def _cpulist(cpuset: str) -> str:
    """Spell a mask as the kernel lists CPUs: 0-3,8."""
    bits = _bits(cpuset)
    firsts = [bit for bit in bits if bit - 1 not in bits]
    lasts = [bit for bit in bits if bit + 1 not in bits]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(firsts, lasts, strict=True))


def _node(functions: Iterable[_Function], cpulists: dict[int, str], name: str, description: str) -> recorded.Node:
    found = {function.address: function for function in functions}
    tree = NodeTree(name, description, iommu=False)
    last = max([*cpulists, *(function.numa_node for function in found.values()), 0])
    tree.numa([cpulists.get(number, "") for number in range(last + 1)], 0)
    made = set[str]()
    for function in found.values():
        _add(tree, function, found, made)
    if any(is_data_direct(int(f.ids.vendor, 16), int(f.ids.device, 16)) for f in found.values()):
        tree.vpd = {address: function.vpd for address, function in found.items() if function.vpd is not None}
    return recorded.parse(tree.document(), name)


def _add(tree: NodeTree, function: _Function, found: dict[str, _Function], made: set[str]) -> None:
    """Add a function below the bridges above it."""
    if function.address in made:
        return
    made.add(function.address)
    if function.parent in found:
        _add(tree, found[function.parent], found, made)
    tree.pci(function.parent, function.address, function.ids, function.numa_node)
    for netdev in function.netdevs:
        tree.netdev(function.address, netdev, mac("02:00:00", tree.next("mac") + 1), up=True)
    for device in function.rdma:
        layer = "InfiniBand" if function.ids.pci_class.startswith("0207") else "Ethernet"
        port: dict[str, object] = {"link_layer": layer, "lid": "0x0", "phys_state": "5: LinkUp", "state": "4: ACTIVE"}
        own = guid("0200:0000:00", tree.next("guid") + 1)
        tree.rdma(function.address, device, own, [port], netdev=next(iter(function.netdevs), None))
