"""What tells VFs apart over a reboot, and what they are called."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agent.hardware.sysfs.netdev import udev_properties
from agent.model.device import RdmaDevice, Snapshot
from agent.model.vf_identity import (
    KnownDevice,
    Usual,
    Witness,
    addresses,
    identities,
    is_strange,
    moved,
    name_by_siblings,
    usual_name,
)
from tests.cni.tiny_node import PF, netdev, tiny_snapshot, vf


def known(snapshot: Snapshot, boot_id: str = "yesterday") -> list[KnownDevice]:
    return [
        KnownDevice(d.address, identities(snapshot)(d), d.netdev.name, d.netdev.mac, 1500, boot_id)
        for d in snapshot.devices
        if d.is_vf and d.netdev is not None
    ]


def with_guid(snapshot: Snapshot, guid: str) -> Snapshot:
    """Give the PF an RDMA device."""
    rdma = RdmaDevice("mlx5_0", "CA", guid, "", (), ())
    return replace(
        snapshot, devices=tuple(d if d.is_vf else replace(d, rdma_devices=(rdma,)) for d in snapshot.devices)
    )


def test_vfs_are_found_at_their_new_addresses() -> None:
    then, now = tiny_snapshot(2), tiny_snapshot(2, bus="5e", boot_id="today")
    assert moved(known(then), now) == {vf(0): "0000:5e:00.2", vf(1): "0000:5e:00.3"}
    assert moved(known(then), replace(then, boot_id="today")) == {}


def test_another_card_in_the_same_place_is_another_device() -> None:
    then, now = with_guid(tiny_snapshot(1), "0c42:a103:0065:1234"), with_guid(tiny_snapshot(1), "0c42:a103:0065:9999")
    assert identities(then)(then.by_address[vf(0)]) != identities(now)(now.by_address[vf(0)])
    assert moved(known(then), replace(now, boot_id="today")) == {}


@pytest.mark.parametrize("guid", ["", "0000:0000:0000:0000", "ffff:ffff:ffff:ffff"])
def test_a_guid_that_names_nothing_gives_way_to_the_mac(guid: str) -> None:
    snapshot = with_guid(tiny_snapshot(1), guid)
    assert identities(snapshot)(snapshot.by_address[vf(0)]) == "15b3:101d/02:00:00:00:00:01/0"


def test_cards_that_cannot_be_told_apart_are_not_followed() -> None:
    then, now = tiny_snapshot(1), tiny_snapshot(1, bus="5e", boot_id="today")
    twin = tiny_snapshot(1, bus="9a")
    assert moved(known(then), replace(now, devices=now.devices + twin.devices)) == {}
    assert moved(known(then) + known(twin), now) == {}


def test_a_vf_whose_pf_is_not_there_has_no_identity() -> None:
    snapshot = tiny_snapshot(1)
    alone = Snapshot(devices=tuple(d for d in snapshot.devices if d.is_vf))
    assert identities(alone)(alone.by_address[vf(0)]) == ""


MEMORY, NEIGHBOURS, GUESS = Witness.MEMORY, Witness.NEIGHBOURS, Witness.GUESS


@pytest.mark.parametrize(
    ("name", "usual", "witness", "strange"),
    [
        ("ens1f0v0", "ens1f0v0", MEMORY, False),
        ("dev7", "dev7", MEMORY, False),
        ("dev7", "ens1f0v0", GUESS, True),
        ("net1", "ens1f0v0", MEMORY, True),
        ("net1", "ens1f0v0", NEIGHBOURS, True),
        ("net1", "ens1f0v0", GUESS, False),
        ("eth4", "eth0v0", GUESS, False),
        ("eth4", "ens1f0v0", NEIGHBOURS, False),
        ("eth4", "ens1f0v0", MEMORY, True),
        ("eth0", "eth0", MEMORY, False),
        ("eth4", "eth3", MEMORY, False),  # all VFs were bound anew
        ("net1", "eth3", MEMORY, True),
        ("storage", "ens1f0v0", MEMORY, False),
        ("device7", "ens1f0v0", MEMORY, False),
    ],
)
def test_only_names_of_another_life_are_strange(name: str, usual: str, witness: Witness, strange: bool) -> None:
    assert is_strange(name, Usual(usual, witness)) is strange


def test_the_witnesses_for_a_name_are_heard_in_their_order() -> None:
    snapshot = tiny_snapshot(3, names={1: "net1"})
    device = snapshot.by_address[vf(1)]
    udev = {"ID_NET_NAME_PATH": "enp59s0f0v1"}
    assert usual_name(device, snapshot, "known") == Usual("known", MEMORY)
    assert usual_name(device, snapshot, None, udev) == Usual(netdev(1), NEIGHBOURS)
    alone = tiny_snapshot(2, names={0: "dev8", 1: "net1"})
    assert usual_name(alone.by_address[vf(1)], alone, None, udev) == Usual("enp59s0f0v1", NEIGHBOURS)
    assert usual_name(alone.by_address[vf(1)], alone, None, {**udev, "ID_NET_NAME": "rail1"}).name == "rail1"
    assert usual_name(alone.by_address[vf(1)], alone, None) == Usual("ens1f0v1", GUESS)


def test_where_the_kernel_names_interfaces_the_number_of_a_vf_tells_nothing() -> None:
    """With net.ifnames=0 the VFs of eth0 are eth2, eth3 …, in the order of their coming."""
    snapshot = tiny_snapshot(3, names={0: "eth2", 1: "dev7", 2: "eth4"})
    pf = snapshot.by_address[PF]
    assert pf.netdev is not None
    named = replace(snapshot, devices=(replace(pf, netdevs=(replace(pf.netdev, name="eth0"),)), *snapshot.devices[1:]))
    assert usual_name(named.by_address[vf(1)], named, None) == Usual("vf00003b003", NEIGHBOURS)
    assert is_strange("net1", usual_name(named.by_address[vf(1)], named, None))
    assert not is_strange("eth2", usual_name(named.by_address[vf(0)], named, None))


def test_udevs_database_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "run/udev/data"
    folder.mkdir(parents=True)
    (folder / "n7").write_text("I:123\nE:ID_NET_NAME_PATH=enp1s0f0v0\nE:ID_NET_NAME=rail0=x\nG:systemd\n")
    assert udev_properties(tmp_path, 7) == {"ID_NET_NAME_PATH": "enp1s0f0v0", "ID_NET_NAME": "rail0=x"}
    assert udev_properties(tmp_path, 8) == {}


def test_siblings_that_do_not_agree_or_whose_names_were_made_up_of_a_place_tell_nothing() -> None:
    snapshot = tiny_snapshot(4, names={0: "a0", 2: "b2"}, in_pods=[3])
    assert name_by_siblings(snapshot.by_address[vf(1)], snapshot) is None
    assert name_by_siblings(snapshot.by_address[vf(3)], tiny_snapshot(4, names={0: "a", 1: "a", 2: "a"})) is None
    made_up = tiny_snapshot(3, names={0: "vf00003b002", 1: "dev7", 2: "eth4"})
    assert name_by_siblings(made_up.by_address[vf(1)], made_up) is None


def test_an_adapter_is_known_by_its_card_wherever_it_is() -> None:
    then, now = tiny_snapshot(2), tiny_snapshot(2, boot_id="later", bus="5e")
    names = {identities(then)(device): device.address for device in then.devices}
    assert len(names) == 3
    assert {names[name]: address for name, address in addresses(now).items()} == {
        device.address: device.address.replace("3b:", "5e:") for device in then.devices
    }
