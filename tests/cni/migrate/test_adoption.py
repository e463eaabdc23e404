"""Attachments of the replaced plugins, adopted: on real links and namespaces, with the plugins' own files."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from agent.errors import LedgerError
from agent.hardware import netns as namespaces
from agent.model.allocation import AttachmentState, Owner, PodRef
from agent.state import Latest
from cni.call import Node
from cni.migrate import sriov_state
from cni.migrate.adoption import Adopter
from tests.cni.modes import rdma_node
from tests.cni.modes.guids import state
from tests.cni.old_plugins import CONTAINER, PLUGIN, SETTINGS, OldSriov, adopt, but_up, host_name
from tests.cni.tiny_node import PF, PF_NETDEV, Rig, mac_of, netdev, vf
from tests.waiting import until


def adopt_by_search(rig: Rig) -> tuple[str, ...]:
    """Adopt, searching the pods' namespaces: ib-sriov never wrote where they are."""
    node = Node(rig.machine, rig.ledger, Latest(rig.machine.scan()))
    return Adopter(node, netns_folders=(rig.folder,)).adopt()


@pytest.mark.parametrize("conf", [{}, {k: v for k, v in PLUGIN.items() if k not in ("cniVersion", "name")}])
def test_an_attachment_gets_a_row_and_the_pods_del_through_the_new_program_brings_all_back(
    rig: Rig, old: OldSriov, conf: dict[str, Any]
) -> None:
    before = rig.found()
    pod = rig.pod()
    old.add(pod)
    assert adopt(rig) == (vf(0),)
    (row,) = rig.ledger.attachments()
    with open(pod) as file:
        netns = namespaces.identity(file.fileno())
    assert row.owner == Owner(CONTAINER, "net1", PodRef("", ""), netns)
    assert (row.state, row.ifname, row.netns_path) == (AttachmentState.ATTACHED, "net1", str(pod))
    assert rig.settings() == replace(rig.settings(1), **SETTINGS.document())
    assert rig.attachments.heal(vf(0)) is None
    assert rig.in_pod(pod) is not None
    rig.detach(CONTAINER, pod, **conf)
    assert but_up(rig.found()) == but_up(before)
    assert not old.file().exists()
    assert not (old.state / "sriov/pci" / vf(0)).exists()
    assert adopt(rig) == ()


def test_a_del_brings_home_what_an_old_program_attached_after_our_start(rig: Rig, old: OldSriov) -> None:
    before = rig.found()
    assert adopt(rig) == ()
    assert not rig.attachments.adopter.is_due
    pod = rig.pod()
    old.add(pod)
    rig.detach(CONTAINER, pod, **PLUGIN)
    assert but_up(rig.found()) == but_up(before)
    assert not old.file().exists()


def test_a_del_that_comes_while_an_old_program_is_at_work_is_made_up_for(rig: Rig, old: OldSriov) -> None:
    adopt(rig)
    pod = rig.pod()
    old.add(pod)
    lock = sriov_state.lock_of(old.state, old.run, "sriov", vf(0))
    lock.parent.mkdir(parents=True)
    descriptor = os.open(lock, os.O_RDONLY | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    rig.delete(CONTAINER, pod)
    assert rig.ledger.attachments() == ()
    assert rig.attachments.adopter.is_due  # the reconciler asks again
    os.close(descriptor)
    assert adopt(rig) == (vf(0),)
    assert not rig.attachments.adopter.is_due


def test_what_could_not_be_written_down_is_adopted_later(
    rig: Rig, old: OldSriov, monkeypatch: pytest.MonkeyPatch
) -> None:
    old.add(rig.pod())
    with monkeypatch.context() as patch:
        patch.setattr(rig.ledger, "adopt", Mock(side_effect=LedgerError("disk full")))
        with pytest.raises(LedgerError):
            adopt(rig)
    assert rig.attachments.adopter.is_due
    assert adopt(rig) == (vf(0),)
    assert not rig.attachments.adopter.is_due


def test_a_path_that_leads_to_another_pod_now_is_not_believed(rig: Rig, old: OldSriov) -> None:
    pod = rig.pod()
    old.add(pod)
    other = rig.pod("other")
    old.write_path(0, str(other))
    assert adopt_by_search(rig) == (vf(0),)
    assert rig.ledger.attachments()[0].netns_path == str(pod)
    rig.detach(CONTAINER, pod)
    assert not (old.state / "sriov/pci" / vf(0)).exists()


def test_a_path_that_was_written_for_a_new_owner_stays(rig: Rig, old: OldSriov) -> None:
    pod = rig.pod()
    old.add(pod)
    adopt(rig)
    file = old.write_path(0, "/run/netns/another")
    rig.detach(CONTAINER, pod)
    assert file.read_text() == "/run/netns/another"


def test_the_call_that_libcni_remembers_completes_the_row(rig: Rig, old: OldSriov) -> None:
    pod = rig.pod()
    ipam = rig.ipam()
    old.add(pod, ipam=ipam)
    result = {
        "cniVersion": "0.4.0",
        "interfaces": [{"name": "net1", "sandbox": str(pod)}],
        "ips": [{"version": "4", "address": "10.9.0.2/24", "interface": 0}],
    }
    old.remember_call({**PLUGIN, "ipam": ipam}, result, folder="multus/results")
    adopt(rig)
    (row,) = rig.ledger.attachments()
    assert row.owner.pod == PodRef("ns", "pod", "uid")
    assert row.request["network"]["ipam"] == ipam
    assert row.request["cni_args"] == "IgnoreUnknown=1;K8S_POD_NAMESPACE=ns;K8S_POD_NAME=pod;K8S_POD_UID=uid"
    assert row.result is not None
    assert row.result["ips"] == [{"address": "10.9.0.2/24", "interface": 0}]


@pytest.mark.parametrize("remembered", [True, False])
def test_the_addresses_of_an_adopted_pod_are_given_back(rig: Rig, old: OldSriov, remembered: bool) -> None:
    """Either libcni remembers the IPAM section, or the runtime's DEL brings it."""
    pod = rig.pod()
    conf = {**PLUGIN, "ipam": rig.ipam()}
    old.lease(pod, conf)
    assert len(rig.leases()) == 2
    old.add(pod, ipam=rig.ipam())
    if remembered:
        old.remember_call(conf, {"cniVersion": "1.0.0"})
    adopt(rig)
    rig.detach(CONTAINER, pod, **({} if remembered else {k: conf[k] for k in ("type", "ipam", "deviceID")}))
    until(lambda: rig.leases() == [])


def opened(file: Path) -> int:
    """Count how often this process has a file open."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            count += link.readlink() == file
    return count


def test_the_lock_is_held_while_an_adopted_device_is_brought_back(rig: Rig, old: OldSriov) -> None:
    pod = rig.pod()
    old.add(pod)
    adopt(rig)
    lock = sriov_state.lock_of(old.state, old.run, "sriov", vf(0))
    descriptor = os.open(lock, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    rig.delete(CONTAINER, pod)
    until(lambda: opened(lock) == 2)  # the other one waits for it
    assert rig.in_pod(pod) is not None
    os.close(descriptor)
    rig.await_back()
    assert not old.file().exists()


def test_a_device_that_is_ours_already_is_left_alone(rig: Rig, old: OldSriov) -> None:
    pod = rig.pod()
    rig.add("c9", pod)
    before = rig.ledger.attachments()
    old.write(CONTAINER, "net1", PLUGIN)
    assert adopt(rig) == ()
    assert rig.attachments.adopter.is_due
    assert rig.ledger.attachments() == before


def test_a_device_for_programs_is_adopted_by_the_path_alone(rig: Rig, old: OldSriov) -> None:
    pod = rig.pod()
    document = {**PLUGIN, "DPDKMode": True, "Master": "ens1f0", "VFID": 0, "OrigVfState": {"Trust": False}}
    old.write(CONTAINER, "net1", document)
    old.write_path(0, str(pod))
    adopt(rig)
    (row,) = rig.ledger.attachments()
    assert (row.undo.mode, row.undo.netdev, row.undo.settings.trust) == ("vfio", "", False)
    assert rig.attachments.heal(vf(0)) is None


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
    assert adopt(rig) == (vf(0),)
    assert rig.attachments.adopter.is_due
    rig.delete("a" * 64, pod)
    assert rig.in_pod(pod) is not None
    rig.detach(CONTAINER, pod)
    assert adopt(rig) == (vf(0),)
    assert rig.attachments.heal(vf(0)) == "owner-gone"
    assert but_up(rig.found()) == but_up(before)
    assert adopt(rig) == ()


def test_what_the_pf_enforced_is_not_put_back_on_another_vf(rig: Rig, old: OldSriov) -> None:
    """After a reboot the PF may number its VFs otherwise."""
    pod = rig.pod()
    old.add(pod)
    document = json.loads(old.file().read_text())
    old.write(CONTAINER, "net1", document | {"VFID": 2})
    adopt(rig)
    (row,) = rig.ledger.attachments()
    assert (row.undo.vf_index, row.undo.settings.is_empty) == (None, True)


def test_an_adapter_that_is_no_vf_is_not_touched_for_an_old_file(rig: Rig, old: OldSriov) -> None:
    """Addresses are renumbered, and files stay: the node may live by what has the address now."""
    subprocess.run(["ip", "link", "set", PF_NETDEV, "up"], check=True)
    before = rig.machine.find_netdev(PF)
    was = {"HostIFName": "gone1", "EffectiveMAC": "02:00:00:00:00:99", "MTU": 1400}
    old.write(CONTAINER, "net1", {**PLUGIN, "deviceID": PF, "VFID": 0, "OrigVfState": was})
    assert adopt(rig) == (PF,)
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
    assert adopt(rig) == (vf(0),)
    assert rig.attachments.heal(vf(0)) == "rebooted"
    assert rig.found() == before
    rig.attachments.leases.settle()
    assert rig.leases() == []
    assert adopt(rig) == ()


KILLED = """
import os, sys
from pathlib import Path
from cni.migrate import sriov_state
from tests.cni import tiny_node
steps = int(sys.argv[2])
def count(event, arguments):
    global steps
    if event in ("open", "os.remove", "fcntl.flock", "sqlite3.connect", "os.scandir", "os.mkdir"):
        steps -= 1
        if steps < 0:
            os.kill(os.getpid(), 9)
for model in (sriov_state._Written, sriov_state._Rdma, sriov_state._Cache):
    sriov_state._adapter(model)  # which opens modules of pydantic's
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
    for steps in range(0, 200, 9):
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


GARBAGE: dict[str, Callable[[Path], object]] = {
    "no JSON": lambda file: file.write_bytes(b"{"),
    "no device": lambda file: file.write_text('{"name": "x"}'),
    "a bad device": lambda file: file.write_text('{"deviceID": "../../etc"}'),
    "a bad setting": lambda file: file.write_text(
        json.dumps({**PLUGIN, "deviceID": vf(1), "OrigVfState": {"Vlan": "x"}})
    ),
    "huge": lambda file: file.write_bytes(b" " * (2 << 20)),
    "a link": lambda file: file.symlink_to("/etc/passwd"),
    "a pipe": lambda file: os.mkfifo(file),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_is_told_of_once_and_left(rig: Rig, old: OldSriov, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    file = old.file("c1")
    file.parent.mkdir(parents=True)
    GARBAGE[kind](file)
    old.add(rig.pod())
    assert adopt(rig) == (vf(0),)
    assert adopt(rig) == ()
    assert file.is_symlink() or file.exists()
    assert len([r for r in caplog.records if "adopted by nobody" in r.getMessage()]) == 1


def test_a_name_that_is_no_container_and_interface_is_garbage(rig: Rig, old: OldSriov) -> None:
    file = old.state / "sriov" / "nodash"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(PLUGIN))
    assert adopt(rig) == ()


@pytest.mark.parametrize(
    ("container_id", "ifname"), [(CONTAINER, "net-1"), (CONTAINER, "net1"), ("cnitool-77", "eth0"), ("a-b-c", "net1")]
)
def test_dashes_in_a_files_name_do_not_confuse(rig: Rig, old: OldSriov, container_id: str, ifname: str) -> None:
    file = old.write(container_id, ifname, PLUGIN)
    record = sriov_state.read(old.state, "sriov", file)
    assert (record.container_id, record.ifname) == (container_id, ifname)


def test_keys_in_any_case_and_a_strange_version_are_read(rig: Rig, old: OldSriov) -> None:
    document = {k.upper(): v for k, v in PLUGIN.items()} | {"CNIVERSION": "0.2.0", "ORIGVFSTATE": {"HOSTIFNAME": "x"}}
    record = sriov_state.read(old.state, "sriov", old.write(CONTAINER, "net1", document))
    assert (record.device, record.netdev, record.conf.settings.vlan) == (vf(0), "x", 100)


# -------------------------------------------------------------------------------- InfiniBand VFs and RDMA devices


GUID = "02:00:00:00:00:00:00:01"


def forget(rig: Rig) -> None:
    """Leave the hardware as it is, and no row of it."""
    for row in rig.ledger.attachments():
        rig.ledger.finish_detach(row)


def rdma_state(container: str) -> dict[str, Any]:
    names = {"sandboxRdmaDevName": rdma_node.rdma_name(0), "containerRdmaDevName": container}
    return {"version": "1.0", "deviceID": vf(0), **names}


@pytest.mark.parametrize("moved", [True, False])
def test_an_infiniband_vf_is_brought_back_with_its_former_guid(infiniband: Rig, moved: bool) -> None:
    rig, old = infiniband, OldSriov(infiniband)
    before = state(rig)
    pod = rig.pod()
    rig.add(CONTAINER, pod, guid=GUID, link_state="enable", rdma=None if moved else False)
    forget(rig)
    document = {
        "cniVersion": "0.3.1",
        "name": "ib",
        "type": "ib-sriov",
        "deviceID": vf(0),
        "link_state": "enable",
        "Master": PF_NETDEV,
        "VFID": 0,
        "HostIFNames": netdev(0),
        "ContIFNames": "net1",
        "HostIFGUID": "00:00:00:00:00:00:00:00",
        "rdmaIsolation": moved,
        "pkey": "0x1",
        "ipam": {},
        "runtimeConfig": {"infinibandGUID": GUID},
        "RdmaNetState": rdma_state(rdma_node.rdma_name(0)) if moved else {},
    }
    file = old.write(CONTAINER, "net1", document, kind="ib-sriov")
    assert adopt_by_search(rig) == (vf(0),)
    assert (old.run / "ib-sriov/cni.lock").exists()
    (row,) = rig.ledger.attachments()
    assert (row.undo.mode, row.undo.rdma, row.netns_path) == (
        "infiniband",
        rdma_node.rdma_name(0) if moved else None,
        str(pod),
    )
    assert rig.attachments.heal(vf(0)) is None
    rig.detach(CONTAINER, pod)
    assert all_but_up(state(rig)) == all_but_up(before)
    assert rig.ledger.quarantines() == ()
    assert not file.exists()


def test_the_state_of_the_chained_rdma_plugin_is_joined(exclusive: Rig) -> None:
    rig, old = exclusive, OldSriov(exclusive)
    pod = rig.pod()
    rig.add(CONTAINER, pod)
    forget(rig)
    document = {
        "cniVersion": "0.3.1",
        "name": "rails",
        "type": "sriov",
        "deviceID": vf(0),
        "Master": PF_NETDEV,
        "VFID": 0,
        "OrigVfState": {"HostIFName": netdev(0), "EffectiveMAC": mac_of(0), "MTU": 1500},
    }
    old.write(CONTAINER, "net1", document)
    old.write_path(0, str(pod))
    file = old.write(f"rails-{CONTAINER}", "net1", rdma_state(rdma_node.rdma_name(0)), kind="rdma")
    assert adopt_by_search(rig) == (vf(0),)
    (row,) = rig.ledger.attachments()
    assert row.undo.rdma == rdma_node.rdma_name(0)
    rig.detach(CONTAINER, pod)
    found = rig.machine.find_rdma(vf(0))
    assert found is not None
    assert found.name == rdma_node.rdma_name(0)
    assert not file.exists()


def all_but_up(found: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*found[:2], *found[3:])
