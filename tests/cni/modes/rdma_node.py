"""The tiny node with an RDMA device on each VF, in exclusive mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hack.sim.machine import SimulatedMachine
from tests.cni.tiny_node import Rig, open_rig, tiny_node, vf

FOLDER = "devices/pci0000:3a/0000:3a:00.0"


def rdma_name(index: int) -> str:
    """Return the name of a VF's RDMA device in the host."""
    return f"mlx5_{index + 1}"


def guid(index: int) -> str:
    return f"0c42:a103:0000:{index + 1:04x}"


def create(folder: Path, vfs: int = 3, mode: str = "exclusive", ib: bool = False) -> None:
    """Make the node and its links, in the network namespace of the caller."""
    node = tiny_node(vfs)
    sysfs = node.tree["sys"]
    bridge = sysfs["devices"]["pci0000:3a"]["0000:3a:00.0"]
    sysfs["class"] |= {"infiniband": {}, "infiniband_verbs": {}}
    for index in range(vfs):
        name, address = rdma_name(index), vf(index)
        port: dict[str, Any] = {"state": "4: ACTIVE\n", "rate": "100 Gb/sec (4X EDR)\n", "lid": "0x0\n"}
        port["link_layer"] = "InfiniBand\n" if ib else "Ethernet\n"
        if ib:
            port["pkeys"] = {"0": "0xffff\n"}
        device = {"node_type": "1: CA\n", "node_guid": f"{guid(index)}\n", "ports": {"1": port}}
        bridge[address]["infiniband"] = {name: device}
        sysfs["class"]["infiniband"][name] = [f"../../{FOLDER}/{address}/infiniband/{name}"]
        bridge[address]["infiniband_verbs"] = {f"uverbs{index}": {"ibdev": f"{name}\n"}}
        sysfs["class"]["infiniband_verbs"][f"uverbs{index}"] = [
            f"../../{FOLDER}/{address}/infiniband_verbs/uverbs{index}"
        ]
    if ib:  # ARPHRD_INFINIBAND
        for function in bridge.values():
            for interface in function["net"].values():
                interface["type"] = "32\n"
    SimulatedMachine.create(folder, node)
    machine = SimulatedMachine.open(folder)
    machine.rdma.set_mode(mode)
    machine.close()


@contextmanager
def opened(folder: Path, mode: str = "exclusive", ib: bool = False, **more: Any) -> Iterator[Rig]:
    """Make the node, and open the agent's parts on it; `more` is for `open_rig`."""
    create(folder, mode=mode, ib=ib)
    with open_rig(folder, **more) as rig:
        yield rig
