"""Instances of clouds: what of a host they show, and what they do not."""

from __future__ import annotations

from hack.node_parts import CONNECTX7, CONNECTX_VF, ENA, H100, ROCE_UP, mlx5_pfs
from hack.node_tree import ROOT_PORT, SWITCH_PORT, Ids, NodeTree, guid, mac

EFA2 = Ids("020000", "1d0f", "efa2", "1d0f:efa2", "efa")
NITRO_BRIDGE = Ids("060400", "1d0f", "0200", driver="pcieport")
CONNECTX7_VF_IB = Ids("020700", "15b3", "101e", "15b3:0023", "mlx5_core")
CONNECTX6DX = Ids("020000", "15b3", "101d", "15b3:0016", "mlx5_core")


def p5() -> NodeTree:
    """A virtual machine that shows its switches: on each a GPU and four adapters without an interface."""
    node = NodeTree(
        "p5-8gpu-32efa",
        "A p5.48xlarge instance: 8 H100 GPUs, each with 4 EFA devices (RDMA without a network interface) below one PCIe"
        " switch",
        iommu=False,
    )
    node.dmi("Amazon EC2", "p5.48xlarge")
    node.numa(["0-47,96-143", "48-95,144-191"], 1 << 20, hugepages_2m=5128)
    port = node.pci("pci0000:20", "0000:20:00.0", NITRO_BRIDGE, 0)
    lan = node.pci(port, "0000:21:00.0", ENA, 0)
    node.netdev(lan, "enp33s0", mac("0e:5d:31", 0x200), up=True, mtu=9001)
    for rail, bus in enumerate(range(0x44, 0xBC, 0x11)):
        numa_node = rail // 4
        root = node.pci(f"pci0000:{bus:02x}", f"0000:{bus:02x}:00.0", NITRO_BRIDGE, numa_node)
        above = node.pci(root, f"0000:{bus + 1:02x}:00.0", NITRO_BRIDGE, numa_node)
        ports = [node.pci(above, f"0000:{bus + 2:02x}:01.{i}", NITRO_BRIDGE, numa_node) for i in range(5)]
        for i in range(4):
            number = bus + 0xB + i
            efa = node.pci(ports[i], f"0000:{number:02x}:00.0", EFA2, numa_node)
            state = {"link_layer": "Unknown", "lid": "0x0", "phys_state": "5: LinkUp", "state": "4: ACTIVE"}
            node.rdma(
                efa,
                f"rdmap{number}s0",
                "0000:0000:0000:0000",
                [{**state, "rate": "100 Gb/sec (4X EDR)"}],
                node_type="7: unspecified",
                firmware="0.0.0.0",
                mad=False,
            )
        gpu = node.pci(ports[4], f"0000:{bus + 0xF:02x}:00.0", H100, numa_node)
        node.gpu(gpu, "NVIDIA H100 80GB HBM3", 81559)
    node.nvswitch(links=18)
    return node


def azure_nd() -> NodeTree:
    """A virtual machine that shows each device on a PCI segment of its own, and no more than its NUMA node."""
    node = NodeTree(
        "azure-nd-h100",
        "A Standard_ND96isr_H100_v5 instance: 8 H100 GPUs and 8 ConnectX-7 InfiniBand VFs, of which the PCI tree tells"
        " the NUMA nodes only",
        iommu=False,
    )
    node.dmi("Microsoft Corporation", "Virtual Machine")
    node.numa(["0-47", "48-95"], 900 << 10)
    for rail, segment in enumerate((0x1, 0x2, 0x3, 0x8, 0x9, 0xA, 0xB, 0xC)):
        gpu = node.pci(f"pci{segment:04x}:00", f"{segment:04x}:00:00.0", H100, rail // 4)
        node.gpu(gpu, "NVIDIA H100 80GB HBM3", 81559)
    for rail in range(8):
        segment = 0x101 + rail
        nic = node.pci(f"pci{segment:04x}:00", f"{segment:04x}:00:00.0", CONNECTX7_VF_IB, rail // 4)
        own = guid("0015:5dff:fe", 0x340100 + rail)
        node.rdma(
            nic,
            f"mlx5_ib{rail}",
            own,
            [
                {
                    "link_layer": "InfiniBand",
                    "lid": f"0x{0x2A0 + rail:x}",
                    "phys_state": "5: LinkUp",
                    "rate": "400 Gb/sec (4X NDR)",
                    "sm_lid": "0x1",
                    "state": "4: ACTIVE",
                }
            ],
            firmware="28.39.3004",
            board="MT_0000000838",
        )
        tail = ":".join(own.replace(":", "")[i : i + 2] for i in range(0, 16, 2))
        node.netdev(nic, f"ib{rail}", f"00:00:01:49:fe:80:00:00:00:00:00:00:{tail}", up=True, speed=400000, kind=32)
    node.nvswitch(links=18)
    return node


def oci_h100() -> NodeTree:
    """Bare metal: the PCI tree tells everything. Router advertisements give every RDMA NIC a default route.

    Tree and addresses are those of the topology file that Oracle ships for NCCL.
    """
    node = NodeTree(
        "oci-h100-8gpu",
        "A BM.GPU.H100.8 instance: 8 H100 GPUs, each below one PCIe switch with a dual-port ConnectX-7; every RDMA NIC"
        " has an IPv6 default route by router advertisement",
    )
    node.dmi("Oracle Corporation", "ORACLE SERVER E5-2c")
    node.numa(["0-55,112-167", "56-111,168-223"], 1 << 20)
    port = node.pci("pci0000:60", "0000:60:01.0", ROOT_PORT, 0)
    lan = node.pci(port, "0000:61:00.0", CONNECTX6DX, 0)
    node.netdev(lan, "eth0", mac("02:00:17", 0x300), up=True, speed=50000, mtu=9000, port_name="p0")
    pfs = []
    for rail, bus in enumerate((0x08, 0x26, 0x3D, 0x54, 0x82, 0xA1, 0xB9, 0xD1)):
        numa_node = rail // 4
        root = node.pci(f"pci0000:{bus - 1:02x}", f"0000:{bus - 1:02x}:01.0", ROOT_PORT, numa_node)
        above = node.pci(root, f"0000:{bus:02x}:00.0", SWITCH_PORT, numa_node)
        to_nic = node.pci(above, f"0000:{bus + 1:02x}:00.0", SWITCH_PORT, numa_node)
        to_gpu = node.pci(above, f"0000:{bus + 1:02x}:04.0", SWITCH_PORT, numa_node)
        below = node.pci(to_nic, f"0000:{bus + 2:02x}:00.0", SWITCH_PORT, numa_node)
        below = node.pci(below, f"0000:{bus + 3:02x}:00.0", SWITCH_PORT, numa_node)
        pfs += [
            (node.pci(below, f"0000:{bus + 4:02x}:00.{n}", CONNECTX7, numa_node), f"rdma{2 * rail + n}", numa_node)
            for n in range(2)
        ]
        below = node.pci(to_gpu, f"0000:{bus + 5:02x}:00.0", SWITCH_PORT, numa_node)
        below = node.pci(below, f"0000:{bus + 6:02x}:00.0", SWITCH_PORT, numa_node)
        node.gpu(node.pci(below, f"0000:{bus + 7:02x}:00.0", H100, numa_node), "NVIDIA H100 80GB HBM3", 81559)
    mlx5_pfs(node, pfs, 200, "HDR", "28.39.3004", "ORC0000000009", mtu=4220)
    node.default_routes("eth0", [f"{name}np{pf[-1]}" for pf, name, _ in pfs])
    node.nvswitch(links=18)
    return node


def flat_vm() -> NodeTree:
    """A virtual machine of no known cloud, which shows its passed-through devices without any bridge."""
    node = NodeTree(
        "flat-vm-4gpu",
        "A KVM virtual machine with 4 H100 GPUs and 4 ConnectX-7 VFs on one bus: nothing tells which stand together",
        iommu=False,
    )
    node.dmi("QEMU", "Standard PC (Q35 + ICH9, 2009)")
    node.numa(["0-31", "32-63"], 512 << 10)
    for number in range(4):
        gpu = node.pci("pci0000:00", f"0000:00:{4 + number:02x}.0", H100, -1)
        node.gpu(gpu, "NVIDIA H100 80GB HBM3", 81559)
    for number in range(4):
        nic = node.pci("pci0000:00", f"0000:00:{8 + number:02x}.0", CONNECTX_VF, -1)
        node.netdev(nic, f"enp0s{8 + number}", mac("e2:4b:7c", 0x400 + number), up=True, speed=400000)
        state = {**ROCE_UP, "rate": "400 Gb/sec (4X NDR)"}
        node.rdma(nic, f"mlx5_{number}", guid("e24b:7cff:fe", 0x400 + number), [state], netdev=f"enp0s{8 + number}")
    node.nvswitch(links=18)
    return node


NODES = (p5, azure_nd, oci_h100, flat_vm)
