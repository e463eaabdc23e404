"""VFs that lost their rows with the books: found in pods, found under strange names, on real namespaces."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.errors import DeviceBusy, InUse
from agent.hardware import netns as namespaces
from agent.model.allocation import AttachmentState, PodRef, VfSettings
from agent.model.vf_identity import KnownDevice
from cni.call import Node
from cni.found_vfs import UNKNOWN, Finder
from cni.heal import ReleaseRequest
from cni.pod_devices import HeldDevices
from tests.cni import tiny_node
from tests.cni.networks import network
from tests.cni.stand_ins import FixedDevices
from tests.cni.tiny_node import Rig, mac_of, netdev, open_rig, vf
from tests.live import Live
from tests.node import claimed_vf, prepare
from tests.waiting import until

ASKED: dict[str, Any] = {"mac": "02:00:00:00:00:77", "mtu": 1400, "vlan": 100, "trust": "on", "spoofchk": "off"}
POD = PodRef("default", "trainer")


@pytest.fixture
def lost(own_network: None, tmp_path: Path) -> Iterator[Rig]:
    """Open the node again after its books were lost. The pod `pod` holds the first VF."""
    with open_rig(tmp_path) as rig:
        before = rig.found()
        rig.add("c1", rig.pod(), ipam=rig.ipam(), **ASKED)
    for file in tmp_path.glob("ledger.db*"):
        file.unlink()
    with open_rig(tmp_path) as rig:
        rig.before = before  # type: ignore[attr-defined]
        yield rig


def finder(rig: Rig, held: HeldDevices | None = None) -> Finder:
    node = Node(rig.machine, rig.ledger, Live(rig.machine.scan))
    node.locks = rig.attachments._node.locks
    return Finder(
        node,
        held or FixedDevices(),
        netns_folders=(rig.folder,),
        processes=rig.folder / "no-proc",
    )


def known(index: int, boot_id: str = "boot") -> KnownDevice:
    return KnownDevice(vf(index), "", netdev(index), mac_of(index), 1500, boot_id)


def test_a_vf_in_a_pod_gets_a_row_again_and_is_cleaned_when_the_pod_ends(lost: Rig) -> None:
    lost.ledger.know([known(0)])
    assert finder(lost).in_namespaces([vf(0)], {vf(0): POD}, {("default", "trainer"): "c1"}) == (vf(0),)
    (row,) = lost.ledger.attachments()
    assert (row.state, row.owner.pod, row.owner.container_id) == (AttachmentState.ATTACHED, POD, "c1")
    assert (row.owner.cni_ifname, row.ifname) == ("net1", "net1")
    # It is not given to anybody else, nor taken from the pod.
    with pytest.raises(DeviceBusy, match="still held by pod default/trainer"):
        lost.add("c2", lost.pod("two"))
    assert lost.attachments.heal(vf(0)) is None
    assert finder(lost).in_namespaces([vf(0)], {}, {}) == ()
    lost.remove(lost.folder / "pod.netns")
    until(lambda: lost.attachments.heal(vf(0)) == "owner-gone")
    assert lost.found() == lost.before  # type: ignore[attr-defined]
    assert lost.ledger.attachments() == ()


def test_a_vf_of_a_claim_is_found_as_what_the_claim_has_brought(lost: Rig) -> None:
    prepare(lost.ledger, "nics", claimed_vf(vf(0)))
    finder(lost).in_namespaces([vf(0)], {vf(0): POD}, {("default", "trainer"): "c1"})
    (row,) = lost.ledger.attachments()
    assert (row.device, row.resource_name, row.claim_uid) == (vf(0), "rdma/vf", "uid-nics")


def test_without_any_memory_what_can_be_seen_is_restored(lost: Rig) -> None:
    """Its own MAC address nobody knows any more; all that a neighbour has not is taken off."""
    lost.machine.vf_control.apply("ens1f0", 1, VfSettings(spoofchk=False))  # as this driver has it, say
    assert finder(lost).in_namespaces([vf(0)], {}, {}) == (vf(0),)
    (row,) = lost.ledger.attachments()
    assert (row.owner.container_id, row.owner.pod) == (UNKNOWN, PodRef("", ""))
    assert row.undo.netdev == netdev(0)
    lost.remove(lost.folder / "pod.netns")
    until(lambda: lost.attachments.heal(vf(0)) == "owner-gone")
    name, _, mtu, up, settings = lost.found()
    assert (name, mtu, up) == (netdev(0), 1500, False)  # as large as its neighbours'
    neighbour = lost.settings(1)
    assert (settings.vlan, settings.trust, settings.spoofchk) == (neighbour.vlan, neighbour.trust, neighbour.spoofchk)


def test_what_is_found_nowhere_gets_no_row(lost: Rig) -> None:
    assert finder(lost).in_namespaces([vf(1), "0000:99:00.1"], {}, {}) == ()
    lost.unplug()
    assert finder(lost).in_namespaces([vf(0)], {}, {}) == ()
    assert lost.ledger.attachments() == ()


def test_gc_and_the_calls_of_others_do_not_meet_what_was_found(lost: Rig) -> None:
    finder(lost).in_namespaces([vf(0)], {}, {})
    lost.collect(name="rails")
    lost.delete("c9", lost.pod("two"))
    assert [row.state for row in lost.ledger.attachments()] == [AttachmentState.ATTACHED]


def test_a_namespace_that_cannot_be_searched_keeps_no_other_from_it(lost: Rig) -> None:
    (lost.folder / "aaa").touch()
    (lost.folder / "dangling").symlink_to("/nowhere")
    assert finder(lost).in_namespaces([vf(0)], {}, {}) == (vf(0),)


def test_a_vf_that_came_back_under_a_pods_name_is_put_back(lost: Rig) -> None:
    lost.remove(lost.folder / "pod.netns")
    until(lambda: lost.machine.find_netdev(vf(0)) is not None)
    subprocess.run(["ip", "link", "set", lost.machine.find_netdev(vf(0)).name, "name", "net1"], check=True)  # type: ignore[union-attr]
    assert finder(lost).under_a_strange_name(vf(0), known(0))
    (row,) = lost.ledger.attachments()
    assert row.state is AttachmentState.DETACHING
    assert lost.attachments.heal(vf(0)) == "half-detaching"
    assert lost.found() == lost.before  # type: ignore[attr-defined]
    assert not finder(lost).under_a_strange_name(vf(0), known(0))
    assert lost.ledger.attachments() == ()


def test_a_vf_that_is_up_in_the_host_has_the_name_that_somebody_chose(rig: Rig) -> None:
    """An administrator may call his VFs net1 too; all witnesses are then against him."""
    link = netdev(0)
    subprocess.run(["ip", "link", "set", link, "name", "net1"], check=True)
    subprocess.run(["ip", "link", "set", "net1", "up"], check=True)
    assert not finder(rig).under_a_strange_name(vf(0), known(0))
    assert rig.ledger.attachments() == ()


def test_a_vf_under_its_own_name_or_with_a_row_is_left_alone(rig: Rig) -> None:
    assert not finder(rig).under_a_strange_name(vf(0), known(0))
    pod = rig.pod()
    rig.add("c1", pod)
    assert not finder(rig).under_a_strange_name(vf(0), known(0))
    assert finder(rig).in_namespaces([vf(0)], {}, {}) == ()
    assert len(rig.ledger.attachments()) == 1


def test_living_namespaces_are_found_by_folder_and_by_process(own_network: None, tmp_path: Path) -> None:
    bound, own = tiny_node.make_pod(tmp_path / "bound"), namespaces.own()
    (tmp_path / "file").touch()
    with subprocess.Popen(["unshare", "--net", "sleep", "100"]) as process:
        path = f"/proc/{process.pid}/ns/net"
        until(lambda: os.stat(path).st_ino != own.inode)
        found = namespaces.living([tmp_path, tmp_path / "missing"])
        by_inode = {netns.inode: path for netns, path in found.items()}
        assert by_inode[bound.stat().st_ino] == bound
        assert os.stat(path).st_ino in by_inode
        assert own not in found
        assert namespaces.living([tmp_path], tmp_path, limit=0) == {}
        process.kill()


def test_a_known_containers_leases_are_returned_without_any_del(lost: Rig) -> None:
    joined = network({"name": "rails", "ipam": lost.ipam()})
    finding = finder(lost, held=FixedDevices(networks={"rdma/vf": joined}))
    names = {("default", "trainer"): "c1"}
    assert finding.in_namespaces([vf(0)], {vf(0): POD}, names, {vf(0): "rdma/vf"}) == (vf(0),)
    lost.remove(lost.folder / "pod.netns")
    until(lambda: lost.attachments.heal(vf(0)) == "owner-gone")
    assert lost.leases() == []


def test_what_an_administrator_moved_by_hand_is_free_once_it_is_brought_back(rig: Rig) -> None:
    elsewhere, before = rig.pod("by-hand"), rig.found()
    subprocess.run(["ip", "link", "set", netdev(0), "netns", str(elsewhere)], check=True)
    rig.ledger.know([known(0)])
    assert finder(rig).in_namespaces([vf(0)], {}, {}) == (vf(0),)
    assert rig.attachments.heal(vf(0)) is None
    with pytest.raises(InUse, match=rf"nsenter --net={elsewhere} ip link set {netdev(0)} netns 1"):
        rig.attachments.release(ReleaseRequest(vf(0), "it is mine"), lambda row: False)
    with open("/proc/thread-self/ns/net") as host:
        path = f"/proc/{os.getpid()}/fd/{host.fileno()}"
        rig.run_in(elsewhere, "ip", "link", "set", netdev(0), "netns", path)
    assert rig.attachments.heal(vf(0)) == "brought-back"
    assert (rig.found(), rig.ledger.attachments(), rig.ledger.quarantines()) == (before, (), ())


def test_what_a_known_pod_lost_stays_its_own(lost: Rig) -> None:
    """kubelet counts the device to that pod, and will give it to no other."""
    assert finder(lost).in_namespaces([vf(0)], {vf(0): POD}, {}) == (vf(0),)
    with open("/proc/thread-self/ns/net") as host:
        path = f"/proc/{os.getpid()}/fd/{host.fileno()}"
        lost.run_in(lost.folder / "pod.netns", "ip", "link", "set", "net1", "netns", path)
    assert lost.attachments.heal(vf(0)) is None
    assert len(lost.ledger.attachments()) == 1
