"""VFs that programs drive: no interface, the PF's settings only, and a row that says whose they are."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.errors import AttachmentError, DeviceBusy, HardwareError, RequestInvalid
from agent.model.allocation import VfSettings
from cni import netconf
from cni.modes import choice
from tests.cni import tiny_node
from tests.cni.tiny_node import Rig, open_rig, vf
from tests.waiting import until

ASKED: dict[str, Any] = {"vlan": 100, "trust": "on", "mac": "02:00:00:00:00:77", "max_tx_rate": 200}


def bind(rig: Rig, driver: str | None, index: int = 0) -> None:
    """Bind a VF to another driver: its interface ends, or is made anew."""
    link = rig.machine.root / "sys/bus/pci/devices" / vf(index) / "driver"
    link.unlink(missing_ok=True)
    if driver is not None:
        (rig.machine.root / "sys/bus/pci/drivers" / driver).mkdir(exist_ok=True)
        link.symlink_to(f"../../../../bus/pci/drivers/{driver}")


@pytest.fixture(params=["vfio-pci", "uio_pci_generic", "igb_uio", "mlx5_vfio_pci"])
def driver(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def dpdk(own_network: None, tmp_path: Path) -> Iterator[Rig]:
    """A node whose first VF is bound to vfio-pci, and can be reset by itself."""
    tiny_node.create(tmp_path)
    with open_rig(tmp_path) as rig:
        bind(rig, "vfio-pci")
        unplug_interface(rig)
        folder = rig.machine.root / "sys/bus/pci/devices" / vf(0)
        (folder / "reset_method").write_text("flr bus\n")
        (folder / "reset").write_text("")
    with open_rig(tmp_path) as rig:
        yield rig


def unplug_interface(rig: Rig, index: int = 0) -> None:
    """Let the simulation give this device no interface, as a driver for programs does."""
    folder = rig.machine.root / "sys/bus/pci/devices" / vf(index) / "net"
    shutil.rmtree(folder)


def test_each_driver_for_programs_is_known(own_network: None, tmp_path: Path, driver: str) -> None:
    tiny_node.create(tmp_path)
    with open_rig(tmp_path) as rig:
        bind(rig, driver)
    with open_rig(tmp_path) as rig:
        rig.add("c1", rig.pod(), vlan=100)
        [row] = rig.ledger.attachments()
        assert row.undo.mode == "vfio"


def test_the_answer_names_the_device_and_what_was_set(dpdk: Rig) -> None:
    before, pod = dpdk.settings(), dpdk.pod()
    answer = dpdk.add("c1", pod, **ASKED)
    assert answer["interfaces"] == [
        {"name": "net1", "mac": "02:00:00:00:00:77", "sandbox": str(pod), "pciID": vf(0)},
    ]
    now = dpdk.settings()
    assert (now.vlan, now.trust, now.mac, now.max_tx_rate) == (100, True, "02:00:00:00:00:77", 200)
    assert dpdk.in_pod(pod) is None
    dpdk.check("c1", pod, **ASKED)
    assert dpdk.add("c1", pod, **ASKED) == answer  # the same again

    dpdk.delete("c1", None)
    dpdk.await_back()
    assert dpdk.settings() == before


def test_the_answer_names_the_mac_that_the_pf_has_given(dpdk: Rig) -> None:
    """The program takes it, and the pod reads it in network-status: as sriov-cni answers."""
    pod = dpdk.pod()
    (entry,) = dpdk.add("c1", pod, type="sriov")["interfaces"]
    assert "mac" not in entry
    dpdk.delete("c1", None)
    dpdk.await_back()
    dpdk.machine.vf_control.apply(tiny_node.PF_NETDEV, 0, VfSettings(mac="02:00:00:00:00:88"))
    for vlan in (None, 100):
        (entry,) = dpdk.add("c1", pod, type="sriov", vlan=vlan)["interfaces"]
        assert entry["mac"] == "02:00:00:00:00:88"
        dpdk.delete("c1", None)
        dpdk.await_back()
    assert dpdk.settings().mac == "02:00:00:00:00:88"


def test_addresses_are_leased_for_the_program_and_not_set(dpdk: Rig) -> None:
    pod = dpdk.pod()
    answer = dpdk.add("c1", pod, ipam=dpdk.ipam(), **ASKED)
    assert [ip["address"] for ip in answer["ips"]] == ["10.9.0.2/24", "fd09::2/64"]
    dpdk.check("c1", pod, ipam=dpdk.ipam(), **ASKED)
    dpdk.delete("c1", pod)
    dpdk.await_back()
    until(lambda: dpdk.leases() == [])


def test_a_late_del_of_the_former_owner_touches_nothing(dpdk: Rig) -> None:
    """The settings are all there is to a VF without an interface, so only the row can tell the owners apart."""
    first, second = dpdk.pod("one"), dpdk.pod("two")
    dpdk.add("c1", first, vlan=100)
    dpdk.delete("c1", first)
    dpdk.await_back()
    dpdk.add("c2", second, vlan=200)
    for netns in (None, first, second):
        dpdk.delete("c1", netns)
    assert dpdk.settings().vlan == 200
    assert [row.owner.container_id for row in dpdk.ledger.attachments()] == ["c2"]


def test_a_second_pod_has_to_wait_for_the_first_ones_del(dpdk: Rig) -> None:
    first = dpdk.pod("one")
    dpdk.add("c1", first, vlan=100)
    with pytest.raises(DeviceBusy, match="still held by pod default/pod-of-c1"):
        dpdk.add("c2", dpdk.pod("two"), vlan=200)
    dpdk.remove(first)
    dpdk.add("c2", dpdk.pod("three"), vlan=200)  # its owner is gone, so it is cleaned up on the way
    assert dpdk.settings().vlan == 200


@pytest.mark.parametrize("what", ["plain file", "folder gone"])
def test_a_pod_whose_namespace_cannot_be_seen_from_here_keeps_its_device(dpdk: Rig, what: str) -> None:
    """The runtime's folder is not mounted here, or without what is mounted in it."""
    folder = dpdk.folder / "netns"
    folder.mkdir()
    pod = dpdk.pod("netns/one")
    dpdk.add("c1", pod, vlan=100)
    dpdk.remove(pod)
    if what == "plain file":
        pod.touch()
    else:
        folder.rmdir()
    assert dpdk.attachments.heal(vf(0)) is None
    with pytest.raises(DeviceBusy):
        dpdk.add("c2", dpdk.pod("two"))
    assert dpdk.settings().vlan == 100


def test_a_pod_whose_namespace_was_removed_is_cleaned_up_after(dpdk: Rig) -> None:
    before, pod = dpdk.settings(), dpdk.pod()
    dpdk.add("c1", pod, **ASKED)
    dpdk.remove(pod)
    assert dpdk.attachments.heal(vf(0)) == "owner-gone"
    assert dpdk.settings() == before


def test_the_function_is_reset_before_its_settings_are(dpdk: Rig) -> None:
    reset = dpdk.machine.root / "sys/bus/pci/devices" / vf(0) / "reset"
    before, pod = dpdk.settings(), dpdk.pod()
    dpdk.add("c1", pod, functionReset=True, **ASKED)
    assert reset.read_text() == ""
    dpdk.delete("c1", pod)
    dpdk.await_back()
    assert (reset.read_text(), dpdk.settings()) == ("1", before)


def test_a_reset_that_fails_withholds_the_device_until_it_works(dpdk: Rig) -> None:
    reset = dpdk.machine.root / "sys/bus/pci/devices" / vf(0) / "reset"
    before, pod = dpdk.settings(), dpdk.pod()
    dpdk.add("c1", pod, functionReset=True, **ASKED)
    asked = dpdk.settings()
    reset.unlink()
    reset.mkdir()
    dpdk.delete("c1", pod)
    assert f"function-level reset of {vf(0)} failed" in dpdk.await_withheld()
    assert dpdk.settings() == asked  # what the program may still do, it does within these
    reset.rmdir()
    assert dpdk.attachments.heal(vf(0)) == "half-detaching"
    assert dpdk.settings() == before
    assert (dpdk.ledger.quarantines(), dpdk.ledger.attachments()) == ((), ())


@pytest.mark.parametrize("methods", ["bus\n", "\n", None])
def test_a_device_that_cannot_be_reset_alone_is_refused_if_that_was_asked_for(dpdk: Rig, methods: str | None) -> None:
    folder = dpdk.machine.root / "sys/bus/pci/devices" / vf(0)
    if methods is None:
        (folder / "reset").unlink()
        (folder / "reset_method").unlink()
    else:
        (folder / "reset_method").write_text(methods)
    before = dpdk.settings()
    with pytest.raises(HardwareError, match="reset"):
        dpdk.add("c1", dpdk.pod(), functionReset=True, **ASKED)
    assert (dpdk.settings(), dpdk.ledger.attachments()) == (before, ())


def test_a_reset_of_a_vf_with_a_network_driver_is_refused(rig: Rig) -> None:
    with pytest.raises(RequestInvalid, match="functionReset is for VFs that programs drive"):
        rig.add("c1", rig.pod(), functionReset=True)


@pytest.mark.parametrize("wanted", [True, False])
def test_a_driver_of_the_other_kind_than_asked_is_refused(dpdk: Rig, wanted: bool) -> None:
    device = vf(1) if wanted else vf(0)
    with pytest.raises(HardwareError, match=device):
        dpdk.add("c1", dpdk.pod(), deviceID=device, vfio=wanted)
    assert dpdk.ledger.attachments() == ()


def test_a_kernel_vf_that_was_bound_to_vfio_in_the_pod_comes_back_without_an_interface(rig: Rig) -> None:
    """Its interface has ended with the binding: no namespace can have it, so nothing is waited for."""
    before, pod = rig.settings(), rig.pod()
    rig.add("c1", pod, **ASKED)
    rig.run_in(pod, "ip", "link", "delete", "net1")
    bind(rig, "vfio-pci")
    unplug_interface(rig)
    with open_rig(rig.folder) as later:  # has scanned anew
        with pytest.raises(AttachmentError, match="net1 is not in the pod"):
            later.check("c1", pod)
        later.remove(pod)
        assert later.attachments.heal(vf(0)) == "owner-gone"
        assert (later.settings(), later.ledger.quarantines(), later.ledger.attachments()) == (before, (), ())


def test_a_vfio_vf_that_was_bound_to_the_kernel_in_the_pod_gets_its_settings_back(dpdk: Rig) -> None:
    before, pod = dpdk.settings(), dpdk.pod()
    dpdk.add("c1", pod, **ASKED)
    bind(dpdk, "mlx5_core")
    with pytest.raises(AttachmentError, match=f"{vf(0)} is bound to mlx5_core now: no program can drive it"):
        dpdk.check("c1", pod, **ASKED)
    dpdk.delete("c1", pod)
    dpdk.await_back()
    assert (dpdk.settings(), dpdk.ledger.quarantines()) == (before, ())


@pytest.mark.parametrize("mode", ["vf", "nic"])
@pytest.mark.parametrize(("driver", "expected"), [("vfio-pci", "vfio"), ("mlx5_core", None)])
def test_a_whole_adapter_that_programs_drive_shows_itself_too(mode: str, driver: str, expected: str | None) -> None:
    snapshot = tiny_node.tiny_snapshot(0)
    adapter = replace(snapshot.devices[0], driver=driver)
    conf = netconf.from_document({"cniVersion": "1.1.0", "name": "n", "mode": mode, "deviceID": adapter.address})
    assert choice.name_for(conf, replace(snapshot, devices=(adapter,))) == (expected or mode)
