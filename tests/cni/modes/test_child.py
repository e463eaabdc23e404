"""macvlan and IPoIB children: made for the pod, found again, removed in full.

This kernel may have neither kind, so an ifb, an interface of software too, stands for them: real requests, real
namespaces. tests/vm has real macvlans; the bytes of both kinds are in test_rtnetlink.
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
from agent.errors import (
    AttachmentError,
    DeviceBusy,
    DeviceGone,
    HardwareError,
    NetlinkFailed,
    NotAllowed,
    RequestInvalid,
)
from agent.hardware.host import Child
from cni.modes import child
from tests.cni import tiny_node
from tests.cni.modes.conftest import Kernel
from tests.cni.stand_ins import FixedDevices
from tests.cni.tiny_node import PF, PF_NETDEV, Rig
from tests.node import granted


@pytest.fixture
def held() -> FixedDevices:
    return FixedDevices()


@pytest.fixture
def rig(own_network: None, tmp_path: Path, kernel: Kernel, held: FixedDevices) -> Iterator[Rig]:
    """A node whose PF is up, for macvlans."""
    tiny_node.create(tmp_path)
    subprocess.run(["ip", "link", "set", PF_NETDEV, "up"], check=True)
    with tiny_node.open_rig(tmp_path, host=lambda m: replace(m, links=kernel), held=held) as rig:
        yield rig


@pytest.fixture
def infiniband(rig: Rig, kernel: Kernel) -> None:
    """Have it be a node for IPoIB."""
    kernel.kind = "ipoib"
    folder = rig.machine.root / "sys/class/net" / PF_NETDEV
    for name, value in {"type": "32", "mode": "connected", "pkey": "0xffff", "dev_port": "0"}.items():
        (folder / name).write_text(f"{value}\n")
    pkeys = rig.machine.root / "sys/bus/pci/devices" / PF / "infiniband/mlx5_0/ports/1/pkeys"
    pkeys.mkdir(parents=True)
    for index, pkey in enumerate(("0xffff", "0x8001", "0x0000")):
        (pkeys / str(index)).write_text(f"{pkey}\n")


@pytest.fixture
def ipvlans(kernel: Kernel) -> None:
    """Have it be a node for ipvlans."""
    kernel.kind = "ipvlan"


def test_pods_share_a_parent_and_each_gets_its_own(rig: Rig, kernel: Kernel) -> None:
    pods = [rig.pod("a"), rig.pod("b")]
    for n, pod in enumerate(pods):
        answer = rig.add(f"container-{n}", pod, mode="macvlan", deviceID=None, master=PF_NETDEV, mtu=1400)
        found = rig.link(pod)
        (shown,) = answer["interfaces"]
        assert (shown["name"], shown["mac"], shown["mtu"]) == ("net1", found.mac, 1400)
        assert (found.up, found.mtu) == (True, 1400)
    assert {row.device for row in rig.ledger.attachments()} == {
        f"{PF_NETDEV}/container-0/net1",
        f"{PF_NETDEV}/container-1/net1",
    }
    assert kernel.made[0].mode == "bridge"
    assert kernel.made[0].mac != kernel.made[1].mac
    rig.detach("container-0", pods[0])
    assert len(rig.ledger.attachments()) == 1
    assert rig.in_pod(pods[0]) is None
    assert rig.in_pod(pods[1]) is not None


def test_a_share_stands_for_the_adapter_that_it_is_of(rig: Rig, kernel: Kernel) -> None:
    """Multus names what kubelet gave for the network's resourceName."""
    pod, share = rig.pod(), "hca-946dae0300000000-7"
    named: dict[str, Any] = {"mode": "macvlan", "deviceID": share, "pciBusID": share}
    with pytest.raises(RequestInvalid, match=f"{share} is a share that kubelet has given to no pod"):
        rig.add("c1", pod, **named)
    rig.ledger.grant(granted("rdma/hca", {"hca-946dae0300000000-6": tiny_node.vf(0), share: PF}))
    answer = rig.add("c1", pod, **named)
    assert rig.in_pod(pod) is not None
    assert rig.add("c1", pod, **named) == answer
    rig.check("c1", pod, **named)
    rig.detach("c1", pod, **named)
    with pytest.raises(RequestInvalid, match="deviceID must be a PCI address"):
        rig.add("c1", pod, mode="nic", deviceID=share)


def test_it_is_found_and_removed_after_a_rename_in_the_pod(rig: Rig, kernel: Kernel) -> None:
    pod = rig.pod()
    rig.add("c1", pod, mode="macvlan", deviceID=None, master=PF_NETDEV)
    rig.run_in(pod, "ip", "link", "set", "net1", "down", "name", "mine")
    with pytest.raises(AttachmentError, match="it is called mine there; net1 is down"):
        rig.check("c1", pod, mode="macvlan", deviceID=None, master=PF_NETDEV)
    rig.detach("c1", pod)
    assert rig.in_pod(pod, "mine") is None


def test_another_interface_of_that_name_is_left_alone(rig: Rig, kernel: Kernel) -> None:
    pod = rig.pod()
    rig.add("c1", pod, mode="macvlan", deviceID=None, master=PF_NETDEV)
    rig.run_in(pod, "ip", "link", "delete", "net1")
    rig.run_in(pod, "ip", "link", "add", "net1", "type", "veth", "peer", "name", "other")
    rig.detach("c1", pod)
    assert rig.in_pod(pod) is not None


def test_a_name_that_is_taken_is_told_and_the_other_stays(rig: Rig, kernel: Kernel) -> None:
    pod = rig.pod()
    rig.run_in(pod, "ip", "link", "add", "net1", "type", "ifb")
    with pytest.raises(NetlinkFailed, match="an interface called net1 is in the pod already"):
        rig.add("c1", pod, mode="macvlan", deviceID=None, master=PF_NETDEV)
    assert rig.in_pod(pod) is not None
    assert rig.ledger.attachments() == ()


def test_nothing_is_made_upon_a_parent_that_is_on_its_way_into_a_pod(rig: Rig, kernel: Kernel) -> None:
    """That pod would have the interface of the other below its own."""
    refused: list[DeviceBusy] = []
    pods = [rig.pod("a"), rig.pod("b")]

    def meanwhile() -> None:
        try:
            rig.add("c1", pods[0], mode="macvlan", deviceID=None, master=PF_NETDEV)
        except DeviceBusy as error:
            refused.append(error)

    kernel.before_move = meanwhile
    rig.add("c2", pods[1], mode="nic", deviceID=PF)
    assert [str(error) for error in refused] == [f"{PF_NETDEV} is on its way into pod default/pod-of-c2"]
    assert kernel.made == []
    rig.check("c2", pods[1], mode="nic", deviceID=PF)


def test_a_parent_with_children_in_pods_is_not_taken_away(rig: Rig, kernel: Kernel) -> None:
    """The kernel shows no interface above it: that is in another namespace."""
    rig.add("c1", rig.pod("a"), mode="macvlan", deviceID=None, master=PF_NETDEV)
    with pytest.raises(DeviceBusy, match=f"{PF_NETDEV} is needed by {PF_NETDEV}/c1/net1"):
        rig.add("c2", rig.pod("b"), mode="nic", deviceID=PF)


@pytest.mark.parametrize(
    ("conf", "error", "message"),
    [
        ({"master": "nothing"}, DeviceGone, "nothing is gone: not found with an interface in the host"),
        ({"master": f"{PF_NETDEV}v0"}, HardwareError, f"{PF_NETDEV}v0 is down, .*ip link set {PF_NETDEV}v0 up"),
        ({"master": PF_NETDEV, "mtu": 9000}, RequestInvalid, f"mtu 9000 is above that of {PF_NETDEV}, 1500"),
        ({"master": PF_NETDEV, "macvlanMode": "passthru", "mac": "02:00:00:00:00:05"}, RequestInvalid, "passthru"),
    ],
    ids=["no parent", "parent down", "MTU", "MAC in passthru"],
)
def test_what_cannot_be_is_told_before_anything_is_made(
    rig: Rig, kernel: Kernel, conf: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        rig.add("c1", rig.pod(), mode="macvlan", deviceID=None, **conf)
    assert kernel.made == []
    assert rig.ledger.attachments() == ()


def test_a_kernel_without_the_kind_says_which_module(rig: Rig, kernel: Kernel) -> None:
    kernel.refuse = errno.EOPNOTSUPP
    with pytest.raises(NetlinkFailed, match="load the module macvlan"):
        rig.add("c1", rig.pod(), mode="macvlan", deviceID=None, master=PF_NETDEV)


def test_an_ipoib_child_has_its_parents_mode_and_the_asked_partition(
    infiniband: None, rig: Rig, kernel: Kernel
) -> None:
    pod = rig.pod()
    rig.add("c1", pod, mode="ipoib", deviceID=None, master=PF_NETDEV, pkey="0x8001")
    rig.add("c2", rig.pod("other"), mode="ipoib", deviceID=PF)
    assert [(c.kind, c.mode, c.pkey) for c in kernel.made] == [
        ("ipoib", "connected", 0x8001),
        ("ipoib", "connected", 0xFFFF),
    ]
    rig.check("c1", pod, mode="ipoib", deviceID=None, master=PF_NETDEV)
    (rig.machine.root / "sys/bus/pci/devices" / PF / "infiniband/mlx5_0/ports/1/pkeys/1").write_text("0x0000\n")
    with pytest.raises(AttachmentError, match="not in partition 0x8001 any more"):
        rig.check("c1", pod, mode="ipoib", deviceID=None, master=PF_NETDEV)
    rig.detach("c1", pod)
    assert rig.in_pod(pod) is None


def test_a_partition_that_the_port_is_not_in_is_refused_with_what_to_do(
    infiniband: None, rig: Rig, kernel: Kernel
) -> None:
    with pytest.raises(HardwareError, match=r"not in partition 0x8002, but in 0xffff, 0x8001: add its GUID"):
        rig.add("c1", rig.pod(), mode="ipoib", deviceID=None, master=PF_NETDEV, pkey="0x8002")
    assert kernel.made == []


def test_an_ethernet_parent_is_refused(rig: Rig, kernel: Kernel) -> None:
    with pytest.raises(HardwareError, match=f"{PF_NETDEV} is no IPoIB interface"):
        rig.add("c1", rig.pod(), mode="ipoib", deviceID=None, master=PF_NETDEV)


def test_a_kernel_that_makes_no_child_elsewhere_makes_it_here_and_it_is_moved(
    infiniband: None, rig: Rig, kernel: Kernel
) -> None:
    kernel.refuse = errno.EINVAL
    pod = rig.pod()
    rig.add("c1", pod, mode="ipoib", deviceID=None, master=PF_NETDEV)
    assert kernel.made[0].name == child.temporary_name(f"{PF_NETDEV}/c1/net1")
    assert rig.link(pod).up
    assert kernel.find(kernel.made[0].name) is None


def test_what_a_crash_left_in_the_host_is_removed(infiniband: None, rig: Rig, kernel: Kernel) -> None:
    kernel.refuse = errno.EINVAL
    pod = rig.pod()
    rig.run_in(pod, "ip", "link", "add", "net1", "type", "veth", "peer", "name", "other")
    with pytest.raises(NetlinkFailed):
        rig.add("c1", pod, mode="ipoib", deviceID=None, master=PF_NETDEV)
    assert kernel.find(kernel.made[0].name) is None
    assert rig.ledger.attachments() == ()
    assert rig.in_pod(pod) is not None


BOND = "bond0"


def enslave(mtu: int = 1500) -> None:
    subprocess.run(["ip", "link", "add", BOND, "mtu", str(mtu), "up", "type", "bridge"], check=True)
    subprocess.run(["ip", "link", "set", PF_NETDEV, "master", BOND], check=True)


@pytest.mark.parametrize(("said", "mode"), [({}, "l2"), ({"ipvlanMode": "l3s"}, "l3s")])
def test_an_ipvlan_is_made_without_a_mac_of_its_own_and_removed(
    ipvlans: None, rig: Rig, kernel: Kernel, said: dict[str, Any], mode: str
) -> None:
    pod = rig.pod()
    answer = rig.add("c1", pod, mode="ipvlan", deviceID=PF, mtu=1400, **said)
    (made,) = kernel.made
    assert made == Child("ipvlan", "net1", mode, None, 1400)
    found = rig.link(pod)
    assert (answer["interfaces"][0]["mac"], answer["interfaces"][0]["mtu"]) == (found.mac, 1400)
    rig.check("c1", pod, mode="ipvlan", deviceID=PF)
    rig.run_in(pod, "ip", "link", "set", "net1", "down")
    with pytest.raises(AttachmentError, match="net1 is down"):
        rig.check("c1", pod, mode="ipvlan", deviceID=PF)
    rig.detach("c1", pod)
    assert rig.in_pod(pod) is None


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
    ipvlans: None, rig: Rig, kernel: Kernel, first: dict[str, Any], second: dict[str, Any], text: str
) -> None:
    pods = [rig.pod("a"), rig.pod("b"), rig.pod("c")]
    kernel.kind = first["mode"]
    rig.add("c1", pods[0], deviceID=None, master=PF_NETDEV, **first)
    with pytest.raises(DeviceBusy, match=f"{PF_NETDEV} {text}"):
        rig.add("c2", pods[1], deviceID=PF, **second)
    rig.add("c3", pods[2], deviceID=PF, **first)
    for name, pod in (("c1", pods[0]), ("c3", pods[2])):
        rig.detach(name, pod)
    kernel.kind = second["mode"]
    rig.add("c2", pods[1], deviceID=PF, **second)


def test_what_others_have_made_upon_it_is_told_by_the_kernel_alone(ipvlans: None, rig: Rig, kernel: Kernel) -> None:
    kernel.refuse = errno.EBUSY
    with pytest.raises(NetlinkFailed, match=f"{PF_NETDEV} is in use otherwise, .* by macvlans: an interface carries"):
        rig.add("c1", rig.pod(), mode="ipvlan", deviceID=PF)


@pytest.mark.parametrize("mode", ["macvlan", "ipvlan"])
def test_upon_an_adapter_that_is_a_port_of_a_bond_the_bond_is_the_parent(
    ipvlans: None, rig: Rig, kernel: Kernel, mode: str
) -> None:
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
    rig.detach("c1", pod)
    assert rig.in_pod(pod) is None


def test_upon_a_port_of_anything_else_the_port_is_the_parent(ipvlans: None, rig: Rig, kernel: Kernel) -> None:
    """A VRF's port carries children; a bridge's is refused by the kernel."""
    kernel.bond = "vrf"
    enslave()
    rig.add("c1", rig.pod(), mode="ipvlan", deviceID=PF)
    (row,) = rig.ledger.attachments()
    assert row.undo.netdev == PF_NETDEV


@pytest.mark.parametrize("conf", [{"deviceID": PF}, {"deviceID": None, "master": PF_NETDEV}])
def test_who_names_a_port_of_a_bond_names_the_bond(
    ipvlans: None, rig: Rig, kernel: Kernel, held: FixedDevices, conf: dict[str, Any]
) -> None:
    held.cni = CniSettings(protect=(BOND,))
    enslave()
    with pytest.raises(NotAllowed, match=f"a port of {BOND}, is the host's alone"):
        rig.add("c1", rig.pod(), mode="ipvlan", **conf)
    assert kernel.made == []
