"""Builds the /sys, /proc and /dev of a node that was never seen, consistent as a kernel would show it.

Used by make-nodes. Each method adds one kernel object with all its links, both ways.
"""

from __future__ import annotations

import posixpath
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20
CHAR_DEVICES = {
    "uverbs": ("infiniband_verbs", 192, 32, 511),
    "umad": ("infiniband_mad", 0, 64, 510),
    "issm": ("infiniband_mad", 64, 64, 509),
}
"""Kind → class, first minor of major 231, how many there are, and the major that the rest gets
(drivers/infiniband/core/uverbs_main.c and user_mad.c)."""


@dataclass(frozen=True)
class Ids:
    """The identity of a PCI function, as hexadecimal text without 0x."""

    pci_class: str
    vendor: str
    device: str
    subsystem: str = "0000:0000"
    driver: str | None = None


ROOT_PORT = Ids("060400", "8086", "352a", driver="pcieport")
SWITCH_PORT = Ids("060400", "1000", "c030", driver="pcieport")


@dataclass
class NodeTree:
    """One node under construction."""

    name: str
    description: str
    iommu: bool = True
    tree: dict[str, Any] = field(default_factory=dict)
    gpus: list[dict[str, Any]] = field(default_factory=list)
    vpd: dict[str, str] = field(default_factory=dict)
    _folders: dict[str, str] = field(default_factory=dict)
    _counters: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for folder in ("/sys/bus/pci/devices", "/sys/class/net", "/sys/devices/system/node"):
            self._folder(folder)
        self.file("/proc/sys/kernel/random/boot_id", uuid.uuid5(uuid.NAMESPACE_DNS, self.name))

    # ------------------------------------------------------------------ files

    def _folder(self, path: str) -> dict[str, Any]:
        here = self.tree
        for part in path.strip("/").split("/"):
            here = here.setdefault(part, {})
        return here

    def file(self, path: str, text: object) -> None:
        """Add a file, with the line feed that the kernel ends attributes with."""
        folder, name = posixpath.split(path)
        self._folder(folder)[name] = f"{text}\n"

    def files(self, folder: str, **texts: object) -> None:
        """Add a folder's files. None: no such file."""
        for name, text in texts.items():
            if text is not None:
                self.file(f"{folder}/{name}", text)

    def link(self, path: str, target: str) -> None:
        """Add a symbolic link to another path of the tree, relative as the kernel makes them."""
        folder, name = posixpath.split(path)
        self._folder(folder)[name] = [posixpath.relpath(target, folder)]

    def next(self, what: str) -> int:
        """Count: 0, 1, 2 …"""
        number = self._counters.get(what, 0)
        self._counters[what] = number + 1
        return number

    # -------------------------------------------------------------------- PCI

    def pci(self, parent: str, address: str, ids: Ids, numa_node: int) -> str:
        """Add a PCI function below a host bridge (`pci0000:3a`) or another function; give its address."""
        above = self._folders.get(parent, f"/sys/devices/{parent}")
        folder = self._folders[address] = f"{above}/{address}"
        subsystem_vendor, _, subsystem_device = ids.subsystem.partition(":")
        self.files(
            folder,
            **{"class": f"0x{ids.pci_class}"},
            vendor=f"0x{ids.vendor}",
            device=f"0x{ids.device}",
            subsystem_vendor=f"0x{subsystem_vendor}",
            subsystem_device=f"0x{subsystem_device}",
            numa_node=numa_node,
        )
        self.link(f"/sys/bus/pci/devices/{address}", folder)
        if ids.driver is not None:
            driver = f"/sys/bus/pci/drivers/{ids.driver}"
            self.link(f"{driver}/{address}", folder)
            self.link(f"{folder}/driver", driver)
        if self.iommu:
            group = f"/sys/kernel/iommu_groups/{self.next('iommu_group')}"
            self.link(f"{group}/devices/{address}", folder)
            self.link(f"{folder}/iommu_group", group)
        return address

    def vfs(self, pf: str, ids: Ids, numa_node: int, *, total: int, count: int, offset: int) -> list[str]:
        """Enable VFs on a PF; stride 1. Addresses follow from the routing ID as the PCIe standard says."""
        folder = self._folders[pf]
        parent = posixpath.basename(posixpath.dirname(folder))
        self.files(
            folder,
            sriov_totalvfs=total,
            sriov_numvfs=count,
            sriov_offset=offset,
            sriov_stride=1,
            sriov_vf_device=ids.device,
        )
        made = []
        for index in range(count):
            vf = self.pci(parent, _shifted(pf, offset + index), ids, numa_node)
            self.link(f"{self._folders[vf]}/physfn", folder)
            self.link(f"{folder}/virtfn{index}", self._folders[vf])
            made.append(vf)
        return made

    def one_adapter(self, *functions: str) -> None:
        """Give functions of one adapter the UUID that all of them have in their vital product data."""
        adapter = str(uuid.uuid5(uuid.NAMESPACE_DNS, f"{self.name}/{functions[0]}"))
        self.vpd.update(dict.fromkeys(functions, adapter))

    # ----------------------------------------------------- what hangs on PCI

    def netdev(
        self,
        address: str,
        name: str,
        mac: str,
        *,
        up: bool = False,
        carrier: bool | None = None,
        speed: int = -1,
        mtu: int = 1500,
        kind: int = 1,
        port_name: str | None = None,
        dev_port: int = 0,
    ) -> None:
        """Add a network interface. An interface that is down has no carrier to read."""
        folder = f"{self._folders[address]}/net/{name}"
        carrier = up if carrier is None else carrier
        self.files(
            folder,
            address=mac,
            carrier=int(carrier) if up else None,
            dev_port=dev_port,
            flags="0x1003" if up else "0x1002",
            ifindex=2 + self.next("ifindex"),
            mtu=mtu,
            operstate="up" if carrier else "down",
            phys_port_name=port_name,
            speed=speed if up else None,
            type=kind,
        )
        self.link(f"{folder}/device", self._folders[address])
        self.link(f"/sys/class/net/{name}", folder)

    def rdma(
        self,
        address: str,
        name: str,
        guid: str,
        ports: list[dict[str, object]],
        *,
        node_type: str = "1: CA",
        image_guid: str | None = None,
        firmware: str = "",
        board: str | None = None,
        mad: bool = True,
        issm: bool = False,
        netdev: str | None = None,
    ) -> None:
        """Add an RDMA device with its ports and character devices."""
        above = self._folders[address]
        folder = f"{above}/infiniband/{name}"
        self.files(
            folder,
            board_id=board,
            fw_ver=firmware,
            node_guid=guid,
            node_type=node_type,
            sys_image_guid=image_guid or guid,
        )
        self.link(f"{folder}/device", above)
        self.link(f"/sys/class/infiniband/{name}", folder)
        self._char_device(above, "uverbs", ibdev=name)
        for number, port in enumerate(ports, 1):
            self.files(f"{folder}/ports/{number}", **port)
            if netdev is not None:
                self.file(f"{folder}/ports/{number}/gid_attrs/ndevs/0", netdev)
            if mad:
                self._char_device(above, "umad", ibdev=name, port=number)
            if issm:
                self._char_device(above, "issm", ibdev=name, port=number)
        if "rdma_cm" not in self.tree.get("dev", {}).get("infiniband", {}):
            self._folder("/dev/infiniband")["rdma_cm"] = ""
            self.file("/sys/devices/virtual/misc/rdma_cm/dev", "10:122")
            self.link("/sys/class/misc/rdma_cm", "/sys/devices/virtual/misc/rdma_cm")

    def _char_device(self, above: str, kind: str, **texts: object) -> None:
        family, first, fixed, more = CHAR_DEVICES[kind]
        number = self.next(kind)
        folder = f"{above}/{family}/{kind}{number}"
        self.files(folder, dev=f"231:{first + number}" if number < fixed else f"{more}:{number - fixed}", **texts)
        self.link(f"{folder}/device", above)
        self.link(f"/sys/class/{family}/{kind}{number}", folder)
        self._folder("/dev/infiniband")[f"{kind}{number}"] = ""

    def gpu(self, address: str, name: str, memory_mib: int) -> None:
        """Make a PCI function a GPU that the driver's library shows."""
        index = self.next("gpu")
        uuid = f"GPU-{0x6B3FD5A0 + index:08x}-0000-4000-8000-{index:012x}"
        self.gpus.append(
            {
                "uuid": uuid,
                "index": index,
                "minor": index,
                "pci_address": address,
                "name": name,
                "memory_bytes": memory_mib * MIB,
            }
        )

    def card(self, address: str, product: str | None = None, memory_mib: int | None = None) -> None:
        """Give a PCI function the DRM files of a GPU's driver."""
        number = self.next("drm")
        folder = self._folders[address]
        for name in (f"card{number}", f"renderD{128 + number}"):
            self._folder(f"{folder}/drm/{name}")
            self.link(f"{folder}/drm/{name}/device", folder)
            self.link(f"/sys/class/drm/{name}", f"{folder}/drm/{name}")
        self.files(folder, product_name=product, mem_info_vram_total=memory_mib and memory_mib * MIB)

    def kfd(self, cpu_nodes: int, gpus: list[str], links: Mapping[tuple[int, int], tuple[int, int]]) -> None:
        """Add KFD's topology: a node for each NUMA node, then one for each GPU.

        `links` are xGMI links, by pairs of GPUs' numbers: (weight, bandwidth in MB/s).
        """
        nodes = "/sys/devices/virtual/kfd/kfd/topology/nodes"
        self.link("/sys/class/kfd/kfd", "/sys/devices/virtual/kfd/kfd")
        for number in range(cpu_nodes):
            self.file(f"{nodes}/{number}/properties", "cpu_cores_count 64\nsimd_count 0\nlocation_id 0\ndomain 0")
        for number, address in enumerate(gpus):
            domain, bus, function = address.split(":")
            render = next(n for n in self._folder(f"{self._folders[address]}/drm") if n.startswith("renderD"))
            lines = {
                "cpu_cores_count": 0,
                "simd_count": 1216,
                "location_id": int(bus, 16) << 8 | int(function[:2], 16) << 3 | int(function[3:]),
                "domain": int(domain, 16),
                "drm_render_minor": render.removeprefix("renderD"),
            }
            folder = f"{nodes}/{cpu_nodes + number}"
            self.file(f"{folder}/properties", "\n".join(f"{key} {value}" for key, value in lines.items()))
            peers = [(b if a == number else a, told) for (a, b), told in links.items() if number in (a, b)]
            for peer, (weight, bandwidth) in peers:
                link = {"type": 11, "node_from": cpu_nodes + number, "node_to": cpu_nodes + peer, "weight": weight}
                link |= {"min_bandwidth": 50000, "max_bandwidth": bandwidth}
                self.file(
                    f"{folder}/io_links/{peer}/properties", "\n".join(f"{key} {value}" for key, value in link.items())
                )

    def dmi(self, vendor: str, product: str) -> None:
        """Name the machine, or the kind of virtual machine."""
        folder = "/sys/devices/virtual/dmi/id"
        self.files(folder, sys_vendor=vendor, product_name=product)
        self.link("/sys/class/dmi/id", folder)

    def default_routes(self, ipv4: str, ipv6: list[str]) -> None:
        """Give one interface an IPv4 default route, and others one each by router advertisement."""
        head = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT"
        self.file("/proc/net/route", f"{head}\n{ipv4}\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0")
        zero, router = "0" * 32, "fe80" + "0" * 27 + "1"
        lines = [f"{zero} 00 {zero} 00 {router} 00000400 00000001 00000000 00450003 {name:>8}" for name in ipv6]
        self.file("/proc/net/ipv6_route", "\n".join(lines))

    def nvswitch(self, links: int) -> None:
        """Join all GPUs by NVSwitches: each reaches each other one by all its links."""
        for gpu in self.gpus:
            gpu["nvlinks"] = [[peer["uuid"], links] for peer in self.gpus if peer is not gpu]

    def nvlink(self, a: int, b: int, links: int) -> None:
        """Join two GPUs by an NVLink bridge."""
        for here, there in ((a, b), (b, a)):
            self.gpus[here].setdefault("nvlinks", []).append([self.gpus[there]["uuid"], links])

    # ------------------------------------------------------------------- NUMA

    def numa(
        self,
        cpulists: list[str],
        memory_mib: int | list[int],
        *,
        hugepages_2m: int = 0,
        hugepages_1g: int = 0,
        far: Callable[[int, int], int] = lambda _a, _b: 21,
    ) -> None:
        """Add NUMA nodes, of equal size or each of its own. `far` gives the distance of two different nodes."""
        sizes = [memory_mib] * len(cpulists) if isinstance(memory_mib, int) else memory_mib
        nodes = "/sys/devices/system/node"
        for number, cpulist in enumerate(cpulists):
            folder = f"{nodes}/node{number}"
            total = sizes[number] * 1024
            lines = [("MemTotal", total), ("MemFree", total * 3 // 4), ("MemUsed", total - total * 3 // 4)]
            self.files(
                folder,
                cpulist=cpulist,
                distance=" ".join(str(10 if n == number else far(number, n)) for n in range(len(cpulists))),
                meminfo="\n".join(f"Node {number} {key + ':':<15} {value:>8} kB" for key, value in lines),
            )
            for size, count in ((2048, hugepages_2m), (1048576, hugepages_1g)):
                pages = f"{folder}/hugepages/hugepages-{size}kB"
                self.files(pages, free_hugepages=count, nr_hugepages=count, surplus_hugepages=0)
        last = len(cpulists) - 1
        self.file(f"{nodes}/online", f"0-{last}" if last else "0")

    def document(self) -> dict[str, Any]:
        """Give the node document, in a stable order."""
        return {
            "format": 1,
            "name": self.name,
            "description": self.description,
            "tree": _sorted(self.tree),
            "gpus": self.gpus,
            **({"vpd": self.vpd} if self.vpd else {}),
        }


def mac(prefix: str, number: int) -> str:
    """Make the number-th MAC address of a three-byte prefix."""
    return f"{prefix}:{number >> 16 & 255:02x}:{number >> 8 & 255:02x}:{number & 255:02x}"


def guid(prefix: str, number: int) -> str:
    """Make the number-th GUID of a six-byte prefix such as 946d:ae03:00."""
    digits = prefix.replace(":", "") + f"{number:x}".rjust(16 - len(prefix.replace(":", "")), "0")
    return ":".join(digits[i : i + 4] for i in range(0, 16, 4))


def _shifted(address: str, by: int) -> str:
    domain, bus, rest = address.split(":")
    device, _, function = rest.partition(".")
    routing_id = (int(bus, 16) << 8) + (int(device, 16) << 3) + int(function) + by
    return f"{domain}:{routing_id >> 8:02x}:{routing_id >> 3 & 31:02x}.{routing_id & 7}"


def _sorted(tree: dict[str, Any]) -> dict[str, Any]:
    return {k: _sorted(v) if isinstance(v, dict) else v for k, v in sorted(tree.items())}
