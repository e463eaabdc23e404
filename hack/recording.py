"""Records a machine's hardware as a node file, so that a report from the field becomes a test.

Taken are the files that the scan reads and a few neighbours, for the devices that the scan finds
and the bridges above them; nothing else of the machine. Of adapters with a Data Direct function, keyword V3 of their
vital product data is taken, which tells what belongs together. What names one machine (MAC addresses, GUIDs, GPU
UUIDs, V3, the boot ID) is replaced unless it is asked for.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.hardware.adapter_ids import with_adapter_ids
from agent.hardware.recorded import Node
from agent.hardware.sysfs.scan import scan
from agent.model.device import Gpu
from hack import node_file

_PCI_FILES = (
    "class",
    "vendor",
    "device",
    "revision",
    "subsystem_vendor",
    "subsystem_device",
    "acpi_index",
    "numa_node",
    "sriov_totalvfs",
    "sriov_numvfs",
    "sriov_offset",
    "sriov_stride",
    "sriov_vf_device",
    "product_name",
    "mem_info_vram_total",
    "devdrv_sysfs_bdf_to_devid",
)
_NETDEV_FILES = (
    "address",
    "carrier",
    "dev_port",
    "flags",
    "ifindex",
    "mtu",
    "operstate",
    "phys_port_name",
    "speed",
    "type",
)
_RDMA_FILES = ("node_type", "node_guid", "sys_image_guid", "fw_ver", "board_id", "hca_type", "parent")
_PORT_FILES = (
    "state",
    "phys_state",
    "link_layer",
    "rate",
    "lid",
    "sm_lid",
    "cap_mask",
    "pkeys/0",
    "gids/0",
    "gid_attrs/ndevs/0",
)
_CHAR_DEVICE_FILES = ("dev", "ibdev", "port")
_NODE_FILES = ("cpulist", "distance", "meminfo")
_CPU_FILES = ("physical_package_id", "core_id")
_DMI_FILES = ("sys_vendor", "product_name")
_HUGEPAGES_FILES = ("nr_hugepages", "free_hugepages", "surplus_hugepages")
_DEV_NAMES = re.compile(r"(?:uverbs|umad|issm)[0-9]+|rdma_cm")


def record(
    root: Path, name: str, description: str, gpus: tuple[Gpu, ...] = (), *, keep_identifiers: bool = False
) -> Node:
    """Record the machine below root. What cannot be read is left out, as the scan would."""
    recorder = _Recorder(os.fspath(root).rstrip("/"))
    recorder.take_all()
    node = Node(name, description, recorder.tree, gpus, recorder.vpd)
    return node if keep_identifiers else anonymous(node)


def anonymous(node: Node) -> Node:
    """Replace what names one machine. Equal values stay equal, and vendors' prefixes stay."""
    known: dict[str, str] = {}
    tree = _without_identifiers(node.tree, (), known)
    adapters = sorted(set(node.vpd.values()) - {""}, key=list(node.vpd.values()).index)
    numbers = {adapter: f"00000000-0000-4000-8000-{n:012x}" for n, adapter in enumerate(adapters, 1)} | {"": ""}
    vpd = {address: numbers[adapter] for address, adapter in node.vpd.items()}
    return replace(node, tree=tree, gpus=node_file.anonymous_gpus(node.gpus), vpd=vpd)


class _Recorder:
    """A tree that grows by what is asked for and is there. Paths are the kernel's (`/sys/…`)."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.tree: dict[str, Any] = {}
        self.vpd: dict[str, str] = {}

    def take_all(self) -> None:
        """Record all that the scan of this root sees."""
        root = Path(self.root or "/")
        snapshot = with_adapter_ids(scan(root), root)
        self.vpd, devices = dict(snapshot.adapter_ids), snapshot.devices
        addresses = {d.address for d in devices}
        for address in sorted(addresses | {part for d in devices for part in d.path[1:]}):
            self._pci_function(address)
        self._class("net", _NETDEV_FILES, below=addresses)
        self._class("infiniband", _RDMA_FILES)
        for name in self._names("/sys/class/infiniband"):
            folder = self._target(f"/sys/class/infiniband/{name}")
            for port in self._names(f"{folder}/ports"):
                self._files(f"{folder}/ports/{port}", _PORT_FILES)
        self._class("infiniband_verbs", _CHAR_DEVICE_FILES, named="uverbs")
        self._class("infiniband_mad", _CHAR_DEVICE_FILES, named=("umad", "issm"))
        self._class("cxi", ["dev"])
        self._class("misc", ["dev"], named="rdma_cm")
        self._accelerators(addresses)
        self._link("/sys/class/dmi/id")
        self._files(self._target("/sys/class/dmi/id") or "", _DMI_FILES)
        self._numa_nodes()
        self._default_routes()
        self._files("/proc/sys/kernel/random", ["boot_id"])
        for name in self._names("/dev/infiniband"):
            if _DEV_NAMES.fullmatch(name):
                self._folder("/dev/infiniband")[name] = ""

    def _pci_function(self, address: str) -> None:
        link = f"/sys/bus/pci/devices/{address}"
        folder = self._target(link)
        if folder is None:
            return
        self._link(link)
        self._files(folder, _PCI_FILES)
        for name in ("driver", "iommu_group"):
            target = self._target(f"{folder}/{name}")
            if target is not None:
                self._link(f"{folder}/{name}")
                self._link(posixpath.join(target, *(["devices"] if name == "iommu_group" else []), address))
        for name in self._names(folder):
            if name == "physfn" or re.fullmatch(r"virtfn[0-9]+", name):
                self._link(f"{folder}/{name}")

    def _class(
        self,
        family: str,
        files: Iterable[str],
        *,
        named: str | tuple[str, ...] = "",
        below: set[str] | None = None,
    ) -> None:
        """Record entries of a class folder, all or those below some PCI functions, with what they link to."""
        for name in self._names(f"/sys/class/{family}"):
            link = f"/sys/class/{family}/{name}"
            folder = self._target(link) if name.startswith(named) else None
            if folder is None or (below is not None and not below & set(folder.split("/"))):
                continue
            self._link(link)
            self._files(folder, files)
            self._link(f"{folder}/device")

    def _accelerators(self, addresses: set[str]) -> None:
        """Record what GPUs are called, and how AMD's driver joins them."""
        for family in ("drm", "accel", "habanalabs"):
            self._class(family, (), below=addresses)
        for name in self._names("/sys/devices/platform"):
            if name.startswith("amdgpu_xcp_"):
                for file in self._names(f"/sys/devices/platform/{name}/drm"):
                    self._folder(f"/sys/devices/platform/{name}/drm/{file}")
        self._link("/sys/class/kfd/kfd")
        nodes = f"{self._target('/sys/class/kfd/kfd')}/topology/nodes"
        for node in self._names(nodes):
            self._files(f"{nodes}/{node}", ["properties"])
            for link in self._names(f"{nodes}/{node}/io_links"):
                self._files(f"{nodes}/{node}/io_links/{link}", ["properties"])

    def _numa_nodes(self) -> None:
        nodes = "/sys/devices/system/node"
        self._files(nodes, ["online"])
        for name in self._names(nodes):
            if re.fullmatch(r"node[0-9]+", name):
                self._files(f"{nodes}/{name}", _NODE_FILES)
                for size in self._names(f"{nodes}/{name}/hugepages"):
                    self._files(f"{nodes}/{name}/hugepages/{size}", _HUGEPAGES_FILES)
        for name in self._names("/sys/devices/system/cpu"):
            if re.fullmatch(r"cpu[0-9]+", name):
                self._files(f"/sys/devices/system/cpu/{name}/topology", _CPU_FILES)

    def _default_routes(self) -> None:
        """Record which interfaces have a default route, without the gateways. Other routes say much of a network."""
        files: tuple[tuple[str, str, int, Callable[[list[str]], bool]], ...] = (
            ("route", "\t", 2, lambda row: len(row) > 7 and row[1] == row[7] == "00000000"),
            ("ipv6_route", " ", 4, lambda row: len(row) == 10 and not row[0].strip("0") and row[1] == "00"),
        )
        for file, between, gateway, is_default in files:
            try:
                rows = [line.split() for line in Path(f"{self.root}/proc/net/{file}").read_text().splitlines()]
            except OSError:
                continue
            found = [[*row[:gateway], "0" * len(row[gateway]), *row[gateway + 1 :]] for row in rows if is_default(row)]
            if found:
                head = rows[:1] if file == "route" else []
                self._folder("/proc/net")[file] = "".join(between.join(row) + "\n" for row in (*head, *found))

    def _folder(self, path: str) -> dict[str, Any]:
        here = self.tree
        for part in path.strip("/").split("/"):
            here = here.setdefault(part, {})
        return here

    def _files(self, folder: str, names: Iterable[str]) -> None:
        for name in names:
            try:
                text = Path(f"{self.root}{folder}/{name}").read_text("utf-8", "replace")
            except OSError:
                continue
            path = posixpath.join(folder, name)
            self._folder(posixpath.dirname(path))[posixpath.basename(path)] = text

    def _link(self, path: str) -> None:
        """Copy a link as it is, with an empty folder where it points if nothing was recorded there."""
        try:
            target = os.readlink(self.root + path)
        except OSError:
            return
        folder, name = posixpath.split(path)
        self._folder(folder)[name] = [target]
        self._folder(posixpath.normpath(posixpath.join(folder, target)))

    def _target(self, path: str) -> str | None:
        try:
            target = os.readlink(self.root + path)
        except OSError:
            return None
        return posixpath.normpath(posixpath.join(posixpath.dirname(path), target))

    def _names(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(self.root + path))
        except OSError:
            return []


def _without_identifiers(tree: Any, where: tuple[str, ...], known: dict[str, str]) -> dict[str, Any]:
    clean: dict[str, Any] = {}
    for name, entry in tree.items():
        if isinstance(entry, dict):
            clean[name] = _without_identifiers(entry, (*where, name), known)
        elif name in ("node_guid", "sys_image_guid") or (name == "address" and where[-2:-1] == ("net",)):
            clean[name] = _renumbered(entry, known)
        elif name == "boot_id":
            clean[name] = "00000000-0000-4000-8000-000000000000\n"
        else:
            clean[name] = entry
    return clean


def _renumbered(text: str, known: dict[str, str]) -> str:
    """Keep a MAC's or GUID's three bytes of vendor and number the rest; an all-zero value stays."""
    value = text.strip()
    digits = value.replace(":", "")
    if len(digits) < 12 or not digits.strip("0"):
        return text
    # An InfiniBand interface's address ends with its port's GUID (RFC 4391, section 9.1.1).
    head, tail = (digits[:24], digits[24:]) if len(digits) == 40 else ("", digits)
    if value not in known:
        number = f"{len(known) + 1:x}".rjust(len(tail) - 6, "0")
        known[value] = head + tail[:6] + number
    width = 4 if re.fullmatch(r"[0-9a-f]{4}(?::[0-9a-f]{4})*", value) else 2
    fresh = known[value]
    return ":".join(fresh[i : i + width] for i in range(0, len(fresh), width)) + text[len(text.rstrip()) :]
