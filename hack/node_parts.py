"""Parts that several described nodes are made of: the identities of cards, and mlx5 adapters with their VFs."""

from __future__ import annotations

from hack.node_tree import Ids, NodeTree, guid, mac

CONNECTX7 = Ids("020000", "15b3", "1021", "15b3:0023", "mlx5_core")
CONNECTX6DX = Ids("020000", "15b3", "101d", "15b3:0016", "mlx5_core")
CONNECTX6 = Ids("020000", "15b3", "101b", "15b3:0007", "mlx5_core")
CONNECTX8 = Ids("020000", "15b3", "1023", "15b3:0033", "mlx5_core")
CONNECTX9 = Ids("020000", "15b3", "1025", "15b3:0049", "mlx5_core")
CONNECTX_VF = Ids("020000", "15b3", "101e", "15b3:0023", "mlx5_core")
CONNECTX3 = Ids("028000", "15b3", "1003", "15b3:0050", "mlx4_core")
X550 = Ids("020000", "8086", "1563", "8086:0001", "ixgbe")
I350 = Ids("020000", "8086", "1521", "8086:0001", "igb")
E1000E = Ids("020000", "8086", "10d3", "8086:a01f", "e1000e")
H100 = Ids("030200", "10de", "2330", "10de:16c1", "nvidia")
A100 = Ids("030200", "10de", "20b0", "10de:134f", "nvidia")
NVSWITCH = Ids("068000", "10de", "22a3", "10de:1796", "nvidia-nvswitch")
EFA = Ids("020000", "1d0f", "efa1", "1d0f:efa1", "efa")
ENA = Ids("020000", "1d0f", "ec20", "1d0f:ec20", "ena")
OLD_ROOT_PORT = Ids("060400", "8086", "0e04", driver="pcieport")

ROCE_UP = {"link_layer": "Ethernet", "lid": "0x0", "phys_state": "5: LinkUp", "state": "4: ACTIVE"}
ROCE_OFF = {
    "link_layer": "Ethernet",
    "lid": "0x0",
    "phys_state": "3: Disabled",
    "rate": "40 Gb/sec (4X QDR)",
    "state": "1: DOWN",
}


def mlx5_pfs(
    node: NodeTree,
    pfs: list[tuple[str, str, int]],
    gbps: int,
    speed: str,
    firmware: str,
    board: str,
    *,
    mtu: int = 1500,
) -> None:
    for number, (pf, name, _) in enumerate(pfs):
        netdev = f"{name}np{pf[-1]}"
        node.netdev(
            pf,
            netdev,
            mac("94:6d:ae", 0x10000 + number * 0x100),
            up=True,
            speed=gbps * 1000,
            mtu=mtu,
            port_name=f"p{pf[-1]}",
        )
        rate = f"{gbps} Gb/sec (4X {speed})"
        node.rdma(
            pf,
            f"mlx5_{node.next('mlx5')}",
            guid("946d:ae03:00", number * 0x100),
            [{**ROCE_UP, "rate": rate}],
            # Both ports of one adapter carry the image GUID of the first.
            image_guid=guid("946d:ae03:00", (number - int(pf[-1])) * 0x100),
            firmware=firmware,
            board=board,
            netdev=netdev,
        )


def mlx5_vfs(
    node: NodeTree,
    pfs: list[tuple[str, str, int]],
    firmware: str,
    board: str,
    *,
    total: int,
    count: int,
    offset: int,
) -> None:
    for pf, name, numa_node in pfs:
        for index, vf in enumerate(node.vfs(pf, CONNECTX_VF, numa_node, total=total, count=count, offset=offset)):
            number = node.next("mlx5_vf")
            netdev = f"{name}v{index}"
            node.netdev(vf, netdev, mac("e2:4b:7c", number))
            node.rdma(
                vf,
                f"mlx5_{node.next('mlx5')}",
                guid("e24b:7cff:fe", number),
                [ROCE_OFF],
                firmware=firmware,
                board=board,
                netdev=netdev,
            )
