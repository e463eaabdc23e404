"""Attachments of the replaced plugins, adopted: on real links and namespaces, with the plugins' own files."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.hardware import netns as namespaces
from agent.ledger import Ledger
from agent.model.allocation import AttachmentState, Owner, PodRef
from cni.migrate import sriov_state
from cni.migrate.adoption import Adopted, Adopter
from cni.node import Node
from tests.cni.old_plugins import CONTAINER, PLUGIN, SETTINGS, OldSriov, adopt, but_up, host_name
from tests.cni.tiny_node import Rig, vf
from tests.live import Live
from tests.waiting import until


def test_a_node_without_replaced_plugins_has_nothing_to_adopt(rig: Rig) -> None:
    assert adopt(rig) == Adopted()


def test_an_attachment_gets_a_row_and_the_pod_keeps_its_device(rig: Rig, old: OldSriov) -> None:
    pod = rig.pod()
    old.add(pod)
    assert adopt(rig) == Adopted(devices=(vf(0),))
    (row,) = rig.ledger.attachments()
    with open(pod) as file:
        netns = namespaces.identity(file.fileno())
    assert row.owner == Owner(CONTAINER, "net1", PodRef("", ""), netns)
    assert (row.state, row.ifname, row.netns_path) == (AttachmentState.ATTACHED, "net1", str(pod))
    assert rig.settings() == replace(rig.settings(1), **SETTINGS.document())
    assert rig.attachments.heal(vf(0)) is None
    assert rig.in_pod(pod) is not None


def test_adopting_again_changes_nothing(rig: Rig, old: OldSriov) -> None:
    old.add(rig.pod())
    adopt(rig)
    before = rig.ledger.attachments()
    assert adopt(rig) == Adopted()
    assert rig.ledger.attachments() == before


@pytest.mark.parametrize("conf", [{}, {k: v for k, v in PLUGIN.items() if k not in ("cniVersion", "name")}])
def test_the_pods_del_through_the_new_program_brings_all_back(rig: Rig, old: OldSriov, conf: dict[str, Any]) -> None:
    before = rig.found()
    pod = rig.pod()
    old.add(pod)
    adopt(rig)
    with rig.call(CONTAINER, pod, conf) as call:
        rig.attachments.delete(call)
    rig.await_back()
    assert but_up(rig.found()) == but_up(before)
    assert not old.file().exists()
    assert not (old.state / "sriov/pci" / vf(0)).exists()
    assert adopt(rig) == Adopted()


def test_a_del_brings_home_what_an_old_program_attached_after_our_start(rig: Rig, old: OldSriov) -> None:
    before = rig.found()
    assert adopt(rig) == Adopted()
    assert not rig.attachments.adopter.is_due
    pod = rig.pod()
    old.add(pod)
    with rig.call(CONTAINER, pod, PLUGIN) as call:
        rig.attachments.delete(call)
    rig.await_back()
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
    assert adopt(rig).devices == (vf(0),)
    assert not rig.attachments.adopter.is_due


def test_a_del_of_another_container_looks_at_none_of_the_files(rig: Rig, old: OldSriov) -> None:
    adopt(rig)
    pod = rig.pod()
    old.add(pod)
    rig.delete("c9", pod)
    assert rig.ledger.attachments() == ()


def test_a_pod_that_died_unseen_is_cleaned_up_after(rig: Rig, old: OldSriov) -> None:
    before = rig.found()
    pod = rig.pod()
    old.add(pod)
    rig.remove(pod)
    until(lambda: rig.machine.find_netdev(vf(0)) is not None)
    assert adopt(rig) == Adopted(devices=(vf(0),))
    assert rig.attachments.heal(vf(0)) == "owner-gone"
    assert but_up(rig.found()) == but_up(before)
    assert not old.file().exists()


def test_a_path_that_leads_to_another_pod_now_is_not_believed(rig: Rig, old: OldSriov) -> None:
    pod = rig.pod()
    old.add(pod)
    other = rig.pod("other")
    old.write_path(0, str(other))
    adopter = Adopter(
        Node(rig.machine, rig.ledger, Live(rig.machine.scan)),
        state=old.state,
        run=old.run,
        netns_folders=(rig.folder,),
    )
    assert adopter.adopt().devices == (vf(0),)
    assert rig.ledger.attachments()[0].netns_path == str(pod)
    rig.delete(CONTAINER, pod)
    rig.await_back()
    assert not (old.state / "sriov/pci" / vf(0)).exists()


def test_a_path_that_was_written_for_a_new_owner_stays(rig: Rig, old: OldSriov) -> None:
    pod = rig.pod()
    old.add(pod)
    adopt(rig)
    file = old.write_path(0, "/run/netns/another")
    rig.delete(CONTAINER, pod)
    rig.await_back()
    assert file.read_text() == "/run/netns/another"


def test_a_new_pod_gets_the_device_only_after_the_adopted_one(rig: Rig, old: OldSriov) -> None:
    pod = rig.pod()
    old.add(pod)
    adopt(rig)
    new = rig.pod("new")
    with pytest.raises(Exception, match=f"{vf(0)} is still held by"):
        rig.add("c2", new)
    rig.remove(pod)
    until(lambda: rig.machine.find_netdev(vf(0)) is not None)
    rig.add("c2", new)
    assert rig.in_pod(new) is not None
    assert not old.file().exists()


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
    with rig.call(CONTAINER, pod, {} if remembered else {k: conf[k] for k in ("type", "ipam", "deviceID")}) as call:
        rig.attachments.delete(call)
    rig.await_back()
    until(lambda: rig.leases() == [])


def test_a_device_that_an_old_program_works_on_waits(rig: Rig, old: OldSriov) -> None:
    old.add(rig.pod())
    lock = sriov_state.lock_of(old.state, old.run, "sriov", vf(0))
    lock.parent.mkdir(parents=True)
    descriptor = os.open(lock, os.O_RDONLY | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    found = adopt(rig)
    assert (found.devices, found.waiting) == ((), (str(old.file()),))
    os.close(descriptor)
    assert adopt(rig).devices == (vf(0),)


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
    assert adopt(rig) == Adopted(waiting=(str(old.file()),))
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


def test_what_a_corrupt_ledger_forgot_is_adopted_anew(rig: Rig, old: OldSriov, tmp_path: Path) -> None:
    old.add(rig.pod())
    adopt(rig)
    row = rig.ledger.attachments()[0]
    with_nothing = Ledger.open(tmp_path / "new.db", "boot")
    try:
        adopter = Adopter(
            Node(rig.machine, with_nothing, Live(rig.machine.scan)),
            state=old.state,
            run=old.run,
        )
        assert adopter.adopt().devices == (vf(0),)
        assert with_nothing.attachments()[0].undo == row.undo
    finally:
        with_nothing.close()


def test_the_name_in_the_host_is_the_one_before(rig: Rig, old: OldSriov) -> None:
    pod = rig.pod()
    old.add(pod)
    adopt(rig)
    rig.delete(CONTAINER, pod)
    rig.await_back()
    link = rig.machine.find_netdev(vf(0))
    assert link is not None
    assert link.name == host_name()
