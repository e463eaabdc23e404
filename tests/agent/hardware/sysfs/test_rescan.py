"""The small scan against the full one: after each step of a node's life, both must see the same."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agent.errors import HardwareError
from agent.hardware.sysfs.rdma import silent_changes
from agent.hardware.sysfs.scan import rescan, scan
from agent.model.change import NOTHING, Change, of_function, of_netdev
from tests import descriptors
from tests.agent.hardware.changing_node import FUNCTIONS, PFS, Node

VALUES: dict[Callable[[Node, str, str], Change], tuple[str, ...]] = {
    Node.set_carrier: ("0", "1"),
    Node.set_mtu: ("1500", "9000"),
    Node.set_port: ("1: DOWN", "4: ACTIVE"),
    Node.rename_netdev: ("eth0", "rail0", "rail1"),
    Node.swap_netdevs: ("",),
    Node.move_netdev: ("",),
    Node.move_rdma: ("",),
    Node.rename_rdma: ("mlx5_0", "mlx5_9"),
    Node.drop_char_devices: ("",),
    Node.add_char_device: ("",),
    Node.bind: ("", "mlx5_core", "vfio-pci"),
    Node.remove: ("",),
    Node.bring_back: ("0", "1", "3"),
    Node.break_attribute: ("",),
    Node.mend_attribute: ("",),
    Node.hide_identity: ("",),
    Node.add_foreign_netdev: ("1", "2"),
    Node.add_usb_netdev: ("",),
}


@st.composite
def steps(draw: Any) -> tuple[Callable[[Node, str, str], Change], str, str]:
    step = draw(st.sampled_from(list(VALUES)))
    return step, draw(st.sampled_from(FUNCTIONS)), draw(st.sampled_from(VALUES[step]))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(steps(), min_size=1, max_size=3), max_size=8))
@example([[(Node.remove, "0000:3b:00.3", ""), (Node.bring_back, "0000:3b:00.3", "0")]])
def test_small_scans_see_what_full_scans_see(
    tmp_path_factory: pytest.TempPathFactory, bursts: list[list[tuple[Callable[[Node, str, str], Change], str, str]]]
) -> None:
    root = tmp_path_factory.mktemp("node")
    try:
        node = Node(root)
        seen = scan(root)
        assert seen.devices
        for burst in bursts:
            change = NOTHING
            for step, address, value in burst:
                change |= step(node, address, value)
            seen = rescan(root, seen, change)
            assert seen == scan(root), [(step.__name__, address, value) for step, address, value in burst]
    finally:
        shutil.rmtree(root)


def test_what_did_not_change_stays_the_same_object(tmp_path: Path) -> None:
    node = Node(tmp_path)
    before = scan(tmp_path)
    after = rescan(tmp_path, before, node.set_carrier(PFS[0], "0"))
    same = [d.address for d in after.devices if before.by_address[d.address] is d]
    assert same == [address for address in sorted(before.by_address) if address != PFS[0]]
    assert after.by_address[PFS[0]].netdevs[0].carrier is False


def test_nothing_is_read_of_functions_that_no_event_named(tmp_path: Path) -> None:
    node = Node(tmp_path)
    before = scan(tmp_path)
    node.set_mtu(PFS[0], "9000")
    after = rescan(tmp_path, before, of_function(PFS[1]))
    assert after == before
    assert rescan(tmp_path, after, of_function(PFS[0])) == scan(tmp_path)


def test_a_vf_that_was_seen_before_it_was_linked_to_its_pf_is_one_of_its_pf(tmp_path: Path) -> None:
    """The last word of a kernel that binds no VFs itself (sriov_drivers_autoprobe) is about the PF."""
    Node(tmp_path)
    pf = (tmp_path / "sys/bus/pci/devices" / PFS[0]).resolve()
    index, vf = next((i, link.resolve()) for i in range(64) if (link := pf / f"virtfn{i}").is_symlink())
    links = [(folder / name, os.readlink(folder / name)) for folder, name in ((vf, "physfn"), (pf, f"virtfn{index}"))]
    for link, _ in links:
        link.unlink()
    early = scan(tmp_path)
    assert not early.by_address[vf.name].is_vf
    for link, target in links:
        link.symlink_to(target)
    assert rescan(tmp_path, early, of_function(PFS[0], bus=True)) == scan(tmp_path)


def test_a_port_of_infiniband_that_changed_without_a_word_is_found(tmp_path: Path) -> None:
    node = Node(tmp_path)
    before = scan(tmp_path)
    assert silent_changes(tmp_path, before) == NOTHING
    for function in (PFS[1], "0000:3b:00.4"):  # a VF's own port does not count
        node.set_port(function, "1: DOWN")
    change = silent_changes(tmp_path, before)
    assert change == of_function(PFS[1])
    assert silent_changes(tmp_path, rescan(tmp_path, before, change)) == NOTHING


def test_a_port_of_roce_that_follows_its_bond_is_found(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for function in PFS:
        for entry in node.entries("infiniband", function):
            (entry / "ports/1/link_layer").write_text("Ethernet\n")
    (node.entries("net", PFS[1])[0] / "master").symlink_to("../bond0")
    (tmp_path / "sys/class/net/bond0").mkdir()
    before = scan(tmp_path)
    for function in PFS:  # events tell of the other one
        node.set_port(function, "1: DOWN")
    change = silent_changes(tmp_path, before)
    assert change == of_function(PFS[1])
    assert silent_changes(tmp_path, rescan(tmp_path, before, change)) == NOTHING


def test_names_that_are_no_text_become_some(tmp_path: Path) -> None:
    """A pod may call what it has anything, and that name comes back to the host with it."""
    node = Node(tmp_path)
    before = scan(tmp_path)
    changed = node.rename_netdev(FUNCTIONS[2], os.fsdecode(b"eth\xff"))
    for char in node.entries("infiniband_verbs", FUNCTIONS[2]):
        (char / "ibdev").write_bytes(b"mlx\xff\n")
    node._rename(node.entries("infiniband", FUNCTIONS[2])[0], os.fsdecode(b"mlx\xff"))
    found = scan(tmp_path)
    vf = found.by_address[FUNCTIONS[2]]
    assert [n.name for n in vf.netdevs] == ["eth\N{REPLACEMENT CHARACTER}"]
    assert [(r.name, r.absent) for r in vf.rdma_devices] == [("mlx\N{REPLACEMENT CHARACTER}", False)]
    assert rescan(tmp_path, before, changed) == found
    assert rescan(tmp_path, found, of_function(FUNCTIONS[2])) == found


@pytest.mark.parametrize("change", [of_function(FUNCTIONS[2]), of_function(FUNCTIONS[2], bus=True), of_netdev("eth1")])
def test_who_has_no_descriptor_left_does_not_take_devices_for_gone(tmp_path: Path, change: Change) -> None:
    """A device in quarantine that is off the bus counts as reset, and goes to the next pod."""
    root = Node(tmp_path).root
    before = scan(root)
    with descriptors.none_left(), pytest.raises(HardwareError, match="cannot be read: Too many open files"):
        rescan(root, before, change)
    assert rescan(root, before, change) == before
