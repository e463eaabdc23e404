"""What children are made upon: an interface that carries one sort of them, and the bond above a port.

The kernel of a test may have none of these kinds: an ifb stands for a child, a bridge for a bond (see test_child).
"""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.config import CniSettings
from agent.errors import AttachmentError, DeviceBusy, HardwareError, NetlinkFailed, NotAllowed
from agent.hardware.host import Child, Link
from agent.hardware.netlink.rtnetlink import LinkMessage
from tests.cni import tiny_node
from tests.cni.fixed_grants import FixedGrants
from tests.cni.modes.test_child import Kernel, looked_up, with_links
from tests.cni.tiny_node import PF, PF_NETDEV, Rig
from tests.waiting import until

BOND = "bond0"


class Bonding(Kernel):
    """Calls its bridges bonds."""

    bond = "bond"

    def _link(self, message: LinkMessage) -> Link:
        link = super()._link(message)
        return replace(link, kind=self.bond) if link.kind == "bridge" else link


@pytest.fixture
def node(own_network: None, tmp_path: Path) -> Iterator[tuple[Rig, Bonding]]:
    tiny_node.create(tmp_path)
    subprocess.run(["ip", "link", "set", PF_NETDEV, "up"], check=True)
    kernel = Bonding("ipvlan")
    with tiny_node.open_rig(tmp_path, host=lambda machine: with_links(machine, kernel)) as rig:
        yield rig, kernel
    kernel.close()


def enslave(mtu: int = 1500) -> None:
    subprocess.run(["ip", "link", "add", BOND, "mtu", str(mtu), "up", "type", "bridge"], check=True)
    subprocess.run(["ip", "link", "set", PF_NETDEV, "master", BOND], check=True)


@pytest.mark.parametrize(("said", "mode"), [({}, "l2"), ({"ipvlanMode": "l3s"}, "l3s")])
def test_an_ipvlan_is_made_without_a_mac_of_its_own_and_removed(
    node: tuple[Rig, Bonding], said: dict[str, Any], mode: str
) -> None:
    rig, kernel = node
    pod = rig.pod()
    answer = rig.add("c1", pod, mode="ipvlan", deviceID=PF, mtu=1400, **said)
    (made,) = kernel.made
    assert made == Child("ipvlan", "net1", mode, None, 1400)
    found = looked_up(rig, kernel, pod)
    assert found is not None
    assert (answer["interfaces"][0]["mac"], answer["interfaces"][0]["mtu"]) == (found.mac, 1400)
    rig.check("c1", pod, mode="ipvlan", deviceID=PF)
    rig.run_in(pod, "ip", "link", "set", "net1", "down")
    with pytest.raises(AttachmentError, match="net1 is down"):
        rig.check("c1", pod, mode="ipvlan", deviceID=PF)
    rig.delete("c1", pod)
    until(lambda: not rig.ledger.attachments())
    assert looked_up(rig, kernel, pod) is None


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ({"mode": "macvlan"}, {"mode": "ipvlan"}, "carries macvlans, one of pod .*pod-of-c1 .* can carry no ipvlan:"),
        ({"mode": "ipvlan"}, {"mode": "macvlan"}, "carries ipvlans of mode l2, .* can carry no macvlan:"),
        (
            {"mode": "ipvlan"},
            {"mode": "ipvlan", "ipvlanMode": "l3"},
            "carries ipvlans of mode l2, .* no ipvlan of mode l3: give all networks upon it one mode",
        ),
    ],
)
def test_one_interface_carries_one_sort_of_children(
    node: tuple[Rig, Bonding], first: dict[str, Any], second: dict[str, Any], text: str
) -> None:
    rig, kernel = node
    pods = [rig.pod("a"), rig.pod("b"), rig.pod("c")]
    kernel.kind = first["mode"]
    rig.add("c1", pods[0], deviceID=None, master=PF_NETDEV, **first)
    with pytest.raises(DeviceBusy, match=f"{PF_NETDEV} {text}"):
        rig.add("c2", pods[1], deviceID=PF, **second)
    rig.add("c3", pods[2], deviceID=PF, **first)
    for name, pod in (("c1", pods[0]), ("c3", pods[2])):
        rig.delete(name, pod)
    until(lambda: not rig.ledger.attachments())
    kernel.kind = second["mode"]
    rig.add("c2", pods[1], deviceID=PF, **second)


def test_what_others_have_made_upon_it_is_told_by_the_kernel_alone(node: tuple[Rig, Bonding]) -> None:
    rig, kernel = node
    kernel.refuse_elsewhere = errno.EBUSY
    with pytest.raises(NetlinkFailed, match=f"{PF_NETDEV} is in use otherwise, .* by macvlans: an interface carries"):
        rig.add("c1", rig.pod(), mode="ipvlan", deviceID=PF)


@pytest.mark.parametrize("mode", ["macvlan", "ipvlan"])
def test_upon_an_adapter_that_is_a_port_of_a_bond_the_bond_is_the_parent(node: tuple[Rig, Bonding], mode: str) -> None:
    rig, kernel = node
    pod, kernel.kind = rig.pod(), mode
    enslave()
    rig.add("c1", pod, mode=mode, deviceID=PF)
    (row,) = rig.ledger.attachments()
    assert (row.device, row.undo.netdev) == (f"{PF}/c1/net1", BOND)
    rig.check("c1", pod, mode=mode, deviceID=PF)
    subprocess.run(["ip", "link", "set", BOND, "address", "02:00:00:00:00:99"], check=True)  # as at a failover
    rig.check("c1", pod, mode=mode, deviceID=PF)
    subprocess.run(["ip", "link", "set", BOND, "down"], check=True)
    with pytest.raises(AttachmentError, match=f"its parent {BOND} is down"):
        rig.check("c1", pod, mode=mode, deviceID=PF)
    with pytest.raises(HardwareError, match=f"{PF_NETDEV} is a port of {BOND}"):
        rig.add("c2", rig.pod("other"), mode="nic", deviceID=PF)
    rig.delete("c1", pod)
    until(lambda: not rig.ledger.attachments())
    assert looked_up(rig, kernel, pod) is None


def test_upon_a_port_of_anything_else_the_port_is_the_parent(node: tuple[Rig, Bonding]) -> None:
    """A VRF's port carries children; a bridge's is refused by the kernel."""
    rig, kernel = node
    kernel.bond = "vrf"
    enslave()
    rig.add("c1", rig.pod(), mode="ipvlan", deviceID=PF)
    (row,) = rig.ledger.attachments()
    assert row.undo.netdev == PF_NETDEV


@pytest.mark.parametrize("conf", [{"deviceID": PF}, {"deviceID": None, "master": PF_NETDEV}])
def test_who_names_a_port_of_a_bond_names_the_bond(own_network: None, tmp_path: Path, conf: dict[str, Any]) -> None:
    tiny_node.create(tmp_path)
    kernel, grants = Bonding("ipvlan"), FixedGrants()
    grants.cni = CniSettings(protect=(BOND,))
    with tiny_node.open_rig(tmp_path, host=lambda machine: with_links(machine, kernel), grants=grants) as rig:
        enslave()
        with pytest.raises(NotAllowed, match=f"a port of {BOND}, is the host's alone"):
            rig.add("c1", rig.pod(), mode="ipvlan", **conf)
        assert kernel.made == []
    kernel.close()
