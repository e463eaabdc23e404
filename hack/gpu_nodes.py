"""Hosts with GPUs, of the kinds that placement has to tell apart."""

from __future__ import annotations

from hack.node_parts import A100, CONNECTX6, CONNECTX7, CONNECTX8, mlx5_pfs, mlx5_vfs
from hack.node_tree import ROOT_PORT, SWITCH_PORT, Ids, NodeTree

V100 = Ids("030200", "10de", "1db8", "10de:1249", "nvidia")
H100_NVL = Ids("030200", "10de", "2321", "10de:1839", "nvidia")
B200 = Ids("030200", "10de", "2901", "10de:1999", "nvidia")
GB200 = Ids("030200", "10de", "2941", "10de:2046", "nvidia")
L4 = Ids("030200", "10de", "27b8", "10de:16ca", "nvidia")
AMD_ROOT_PORT = Ids("060400", "1022", "14ab", driver="pcieport")
GRACE_ROOT_PORT = Ids("060400", "10de", "22b8", driver="pcieport")
OLD_SWITCH_PORT = Ids("060400", "10b5", "9797", driver="pcieport")

Pfs = list[tuple[str, str, int]]


def a100_4nic() -> NodeTree:
    """Four switches, each with two GPUs that share one NIC."""
    node = NodeTree("a100-8gpu-4nic", "Two sockets, 4 PCIe switches with 2 A100 GPUs and one ConnectX-6 200G NIC each")
    node.numa(["0-63,128-191", "64-127,192-255"], 1 << 20)
    pfs: Pfs = []
    for switch, bus in enumerate((0x07, 0x4A, 0x87, 0xC8)):
        numa_node = switch // 2
        root = node.pci(f"pci0000:{bus:02x}", f"0000:{bus:02x}:01.1", AMD_ROOT_PORT, numa_node)
        ports = _switch(node, root, bus + 1, numa_node, 3)
        pf = node.pci(ports[0], f"0000:{bus + 3:02x}:00.0", CONNECTX6, numa_node)
        for i in (1, 2):
            gpu = node.pci(ports[i], f"0000:{bus + 4 + i:02x}:00.0", A100, numa_node)
            node.gpu(gpu, "NVIDIA A100-SXM4-80GB", 81920)
        pfs.append((pf, f"ens{switch + 1}", numa_node))
    _ethernet(node, pfs, 200, "HDR", vfs=8)
    node.nvswitch(links=12)
    return node


def b200_2nic() -> NodeTree:
    """Four switches, each with two GPUs and two NICs."""
    node = NodeTree("b200-8gpu-2nic", "Two sockets, 4 PCIe switches with 2 B200 GPUs and 2 ConnectX-7 400G NICs each")
    node.numa(["0-55,112-167", "56-111,168-223"], 1 << 20)
    pfs: Pfs = []
    for switch, bus in enumerate((0x14, 0x54, 0x94, 0xD4)):
        numa_node = switch // 2
        root = node.pci(f"pci0000:{bus:02x}", f"0000:{bus:02x}:01.0", ROOT_PORT, numa_node)
        ports = _switch(node, root, bus + 1, numa_node, 4)
        for i in (0, 1):
            pf = node.pci(ports[2 * i], f"0000:{bus + 3 + 4 * i:02x}:00.0", CONNECTX7, numa_node)
            gpu = node.pci(ports[2 * i + 1], f"0000:{bus + 5 + 4 * i:02x}:00.0", B200, numa_node)
            node.gpu(gpu, "NVIDIA B200", 183359)
            pfs.append((pf, f"ens{2 * switch + i + 1}", numa_node))
    _ethernet(node, pfs, 400, "NDR", vfs=4)
    node.nvswitch(links=18)
    return node


def epyc_no_switch() -> NodeTree:
    """Everything on root ports; sockets cut into four NUMA nodes each; GPUs joined in pairs by bridges."""
    node = NodeTree(
        "epyc-no-switch",
        "Two sockets with 4 NUMA nodes each, no PCIe switch: 4 H100 NVL GPUs joined in pairs,"
        " 3 ConnectX-7 200G NICs, one of them below the host bridge of a GPU",
    )
    cpulists = [f"{n * 12}-{n * 12 + 11},{96 + n * 12}-{107 + n * 12}" for n in range(8)]
    node.numa(cpulists, 96 << 10, far=lambda a, b: 12 if a // 4 == b // 4 else 32)
    places = ((0x00, 3), (0x20, 2), (0x40, 1), (0x60, 0), (0x80, 7), (0xA0, 6), (0xC0, 5), (0xE0, 4))
    numa_of = dict(places)
    for bus in (0x00, 0x60, 0x80, 0xC0):
        root = node.pci(f"pci0000:{bus:02x}", f"0000:{bus:02x}:01.1", AMD_ROOT_PORT, numa_of[bus])
        gpu = node.pci(root, f"0000:{bus + 1:02x}:00.0", H100_NVL, numa_of[bus])
        node.gpu(gpu, "NVIDIA H100 NVL", 95830)
    pfs: Pfs = []
    for bus in (0x00, 0x40, 0xA0):
        root = node.pci(f"pci0000:{bus:02x}", f"0000:{bus:02x}:03.1", AMD_ROOT_PORT, numa_of[bus])
        pf = node.pci(root, f"0000:{bus + 4:02x}:00.0", CONNECTX7, numa_of[bus])
        pfs.append((pf, f"enp{bus + 4}s0", numa_of[bus]))
    _ethernet(node, pfs, 200, "HDR", vfs=8)
    node.nvlink(0, 1, 12)
    node.nvlink(2, 3, 12)
    return node


def gb200() -> NodeTree:
    """Each GPU and NIC has a PCI segment of its own; the GPUs' memory appears as NUMA nodes without CPUs."""
    node = NodeTree(
        "gb200-4gpu",
        "Two Grace CPUs, 4 GB200 GPUs, 4 ConnectX-7 400G NICs, each on a host bridge of its own; 36 NUMA nodes,"
        " of which 2 have CPUs",
    )
    # Eight nodes for each GPU, for as many MIG devices; without MIG the first has all the memory.
    memory = [480 << 10] * 2 + ([186 << 10] + [0] * 7) * 4 + [0, 0]
    node.numa(["0-71", "72-143"] + [""] * 34, memory, far=lambda a, b: 40 if max(a, b) < 2 else 80)
    for segment in (0x08, 0x09, 0x18, 0x19):
        numa_node = segment >> 4
        root = node.pci(f"pci{segment:04x}:00", f"{segment:04x}:00:00.0", GRACE_ROOT_PORT, numa_node)
        node.gpu(node.pci(root, f"{segment:04x}:01:00.0", GB200, numa_node), "NVIDIA GB200", 189471)
    pfs: Pfs = []
    for segment in (0x00, 0x02, 0x10, 0x12):
        numa_node = segment >> 4
        root = node.pci(f"pci{segment:04x}:00", f"{segment:04x}:00:00.0", GRACE_ROOT_PORT, numa_node)
        upstream = node.pci(root, f"{segment:04x}:01:00.0", SWITCH_PORT, numa_node)
        port = node.pci(upstream, f"{segment:04x}:02:00.0", SWITCH_PORT, numa_node)
        pfs.append((node.pci(port, f"{segment:04x}:03:00.0", CONNECTX7, numa_node), f"enP{segment}p3s0", numa_node))
    _ethernet(node, pfs, 400, "NDR", vfs=4)
    node.nvswitch(links=18)
    for gpu in node.gpus:
        gpu["fabric_clique"] = "5f1c9e1e-7f3a-4b6e-9d0c-3f1d2a7b6c55.32766"
    return node


def v100_16gpu() -> NodeTree:
    """Two levels of switches: two GPUs and a NIC below one, two of these below another."""
    node = NodeTree(
        "v100-16gpu",
        "Two sockets, 16 V100 GPUs and 8 ConnectX-6 200G NICs with 32 VFs each: 2 GPUs and a NIC below a PCIe switch,"
        " 2 switches below another",
    )
    node.numa(["0-23,48-71", "24-47,72-95"], 768 << 10)
    pfs: Pfs = []
    for tree, bus in enumerate((0x10, 0x30, 0x90, 0xB0)):
        numa_node = tree // 2
        root = node.pci(f"pci0000:{bus:02x}", f"0000:{bus:02x}:00.0", ROOT_PORT, numa_node)
        for half, above in enumerate(_switch(node, root, bus + 1, numa_node, 2, OLD_SWITCH_PORT)):
            first = bus + 3 + 8 * half
            ports = _switch(node, above, first, numa_node, 3, OLD_SWITCH_PORT)
            pf = node.pci(ports[0], f"0000:{first + 2:02x}:00.0", CONNECTX6, numa_node)
            for i in (1, 2):
                gpu = node.pci(ports[i], f"0000:{first + 4 + i:02x}:00.0", V100, numa_node)
                node.gpu(gpu, "NVIDIA V100-SXM3-32GB", 32768)
            pfs.append((pf, f"ens{len(pfs) + 1}", numa_node))
    _ethernet(node, pfs, 200, "HDR", vfs=32)
    node.nvswitch(links=6)
    return node


def one_numa_node() -> NodeTree:
    """One socket, and firmware that says of no device which NUMA node it is on."""
    node = NodeTree(
        "one-numa-node",
        "One socket, firmware that names no NUMA node: 4 L4 GPUs and 2 ConnectX-8 NICs, a GPU beside each NIC"
        " below one PCIe switch, the others on host bridges of their own",
    )
    node.numa(["0-63"], 256 << 10)
    pfs: Pfs = []
    for bus in (0x00, 0x40):
        root = node.pci(f"pci0000:{bus:02x}", f"0000:{bus:02x}:01.1", AMD_ROOT_PORT, -1)
        ports = _switch(node, root, bus + 1, -1, 2)
        pf = node.pci(ports[0], f"0000:{bus + 3:02x}:00.0", CONNECTX8, -1)
        node.gpu(node.pci(ports[1], f"0000:{bus + 5:02x}:00.0", L4, -1), "NVIDIA L4", 23034)
        pfs.append((pf, f"enp{bus + 3}s0", -1))
        lone = node.pci(f"pci0000:{bus + 0x20:02x}", f"0000:{bus + 0x20:02x}:01.1", AMD_ROOT_PORT, -1)
        node.gpu(node.pci(lone, f"0000:{bus + 0x21:02x}:00.0", L4, -1), "NVIDIA L4", 23034)
    _ethernet(node, pfs, 400, "NDR", vfs=4)
    return node


NODES = (a100_4nic, b200_2nic, epyc_no_switch, gb200, v100_16gpu, one_numa_node)


def _switch(node: NodeTree, above: str, bus: int, numa_node: int, ports: int, ids: Ids = SWITCH_PORT) -> list[str]:
    """Add a PCIe switch; give its downstream ports."""
    domain = above[:4]
    upstream = node.pci(above, f"{domain}:{bus:02x}:00.0", ids, numa_node)
    return [node.pci(upstream, f"{domain}:{bus + 1:02x}:{4 * i:02x}.0", ids, numa_node) for i in range(ports)]


def _ethernet(node: NodeTree, pfs: Pfs, gbps: int, speed: str, *, vfs: int) -> None:
    firmware, board = "28.39.3004", "MT_0000000838"
    mlx5_pfs(node, pfs, gbps, speed, firmware, board, mtu=9000)
    mlx5_vfs(node, pfs, firmware, board, total=vfs, count=vfs, offset=1)
