"""Two VFs of a pod as one interface: what is paired, made, told, checked and undone.

The kernel of a test may have no bonds, so a bridge stands for one: real ports, real moves. tests/vm has real bonds.
"""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config.networks import network_of_keys
from agent.errors import AttachmentError, HardwareError, NetlinkFailed, RequestInvalid
from agent.hardware.host import Child, LinkChange
from agent.hardware.netlink.rtnetlink import creation
from agent.model.device import PciDevice, Snapshot
from cni.call import GrantedDevice
from cni.modes.child import pairs
from tests.cni import tiny_node
from tests.cni.modes.conftest import Kernel
from tests.cni.networks import PREVIOUS, network
from tests.cni.tiny_node import Rig, mac_of, netdev, vf
from tests.waiting import until

OTHER_PF = "0000:5e:00.0"
BOND = {"bond": "active-backup"}
PORTS = (vf(0), vf(2))


def with_two_pfs(snapshot: Snapshot) -> Snapshot:
    """Say that the third VF is of another PF."""
    devices = (replace(d, physfn=OTHER_PF) if d.address == vf(2) else d for d in snapshot.devices)
    return replace(snapshot, devices=tuple(devices))


@pytest.fixture
def rig(own_network: None, tmp_path: Path, kernel: Kernel) -> Iterator[Rig]:
    with tiny_node.open_rig(tmp_path, host=lambda m: replace(m, links=kernel), seen=with_two_pfs) as rig:
        yield rig


def grant(rig: Rig, *indices: int, **keys: Any) -> None:
    rig.granted[:] = [GrantedDevice(vf(i), "rdma/vf", network({**BOND, **keys})) for i in indices]


def add(rig: Rig, pod: Path, container_id: str = "c1") -> Any:
    return rig.add(container_id, pod, ifname="eth0", prevResult=PREVIOUS)


def ports_of(rig: Rig, kernel: Kernel, pod: Path) -> dict[str, bool]:
    """Tell of each VF in the pod whether it is a port of net1."""
    with pod.open() as netns:
        bond = kernel.find("net1", netns.fileno())
        found = kernel.listed(netns.fileno(), lambda link: link.device in PORTS)
    return {link.name: bond is not None and link.master == bond.ifindex for link in found}


def test_two_vfs_come_as_one_interface_with_the_addresses_and_go_home(rig: Rig, kernel: Kernel) -> None:
    before = [rig.found(i) for i in range(3)]
    pod = rig.pod()
    grant(rig, 0, 2, mtu=1400, vlan=7, ipam=rig.ipam(), altNames=["storage"], arpTargets=["10.9.0.1"])
    answer = add(rig, pod)

    assert [i["name"] for i in answer["interfaces"]] == ["cbr0", "eth0", "net1p0", "net1p1", "net1"]
    assert [i.get("pciID") for i in answer["interfaces"]][2:] == [vf(0), vf(2), None]
    assert {(ip["interface"], ip["address"]) for ip in answer["ips"]} >= {(4, "10.9.0.2/24"), (4, "fd09::2/64")}
    assert kernel.made == [Child("bond", "net1", "active-backup", None, 1400, up=False, arp_targets=("10.9.0.1",))]
    assert ports_of(rig, kernel, pod) == {"net1p0": True, "net1p1": True}
    bond = rig.link(pod, "net1")
    assert (bond.up, bond.mtu, bond.altnames) == (True, 1400, ("storage",))
    for name, index in (("net1p0", 0), ("net1p1", 2)):
        port = rig.link(pod, name)
        assert (port.device, port.mac, port.mtu, port.up, port.altnames) == (vf(index), mac_of(index), 1400, True, ())
    assert [rig.settings(i).vlan for i in range(3)] == [7, 0, 7]
    assert {row.device for row in rig.ledger.attachments()} == {vf(0), vf(2), f"{vf(0)}+{vf(2)}/c1/net1"}
    assert add(rig, pod) == answer
    rig.check("c1", pod, ifname="eth0", prevResult=answer)

    rig.detach("c1", pod, ifname="eth0")
    assert [rig.found(i) for i in range(3)] == before
    assert rig.in_pod(pod, "net1") is None
    assert rig.leases() == []
    assert rig.ledger.quarantines() == ()


def test_check_tells_what_has_become_of_it(rig: Rig) -> None:
    pod = rig.pod()
    grant(rig, 0, 2)
    answer = add(rig, pod)
    rig.run_in(pod, "ip", "link", "set", "net1p1", "nomaster")
    rig.run_in(pod, "ip", "link", "set", "net1", "down")
    with pytest.raises(AttachmentError, match=rf"net1 is down; {vf(2)} is no port of net1"):
        rig.check("c1", pod, ifname="eth0", prevResult=answer)
    rig.run_in(pod, "ip", "link", "delete", "net1")
    with pytest.raises(AttachmentError, match="interface net1 is not in the pod"):
        rig.check("c1", pod, ifname="eth0", prevResult=answer)
    rig.detach("c1", pod, ifname="eth0")


def test_a_namespace_that_ends_gives_both_vfs_back(rig: Rig) -> None:
    before = [rig.found(i) for i in range(3)]
    pod = rig.pod()
    grant(rig, 0, 2)
    add(rig, pod)
    rig.remove(pod)

    def is_healed() -> bool:
        for row in rig.ledger.attachments():
            rig.attachments.heal(row.device)
        return not rig.ledger.attachments()

    until(is_healed)
    assert [rig.found(i) for i in range(3)] == before


@pytest.mark.parametrize("step", ["no bond", "first port", "second port", "up"])
def test_an_add_that_fails_at_any_step_leaves_nothing(rig: Rig, kernel: Kernel, step: str) -> None:
    before = [rig.found(i) for i in range(3)]
    pod, left = rig.pod(), {"first port": 0, "second port": 1, "up": 2}.get(step, 9)
    changes: list[LinkChange] = []

    def fail(change: LinkChange) -> None:
        changes.append(change)
        if len(changes) == left + 1:
            raise NetlinkFailed("change it", errno.EPERM, "refused")

    kernel.before_change = fail
    kernel.refuse = errno.EOPNOTSUPP if step == "no bond" else None
    grant(rig, 0, 2, vlan=7, ipam=rig.ipam())
    with pytest.raises(NetlinkFailed, match="load the module bonding" if step == "no bond" else "refused"):
        add(rig, pod)
    kernel.before_change = lambda change: None
    assert rig.ledger.attachments() == ()
    assert rig.in_pod(pod, "net1") is None
    assert [rig.found(i) for i in range(3)] == before
    assert rig.leases() == []


def test_vfs_with_different_mtus_are_joined_where_the_network_says_one(rig: Rig) -> None:
    subprocess.run(["ip", "link", "set", netdev(2), "mtu", "1300"], check=True)
    grant(rig, 0, 2)
    with pytest.raises(HardwareError, match=rf"different MTUs \({vf(0)} 1500 and {vf(2)} 1300\): say mtu"):
        add(rig, rig.pod("a"))
    grant(rig, 0, 2, mtu=1400)
    pod = rig.pod("b")
    rig.check("c1", pod, ifname="eth0", prevResult=add(rig, pod))


@pytest.mark.parametrize(
    ("indices", "told"), [((0, 1), "2 of 0000:3b:00.0"), ((0, 1, 2), "2 of .*, 1 of 0000:5e:00.0")]
)
def test_vfs_that_make_no_pairs_are_refused_before_anything_moves(
    rig: Rig, indices: tuple[int, ...], told: str
) -> None:
    grant(rig, *indices)
    with pytest.raises(
        RequestInvalid, match=rf"joins two VFs of different PFs, and the pod has {len(indices)} \({told}"
    ):
        add(rig, rig.pod())
    assert rig.ledger.attachments() == ()


def test_what_is_not_joined_comes_beside_it(rig: Rig) -> None:
    pod = rig.pod()
    grant(rig, 0, 2)
    rig.granted.insert(1, GrantedDevice(vf(1), "rdma/single", network({"mtu": 1400})))
    answer = add(rig, pod)
    assert [i["name"] for i in answer["interfaces"]][2:] == ["net1p0", "net1p1", "net1", "net2"]
    alone = rig.link(pod, "net2")
    assert (alone.device, alone.master, alone.up) == (vf(1), None, True)


def test_a_call_that_names_a_device_makes_no_bond(rig: Rig) -> None:
    with pytest.raises(RequestInvalid, match="bond: active-backup joins two VFs that kubelet gave to the pod"):
        rig.add("c1", rig.pod(), **BOND)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"bond": "802.3ad"}, "bond must be active-backup"),
        ({**BOND, "mode": "nic"}, "bond has no effect in mode nic"),
        ({**BOND, "mac": "02:00:00:00:00:01"}, "mac cannot be had with bond: each VF keeps its own"),
        ({**BOND, "vfio": True}, "vfio cannot be had with bond: it joins Ethernet VFs"),
        ({"arpTargets": ["10.9.0.1"]}, "arpTargets are asked by a bond"),
        ({**BOND, "arpTargets": ["fd09::1"]}, "arpTargets must be a list of at most 16 IPv4 addresses"),
        ({**BOND, "arpTargets": ["10.9.0.256"]}, "arpTargets must be"),
    ],
)
def test_keys_that_do_not_go_with_a_bond_are_refused(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestInvalid, match=text):
        network_of_keys(keys)


@given(st.lists(st.integers(0, 4), max_size=12))
def test_pairs_are_made_of_all_whenever_that_can_be(pfs: list[int]) -> None:
    devices = [f"0000:{pf:02x}:01.{n}" for n, pf in enumerate(pfs)]
    base = PciDevice("", (), 0x020000, 0x15B3, 0x101E, "mlx5_core", 0, None)
    made = tuple(replace(base, address=d, physfn=f"0000:{pf:02x}:00.0") for d, pf in zip(devices, pfs, strict=True))
    snapshot = Snapshot(devices=made)
    possible = len(pfs) % 2 == 0 and all(2 * pfs.count(pf) <= len(pfs) for pf in pfs)
    if not possible:
        with pytest.raises(RequestInvalid):
            pairs(devices, snapshot)
        return
    found = pairs(devices, snapshot)
    assert sorted(device for pair in found for device in pair) == sorted(devices)
    assert all(one[:7] != other[:7] for one, other in found)


def test_a_bond_is_asked_for_by_its_bytes() -> None:
    golden = (
        "00000000 00000000 00000000 00000000"  # any family, no index, down
        "09000300 6e65743100 000000"  # IFLA_IFNAME net1
        "08001c00 11000000"  # IFLA_NET_NS_FD 17
        "08000400 78050000"  # IFLA_MTU
        "30001200"  # IFLA_LINKINFO
        "08000100 626f6e64"  # IFLA_INFO_KIND bond
        "24000200"  # IFLA_INFO_DATA
        "05000100 01 000000"  # IFLA_BOND_MODE active-backup
        "08000300 64000000"  # IFLA_BOND_MIIMON 100
        "05000d00 01 000000"  # IFLA_BOND_FAIL_OVER_MAC active
        "05001000 03 000000"  # IFLA_BOND_NUM_PEER_NOTIF
    )
    assert creation(Child("bond", "net1", "active-backup", None, 1400, up=False), None, 17).hex() == golden.replace(
        " ", ""
    )


def test_a_bond_that_asks_its_targets_does_not_look_at_links() -> None:
    asks = (
        "05000100 01 000000"  # IFLA_BOND_MODE active-backup
        "08000700 c8000000"  # IFLA_BOND_ARP_INTERVAL 200
        "14000800 08000000 0a090001 08000100 0a090002"  # IFLA_BOND_ARP_IP_TARGET
        "08000900 01000000"  # IFLA_BOND_ARP_VALIDATE active
        "05000d00 01 000000"  # IFLA_BOND_FAIL_OVER_MAC active
        "05001000 03 000000"  # IFLA_BOND_NUM_PEER_NOTIF
    )
    made = Child("bond", "net1", "active-backup", up=False, arp_targets=("10.9.0.1", "10.9.0.2"))
    assert creation(made, None, 17).hex().endswith(asks.replace(" ", ""))
