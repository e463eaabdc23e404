"""VFs that the host itself uses."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from agent.errors import HardwareError
from tests.cni import tiny_node
from tests.cni.tiny_node import Rig, netdev, vf

COLUMNS = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"


def default_routes(folder: Path, *names: str) -> None:
    table = folder / "root/proc/net/route"
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text(COLUMNS + "".join(f"{name} 00000000 0100A8C0 0003 0 0 0 00000000 0 0 0\n" for name in names))


def test_a_vf_that_is_a_port_of_a_bridge_of_the_host_is_refused(rig: Rig) -> None:
    for words in ("add name br7 type bridge", f"set {netdev(0)} master br7"):
        subprocess.run(["ip", "link", *words.split()], check=True)
    with pytest.raises(HardwareError, match=f"{netdev(0)} is a port of a bond, bridge or the like: take it out first"):
        rig.add("c1", rig.pod())
    subprocess.run(["ip", "link", "set", netdev(0), "nomaster"], check=True)
    rig.add("c1", rig.pod("again"))


def test_a_vf_that_is_the_hosts_only_way_out_is_refused(own_network: None, tmp_path: Path) -> None:
    tiny_node.create(tmp_path)
    default_routes(tmp_path, netdev(0))
    with tiny_node.open_rig(tmp_path) as rig:
        with pytest.raises(HardwareError, match=f"{netdev(0)} carries the host's default route"):
            rig.add("c1", rig.pod())
        rig.add("c1", rig.pod("other"), deviceID=vf(1))


def test_a_vf_below_a_vlan_that_is_the_hosts_only_way_out_is_refused(own_network: None, tmp_path: Path) -> None:
    tiny_node.create(tmp_path)
    default_routes(tmp_path, "storage.7")
    vlan = tmp_path / "root/sys/class/net/storage.7"
    vlan.mkdir()
    (vlan / f"lower_{netdev(0)}").symlink_to(f"../{netdev(0)}")
    with (
        tiny_node.open_rig(tmp_path) as rig,
        pytest.raises(HardwareError, match=f"{netdev(0)} carries the host's default route"),
    ):
        rig.add("c1", rig.pod())


def test_a_vf_is_taken_that_has_a_default_route_among_others(own_network: None, tmp_path: Path) -> None:
    """A router gives one to every interface that is up."""
    tiny_node.create(tmp_path)
    default_routes(tmp_path, "eno1", netdev(0))
    with tiny_node.open_rig(tmp_path) as rig:
        rig.add("c1", rig.pod())
