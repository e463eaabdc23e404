"""Files of the replaced plugins that outlived what they tell of: an owner, a device, a boot, a program."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from cni.migrate.adoption import Adopted
from tests.cni.old_plugins import CONTAINER, PLUGIN, OldSriov, adopt, but_up, host_name
from tests.cni.tiny_node import PF, PF_NETDEV, Rig, vf
from tests.waiting import until


def test_a_file_of_a_former_owner_is_not_taken_for_the_present_ones(rig: Rig, old: OldSriov) -> None:
    """The present owner found what the former one left as it was; all is put back once both have gone."""
    before = rig.found()
    pod = rig.pod()
    old.add(pod)
    document = json.loads(old.file().read_text())
    former = old.write("a" * 64, "net1", document)
    os.utime(former, (1, 1))
    left = {"Trust": True, "SpoofChk": False, "Vlan": 100, "VlanQoS": 3, "VlanProto": 0x88A8, "MaxTxRate": 500}
    old.write(CONTAINER, "net1", document | {"OrigVfState": document["OrigVfState"] | left})
    assert adopt(rig) == Adopted(devices=(vf(0),), waiting=(str(former),))
    rig.delete("a" * 64, pod)
    assert rig.in_pod(pod) is not None
    rig.delete(CONTAINER, pod)
    rig.await_back()
    assert adopt(rig) == Adopted(devices=(vf(0),))
    assert rig.attachments.heal(vf(0)) == "owner-gone"
    assert but_up(rig.found()) == but_up(before)
    assert adopt(rig) == Adopted()


def test_what_the_pf_enforced_is_not_put_back_on_another_vf(rig: Rig, old: OldSriov) -> None:
    """After a reboot the PF may number its VFs otherwise."""
    pod = rig.pod()
    old.add(pod)
    document = json.loads(old.file().read_text())
    old.write(CONTAINER, "net1", document | {"VFID": 2})
    adopt(rig)
    (row,) = rig.ledger.attachments()
    assert (row.undo.vf_index, row.undo.settings.is_empty) == (None, True)


def test_a_device_that_is_gone_leaves_nothing_behind(rig: Rig, old: OldSriov) -> None:
    old.write(CONTAINER, "net1", {**PLUGIN, "deviceID": "0000:ff:00.1", "VFID": 0})
    adopt(rig)
    assert rig.attachments.heal("0000:ff:00.1") == "owner-gone"
    assert rig.ledger.attachments() == ()
    assert not old.file().exists()


def test_an_adapter_that_is_no_vf_is_not_touched_for_an_old_file(rig: Rig, old: OldSriov) -> None:
    """Addresses are renumbered, and files stay: the node may live by what has the address now."""
    subprocess.run(["ip", "link", "set", PF_NETDEV, "up"], check=True)
    before = rig.machine.find_netdev(PF)
    was = {"HostIFName": "gone1", "EffectiveMAC": "02:00:00:00:00:99", "MTU": 1400}
    old.write(CONTAINER, "net1", {**PLUGIN, "deviceID": PF, "VFID": 0, "OrigVfState": was})
    assert adopt(rig).devices == (PF,)
    assert rig.attachments.heal(PF) == "rebooted"
    after = rig.machine.find_netdev(PF)
    assert before is not None
    assert after is not None
    assert (after.name, after.mac, after.mtu, after.up) == (before.name, before.mac, before.mtu, True)
    assert rig.ledger.attachments() == ()
    assert not old.file().exists()


def test_a_file_of_an_earlier_boot_touches_no_vf_of_this_one(rig: Rig, old: OldSriov) -> None:
    """Its addresses are given back. What the VF has now it has from this boot."""
    pod = rig.pod()
    conf = {**PLUGIN, "ipam": rig.ipam()}
    old.lease(pod, conf)
    (rig.machine.root / "proc/stat").write_text("cpu 1 2 3\nbtime 1700000000\n")
    subprocess.run(["ip", "link", "set", host_name(), "up"], check=True)
    before = rig.found()
    was = {"HostIFName": "former1", "EffectiveMAC": "02:00:00:00:00:99", "MTU": 1400, "VlanProto": 0x8100}
    document = {**PLUGIN, "deviceID": vf(0), "VFID": 0, "Master": PF_NETDEV, "OrigVfState": was}
    file = old.write(CONTAINER, "net1", {**document, "ipam": {"type": "host-local"}})
    old.remember_call(conf, {"cniVersion": "1.0.0"})
    os.utime(file, (1690000000, 1690000000))
    old.write_path(0, "/run/netns/gone")
    assert adopt(rig).devices == (vf(0),)
    assert rig.attachments.heal(vf(0)) == "rebooted"
    assert rig.found() == before
    rig.attachments.leases.settle()
    assert rig.leases() == []
    assert adopt(rig) == Adopted()


def test_a_pod_that_lives_is_of_this_boot_whatever_the_clock_said(rig: Rig, old: OldSriov) -> None:
    (rig.machine.root / "proc/stat").write_text("btime 1700000000\n")
    pod = rig.pod()
    old.add(pod)
    os.utime(old.file(), (1, 1))
    assert adopt(rig).devices == (vf(0),)
    assert rig.attachments.heal(vf(0)) is None
    assert rig.in_pod(pod) is not None


KILLED = """
import os, sys
from pathlib import Path
from tests.cni import tiny_node
steps = int(sys.argv[2])
def count(event, arguments):
    global steps
    if event in ("open", "os.remove", "fcntl.flock", "sqlite3.connect", "os.scandir", "os.mkdir"):
        steps -= 1
        if steps < 0:
            os.kill(os.getpid(), 9)
with tiny_node.open_rig(Path(sys.argv[1])) as rig:
    sys.addaudithook(count)
    rig.attachments.adopter.adopt()
    for row in rig.ledger.attachments():
        rig.attachments.heal(row.device)
"""


def test_a_kill_at_any_file_is_mended_by_the_next_start(rig: Rig, old: OldSriov) -> None:
    """Two attachments, one of whose pods is gone: adopted and cleaned up after in one go, killed at each file."""
    pod = rig.pod()
    before = rig.found(1)
    old.add(pod)
    for steps in range(0, 200, 3):
        gone = rig.pod(f"gone{steps}")
        old.add(gone, "c1", index=1)
        rig.remove(gone)
        until(lambda: rig.machine.find_netdev(vf(1)) is not None)
        done = subprocess.run([sys.executable, "-c", KILLED, str(rig.folder), str(steps)], check=False)
        rig.restart()
        adopt(rig)
        rig.attachments.heal(vf(1))
        assert but_up(rig.found(1)) == but_up(before)
        assert not old.file("c1").exists()
        assert [row.device for row in rig.ledger.attachments()] == [vf(0)]
        assert rig.in_pod(pod) is not None
        if done.returncode == 0:
            assert steps > 5
            return
    pytest.fail("it never came to its end")
