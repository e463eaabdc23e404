"""Every VF of both adapters through all that igb takes, read back before, during and after; and what goes wrong."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.errors import AttachmentError, HardwareError, NetlinkFailed
from tests.vm.adapters import PCI_DEVICES, MakePod, MakeVfs, Pf, ip, link, netdevs, wait_until
from tests.vm.direct import Direct, look, opened

VFS = 7


def asked(pf_number: int, index: int) -> dict[str, Any]:
    """Ask for something else of each VF."""
    return {
        "vlan": 100 + 10 * pf_number + index,
        "vlanQoS": index % 8,
        "mac": f"02:00:00:00:{pf_number:02x}:{index:02x}",
        "trust": "on" if index % 2 else "off",
        "spoofchk": "off" if index % 2 else "on",
        "max_tx_rate": 100 + index,
        "mtu": 1400 + index,
        "altNames": [f"rail{pf_number}-{index}"],
    }


@pytest.fixture(scope="module")
def full(pfs: tuple[Pf, ...], vfs: MakeVfs) -> tuple[Pf, ...]:
    for pf in pfs:
        vfs(pf, VFS)
    return pfs


@pytest.fixture
def direct(full: tuple[Pf, ...], tmp_path: Path) -> Iterator[Direct]:
    """After each test everything is as it was."""
    before = look(*full)
    with opened(tmp_path) as parts:
        yield parts
        wait_until("everything back as it was", lambda: look(*full) == before)
        assert (parts.ledger.attachments(), parts.ledger.quarantines()) == ((), ())


def test_seven_vfs_of_each_adapter_get_all_that_was_asked_and_give_it_back(
    full: tuple[Pf, ...], direct: Direct, netns: MakePod
) -> None:
    pods: dict[tuple[int, int], str] = {}
    for number, pf in enumerate(full):
        for index, address in enumerate(pf.vfs()):
            pods[number, index] = pod = netns()
            conf = asked(number, index)
            answer = direct.add(f"c{number}-{index}", pod, address, **conf)
            assert answer["interfaces"][0]["mac"] == conf["mac"]
    for (number, index), pod in pods.items():
        conf, on_pf, inside = asked(number, index), full[number].settings(index), link("net1", pod)
        assert (inside["address"], inside["mtu"], inside["altnames"]) == (conf["mac"], conf["mtu"], conf["altNames"])
        assert "UP" in inside["flags"]
        assert (on_pf["address"], on_pf["trust"], on_pf["spoofchk"]) == (
            conf["mac"],
            conf["trust"] == "on",
            conf["spoofchk"] == "on",
        )
        [vlan] = on_pf["vlan_list"]
        assert (vlan["vlan"], vlan.get("qos", 0), on_pf["rate"]["max_tx"]) == (
            conf["vlan"],
            conf["vlanQoS"],
            conf["max_tx_rate"],
        )
        direct.check(f"c{number}-{index}", pod)
    ip("link", "set", full[0].netdev, "vf", "0", "vlan", "7")
    with pytest.raises(AttachmentError, match="has vlan 7, not 100"):
        direct.check("c0-0", pods[0, 0])
    for number, index in pods:
        direct.delete(f"c{number}-{index}", pods[number, index])


def test_what_igb_refuses_is_undone_and_named(full: tuple[Pf, ...], direct: Direct, netns: MakePod) -> None:
    pod, address = netns(), full[0].vfs()[0]
    for conf, number, words in (
        ({"link_state": "disable"}, errno.EOPNOTSUPP, "link state disable"),
        ({"vlan": 5, "vlanProto": "802.1ad"}, errno.EPROTONOSUPPORT, "VLAN 5"),
        ({"min_tx_rate": 10}, errno.EINVAL, r"rate 10\.\.0"),
    ):
        with pytest.raises(NetlinkFailed, match=words) as caught:
            direct.add("c1", pod, address, **{"mac": "02:00:00:00:00:77", "trust": "on", "mtu": 1400, **conf})
        assert (caught.value.errno, full[0].netdev in str(caught.value)) == (number, True)
        assert direct.ledger.attachments() == ()


def test_a_namespace_that_ends_without_a_del_gives_all_back(
    full: tuple[Pf, ...], direct: Direct, netns: MakePod
) -> None:
    pod, address = netns(), full[0].vfs()[1]
    direct.add("c1", pod, address, **asked(0, 1))
    ip("-n", pod, "link", "set", "net1", "promisc", "on")
    ip("netns", "delete", pod)
    assert direct.heal(address) == "owner-gone"


def test_a_driver_that_is_rebound_in_the_pod_heals(full: tuple[Pf, ...], direct: Direct, netns: MakePod) -> None:
    """The interface ends in the pod and a new one comes in the host, under whatever name is free."""
    pod, address = netns(), full[0].vfs()[2]
    direct.add("c1", pod, address, **asked(0, 2))
    rebind(address)
    with pytest.raises(AttachmentError, match="net1 is not in the pod"):
        direct.check("c1", pod)
    direct.delete("c1", pod)


def test_a_driver_that_is_unbound_in_the_pod_frees_the_vf(full: tuple[Pf, ...], direct: Direct, netns: MakePod) -> None:
    pod, address = netns(), full[0].vfs()[3]
    own = netdevs(address)[0]
    direct.add("c1", pod, address, **asked(0, 3))
    (PCI_DEVICES / address / "driver/unbind").write_text(address)
    ip("netns", "delete", pod)
    assert direct.heal(address) == "owner-gone"
    assert direct.ledger.quarantines() == ()
    Path("/sys/bus/pci/drivers/igbvf/bind").write_text(address)
    wait_until(f"an interface of {address}", lambda: netdevs(address))
    if netdevs(address)[0] != own:
        ip("link", "set", netdevs(address)[0], "name", own)


def test_a_pod_that_changed_everything_leaves_nothing(full: tuple[Pf, ...], direct: Direct, netns: MakePod) -> None:
    pod, address = netns(), full[0].vfs()[4]
    direct.add("c1", pod, address)
    flags = ("promisc on", "allmulticast on", "arp off", "multicast off")
    for change in ("down", "name mine", *flags, "mtu 1300"):
        ip("-n", pod, "link", "set", "mine" if change not in ("down", "name mine") else "net1", *change.split())
    ip("-n", pod, "link", "property", "add", "dev", "mine", "altname", netdevs(full[0].address)[0])
    direct.delete("c1", pod)


def test_names_that_are_taken_stand_in_nobodys_way(full: tuple[Pf, ...], direct: Direct, netns: MakePod) -> None:
    pod, address = netns(), full[0].vfs()[5]
    own = netdevs(address)[0]
    ip("link", "property", "add", "dev", own, "altname", "enp7s0v5")
    try:
        ip("-n", pod, "link", "add", own, "type", "dummy")
        ip("-n", pod, "link", "add", "enp7s0v5", "type", "dummy")
        direct.add("c1", pod, address)
        ip("link", "add", "net1", "type", "dummy")
        direct.delete("c1", pod)
        assert link(own)["altnames"] == ["enp7s0v5"]
    finally:
        ip("link", "delete", "net1")
        ip("link", "property", "del", "dev", own, "altname", "enp7s0v5")


def test_a_whole_adapter_goes_and_comes_back(full: tuple[Pf, ...], direct: Direct, netns: MakePod) -> None:
    """Its VFs stay in the host, and cannot be set up while their PF's interface is away."""
    pf, pod, other = full[1], netns(), netns()
    ip("address", "add", "192.0.2.5/24", "dev", pf.netdev)
    try:
        direct.add("c1", pod, pf.address, mode="nic")
        assert netdevs(pf.address) == ()
        with pytest.raises(HardwareError, match="has no interface"):
            direct.add("c2", other, pf.vfs()[0], vlan=7)
        direct.delete("c1", pod)
        assert "192.0.2.5" in ip("address", "show", "dev", pf.netdev)
    finally:
        ip("address", "delete", "192.0.2.5/24", "dev", pf.netdev)
    wait_until(f"carrier on {pf.netdev}", lambda: "LOWER_UP" in link(pf.netdev)["flags"])


def rebind(address: str) -> None:
    driver = (PCI_DEVICES / address / "driver").resolve()
    (driver / "unbind").write_text(address)
    (driver / "bind").write_text(address)
    wait_until(f"an interface of {address}", lambda: netdevs(address))
