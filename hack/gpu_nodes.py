"""Hosts with GPUs, of the kinds that placement has to tell apart."""

from __future__ import annotations

from itertools import combinations

from hack.node_parts import A100, CONNECTX6, CONNECTX7, CONNECTX8, CONNECTX9, mlx5_pfs, mlx5_vfs
from hack.node_tree import ROOT_PORT, SWITCH_PORT, Ids, NodeTree

V100 = Ids("030200", "10de", "1db8", "10de:1249", "nvidia")
H100_NVL = Ids("030200", "10de", "2321", "10de:1839", "nvidia")
B200 = Ids("030200", "10de", "2901", "10de:1999", "nvidia")
GB200 = Ids("030200", "10de", "2941", "10de:2046", "nvidia")
L4 = Ids("030200", "10de", "27b8", "10de:16ca", "nvidia")
AMD_ROOT_PORT = Ids("060400", "1022", "14ab", driver="pcieport")
AMD_BRIDGE = Ids("060400", "1022", "1500", driver="pcieport")
MI300X = Ids("120000", "1002", "74a1", "1002:74a1", "amdgpu")
MI250 = Ids("038000", "1002", "740c", "1002:0b0c", "amdgpu")
GB300 = Ids("030200", "10de", "31c2", "10de:21f1", "nvidia")
B300 = Ids("030200", "10de", "3182", "10de:20e6", "nvidia")
RUBIN = Ids("030200", "10de", "0000", "10de:0000", "nvidia")  # its ID is not published
VERA_ROOT_PORT = Ids("060400", "10de", "2f95", driver="pcieport")
GRACE_ROOT_PORT = Ids("060400", "10de", "22b8", driver="pcieport")
CONNECTX_PORT = Ids("060400", "15b3", "1979", driver="pcieport")
CONNECTX8_PORT = Ids("060400", "15b3", "197c", driver="pcieport")
DATA_DIRECT = Ids("080100", "15b3", "2100", "15b3:0033", "mlx5_ib")
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


def mi300x() -> NodeTree:
    """Below each of eight root ports a switch with a NIC and another switch, with a GPU behind bridges of its own.

    Tree and addresses are those of AMD's model topo_8p_940 (RCCL, tools/topo_expl/models).
    """
    node = NodeTree(
        "mi300x-8gpu",
        "Two sockets, 8 MI300X GPUs, each with bridges of its own, below one PCIe switch with its ConnectX-7 400G NIC;"
        " xGMI between all GPUs; nothing of NVIDIA's",
    )
    node.numa(["0-95,192-287", "96-191,288-383"], 1 << 20)
    pfs: Pfs = []
    gpus = []
    for rail, bus in enumerate((0x05, 0x0E, 0x17, 0x62, 0x98, 0xA8, 0xB8, 0xD8)):
        numa_node = rail // 4
        root = node.pci(f"pci0000:{bus - 1:02x}", f"0000:{bus - 1:02x}:01.1", AMD_ROOT_PORT, numa_node)
        ports = _switch(node, root, bus, numa_node, 2, CONNECTX_PORT)
        pfs.append((node.pci(ports[0], f"0000:{bus + 2:02x}:00.0", CONNECTX7, numa_node), f"ens{rail + 1}", numa_node))
        (below,) = _switch(node, ports[1], bus + 3, numa_node, 1, CONNECTX_PORT)
        gpus.append(_oam(node, below, bus + 5, MI300X, numa_node))
        node.card(gpus[-1], "AMD Instinct MI300X OAM", 196592)
    _ethernet(node, pfs, 400, "NDR", vfs=8)
    node.kfd(2, gpus, dict.fromkeys(combinations(range(8), 2), (15, 64000)))
    return node


def mi250() -> NodeTree:
    """On each socket two levels of switches: below the lower ones two GPUs, each with bridges of its own, and a NIC.

    AMD documents one PCIe link for each GPU, to the CPU or to a switch; where NICs hang is the server's maker's choice.
    """
    node = NodeTree(
        "mi250-8gpu",
        "Two sockets, 4 MI250 modules (8 GPUs) and 4 ConnectX-6 200G NICs: on each socket 2 PCIe switches with 2 GPUs,"
        " each behind bridges of its own, and a NIC hang on another switch; xGMI between some GPUs",
    )
    node.numa(["0-63,128-191", "64-127,192-255"], 512 << 10)
    pfs: Pfs = []
    gpus = []
    for numa_node, bus in enumerate((0x20, 0xA0)):
        root = node.pci(f"pci0000:{bus:02x}", f"0000:{bus:02x}:01.1", AMD_ROOT_PORT, numa_node)
        for half, above in enumerate(_switch(node, root, bus + 1, numa_node, 2)):
            first = bus + 4 + 0x10 * half
            ports = _switch(node, above, first, numa_node, 3)
            for i in (0, 1):
                gpus.append(_oam(node, ports[i], first + 2 + 3 * i, MI250, numa_node))
                node.card(gpus[-1], "AMD Instinct MI250 (MCM) OAM AC MBA", 65520)
            pf = node.pci(ports[2], f"0000:{first + 8:02x}:00.0", CONNECTX6, numa_node)
            pfs.append((pf, f"ens{len(pfs) + 1}", numa_node))
    _ethernet(node, pfs, 200, "HDR", vfs=8)
    joined = {(0, 2): 50000, (0, 6): 100000, (1, 3): 100000, (1, 5): 50000, (2, 4): 100000, (3, 7): 50000}
    joined |= {(4, 6): 50000, (5, 7): 100000, (0, 1): 200000, (2, 3): 200000, (4, 5): 200000, (6, 7): 200000}
    links = {pair: (15, joined[pair]) if pair in joined else (30, 50000) for pair in combinations(range(8), 2)}
    node.kfd(2, gpus, links)
    return node


def gb300() -> NodeTree:
    """Each GPU hangs on an adapter's own switch, with that adapter's Data Direct function; the PF is somewhere else.

    The addresses are NVIDIA's own example (Grace Blackwell CX8 GPUDirect RDMA Guide, GPUDirect RDMA Testing).
    """
    node = NodeTree(
        "gb300-4gpu",
        "Two Grace CPUs, 4 GB300 GPUs, each below the PCIe switch in a ConnectX-8 800G NIC with that NIC's Data Direct"
        " function; the NIC's PF on a PCI segment of its own; 34 NUMA nodes, of which 2 have CPUs",
    )
    memory = [480 << 10] * 2 + ([278 << 10] + [0] * 7) * 4
    node.numa(["0-71", "72-143"] + [""] * 32, memory, far=lambda a, b: 40 if max(a, b) < 2 else 80)
    _ethernet(node, _data_direct(node, GB300, "NVIDIA GB300", 284208), 800, "XDR", vfs=4)
    for gpu in node.gpus:
        gpu["fabric_clique"] = "8f7c0b1e-2d3a-4c5b-9e0f-6a1b2c3d4e5f.32766"
    return node


def gb200_cx8() -> NodeTree:
    """GB200 with ConnectX-8: Data Direct as on GB300, at the same addresses. Each adapter is split into two PFs."""
    node = NodeTree(
        "gb200-cx8-4gpu",
        "Two Grace CPUs, 4 GB200 GPUs, 4 ConnectX-8 adapters of two 400G PFs each; the Data Direct function of each"
        " adapter beside a GPU below the adapter's switch, its PFs on a PCI segment of their own",
    )
    node.numa(["0-71", "72-143"], 480 << 10, far=lambda _a, _b: 40)
    _ethernet(node, _data_direct(node, GB200, "NVIDIA GB200", 189471, ports=2), 400, "NDR", vfs=0)
    for gpu in node.gpus:
        gpu["fabric_clique"] = "5f1c9e1e-7f3a-4b6e-9d0c-3f1d2a7b6c55.32766"
    return node


def b300() -> NodeTree:
    """Each GPU and the PF of its adapter hang on the adapter's own switch; no Data Direct function."""
    node = NodeTree(
        "b300-8gpu",
        "Two sockets, 8 B300 GPUs, each below the PCIe switch in its ConnectX-8 800G NIC, which has no Data Direct"
        " function",
    )
    node.numa(["0-63,128-191", "64-127,192-255"], 1 << 20)
    pfs: Pfs = []
    for rail, bus in enumerate((0x17, 0x39, 0x5F, 0x70, 0x97, 0xB9, 0xDC, 0xED)):
        numa_node = rail // 4
        root = node.pci(f"pci0000:{bus - 3:02x}", f"0000:{bus - 3:02x}:01.0", ROOT_PORT, numa_node)
        ports = _switch(node, root, bus - 2, numa_node, 2, CONNECTX8_PORT)
        pfs.append((node.pci(ports[0], f"0000:{bus:02x}:00.0", CONNECTX8, numa_node), f"enp{bus}s0", numa_node))
        (below,) = _switch(node, ports[1], bus + 1, numa_node, 1, CONNECTX8_PORT)
        node.gpu(node.pci(below, f"0000:{bus + 3:02x}:00.0", B300, numa_node), "NVIDIA B300", 275040)
    _ethernet(node, pfs, 800, "XDR", vfs=2)
    node.nvswitch(links=18)
    return node


def vera_rubin() -> NodeTree:
    """Data Direct functions, and nothing that tells which PF or GPU each of them belongs to."""
    node = NodeTree(
        "vera-rubin-4gpu",
        "Two Vera CPUs, 4 Rubin GPUs, 8 ConnectX-9 with a Data Direct function each, every function on a root port of"
        " its own; nothing tells which belong together",
    )
    node.numa(["0-87,176-263", "88-175,264-351"], 768 << 10, far=lambda _a, _b: 40)
    _untold(node, VERA_ROOT_PORT, "NVIDIA Rubin", gpus=2)
    return node


def hgx_rubin() -> NodeTree:
    """As Vera Rubin, with x86 CPUs and 8 GPUs."""
    node = NodeTree(
        "hgx-rubin-8gpu",
        "Two x86 sockets, 8 Rubin GPUs, 8 ConnectX-9 with a Data Direct function each, every function on a root port"
        " of its own; nothing tells which belong together",
    )
    node.numa(["0-63,128-191", "64-127,192-255"], 1 << 20)
    _untold(node, ROOT_PORT, "NVIDIA Rubin", gpus=4)
    return node


NODES = (
    *(a100_4nic, b200_2nic, epyc_no_switch, gb200, v100_16gpu, one_numa_node),
    *(mi300x, mi250, gb300, gb200_cx8, b300, vera_rubin, hgx_rubin),
)


def _switch(node: NodeTree, above: str, bus: int, numa_node: int, ports: int, ids: Ids = SWITCH_PORT) -> list[str]:
    """Add a PCIe switch; give its downstream ports."""
    domain = above[:4]
    upstream = node.pci(above, f"{domain}:{bus:02x}:00.0", ids, numa_node)
    return [node.pci(upstream, f"{domain}:{bus + 1:02x}:{4 * i:02x}.0", ids, numa_node) for i in range(ports)]


def _data_direct(node: NodeTree, gpu: Ids, product: str, memory_mib: int, *, ports: int = 1) -> Pfs:
    """Add four GPUs and four ConnectX-8, whose Data Direct functions stand with the GPUs on other PCI segments."""
    partner = {0x00: 0x09, 0x02: 0x08, 0x10: 0x19, 0x12: 0x18}
    for segment in sorted(partner.values()):
        numa_node = segment >> 4
        root = node.pci(f"pci{segment:04x}:00", f"{segment:04x}:00:00.0", GRACE_ROOT_PORT, numa_node)
        downstream = _switch(node, root, 1, numa_node, 2, CONNECTX8_PORT)
        node.pci(downstream[0], f"{segment:04x}:03:00.0", DATA_DIRECT, numa_node)
        (below,) = _switch(node, downstream[1], 4, numa_node, 1, CONNECTX8_PORT)
        node.gpu(node.pci(below, f"{segment:04x}:06:00.0", gpu, numa_node), product, memory_mib)
    pfs: Pfs = []
    for segment, other in partner.items():
        numa_node = segment >> 4
        root = node.pci(f"pci{segment:04x}:00", f"{segment:04x}:00:00.0", GRACE_ROOT_PORT, numa_node)
        (port,) = _switch(node, root, 1, numa_node, 1, CONNECTX8_PORT)
        own = [node.pci(port, f"{segment:04x}:03:00.{n}", CONNECTX8, numa_node) for n in range(ports)]
        name = f"enP{segment}p3s0" if segment else "enp3s0"
        pfs += [(pf, f"{name}f{n}" if ports > 1 else name, numa_node) for n, pf in enumerate(own)]
        node.one_adapter(*own, f"{other:04x}:03:00.0")
    node.nvswitch(links=18)
    return pfs


def _untold(node: NodeTree, port: Ids, product: str, *, gpus: int) -> None:
    """Add GPUs, ConnectX-9 and their Data Direct functions, all without keyword V3: `gpus` and 4 a NUMA node."""
    pfs: Pfs = []
    segment = 0
    for numa_node in range(2):
        for kind, count in ((RUBIN, gpus), (CONNECTX9, 4), (DATA_DIRECT, 4)):
            for _ in range(count):
                root = node.pci(f"pci{segment:04x}:00", f"{segment:04x}:00:00.0", port, numa_node)
                own = node.pci(root, f"{segment:04x}:01:00.0", kind, numa_node)
                if kind is not RUBIN:
                    node.vpd[own] = ""
                if kind is RUBIN:
                    node.gpu(own, product, 294912)
                elif kind is CONNECTX9:
                    pfs.append((own, f"enP{segment}p1s0" if segment else "enp1s0", numa_node))
                segment += 1
    _ethernet(node, pfs, 800, "XDR", vfs=0)
    node.nvswitch(links=18)


def _ethernet(node: NodeTree, pfs: Pfs, gbps: int, speed: str, *, vfs: int) -> None:
    firmware, board = "28.39.3004", "MT_0000000838"
    mlx5_pfs(node, pfs, gbps, speed, firmware, board, mtu=9000)
    if vfs:
        mlx5_vfs(node, pfs, firmware, board, total=vfs, count=vfs, offset=1)


def _oam(node: NodeTree, above: str, bus: int, ids: Ids, numa_node: int) -> str:
    """Add a GPU behind its own two bridges."""
    upper = node.pci(above, f"0000:{bus:02x}:00.0", AMD_BRIDGE, numa_node)
    lower = node.pci(upper, f"0000:{bus + 1:02x}:00.0", AMD_BRIDGE, numa_node)
    return node.pci(lower, f"0000:{bus + 2:02x}:00.0", ids, numa_node)
