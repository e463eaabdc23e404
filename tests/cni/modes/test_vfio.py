"""VFs that programs drive: no interface, the PF's settings only, and a row that says whose they are."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.errors import AttachmentError, DeviceBusy, HardwareError, RequestInvalid
from agent.model.allocation import VfSettings
from cni import netconf
from cni.modes import guid
from cni.targets import mode_for
from hack.sim.machine import RecordedVfControl, SimulatedMachine
from tests.cni import tiny_node
from tests.cni.modes import rdma_node
from tests.cni.modes.guids import GUID
from tests.cni.tiny_node import PF, PF_NETDEV, Rig, open_rig, vf
from tests.waiting import until

ASKED: dict[str, Any] = {"vlan": 100, "trust": "on", "mac": "02:00:00:00:00:77", "max_tx_rate": 200}


def bind_to_kernel(rig: Rig) -> None:
    """Bind the first VF to its network driver again."""
    link = rig.machine.root / "sys/bus/pci/devices" / vf(0) / "driver"
    link.unlink()
    link.symlink_to("../../../../bus/pci/drivers/mlx5_core")


@pytest.fixture
def dpdk(own_network: None, tmp_path: Path) -> Iterator[Rig]:
    """A node whose first VF is bound to vfio-pci, and can be reset by itself."""
    tiny_node.create(tmp_path)
    tiny_node.bind_to_vfio(tmp_path)
    folder = tmp_path / "root/sys/bus/pci/devices" / vf(0)
    (folder / "reset_method").write_text("flr bus\n")
    (folder / "reset").write_text("")
    with open_rig(tmp_path) as rig:
        yield rig


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

    dpdk.detach("c1", None)
    assert dpdk.settings() == before


def test_the_answer_names_the_mac_that_the_pf_has_given(dpdk: Rig) -> None:
    """The program takes it, and the pod reads it in network-status: as sriov-cni answers."""
    pod = dpdk.pod()
    (entry,) = dpdk.add("c1", pod, type="sriov")["interfaces"]
    assert "mac" not in entry
    dpdk.detach("c1", None)
    dpdk.machine.vf_control.apply(tiny_node.PF_NETDEV, 0, VfSettings(mac="02:00:00:00:00:88"))
    for vlan in (None, 100):
        (entry,) = dpdk.add("c1", pod, type="sriov", vlan=vlan)["interfaces"]
        assert entry["mac"] == "02:00:00:00:00:88"
        dpdk.detach("c1", None)
    assert dpdk.settings().mac == "02:00:00:00:00:88"


def test_addresses_are_leased_for_the_program_and_not_set(dpdk: Rig) -> None:
    pod = dpdk.pod()
    answer = dpdk.add("c1", pod, ipam=dpdk.ipam(), **ASKED)
    assert [ip["address"] for ip in answer["ips"]] == ["10.9.0.2/24", "fd09::2/64"]
    dpdk.check("c1", pod, ipam=dpdk.ipam(), **ASKED)
    dpdk.detach("c1", pod)
    until(lambda: dpdk.leases() == [])


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
    dpdk.detach("c1", pod)
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
    tiny_node.bind_to_vfio(rig.folder)
    with open_rig(rig.folder) as later:  # has scanned anew
        with pytest.raises(AttachmentError, match="net1 is not in the pod"):
            later.check("c1", pod)
        later.remove(pod)
        assert later.attachments.heal(vf(0)) == "owner-gone"
        assert (later.settings(), later.ledger.quarantines(), later.ledger.attachments()) == (before, (), ())


def test_a_vfio_vf_that_was_bound_to_the_kernel_in_the_pod_gets_its_settings_back(dpdk: Rig) -> None:
    before, pod = dpdk.settings(), dpdk.pod()
    dpdk.add("c1", pod, **ASKED)
    bind_to_kernel(dpdk)
    with pytest.raises(AttachmentError, match=f"{vf(0)} is bound to mlx5_core now: no program can drive it"):
        dpdk.check("c1", pod, **ASKED)
    dpdk.detach("c1", pod)
    assert (dpdk.settings(), dpdk.ledger.quarantines()) == (before, ())


@pytest.mark.parametrize("mode", ["vf", "nic"])
@pytest.mark.parametrize(("driver", "expected"), [("vfio-pci", "vfio"), ("mlx5_core", None)])
def test_a_whole_adapter_that_programs_drive_shows_itself_too(mode: str, driver: str, expected: str | None) -> None:
    snapshot = tiny_node.tiny_snapshot(0)
    adapter = replace(snapshot.devices[0], driver=driver)
    conf = netconf.from_document({"cniVersion": "1.1.0", "name": "n", "mode": mode, "deviceID": adapter.address})
    assert mode_for(conf, replace(snapshot, devices=(adapter,))) == (expected or mode)


FORMER = ("02:00:00:00:00:00:0f:01", "02:00:00:00:00:00:0f:02")


@contextmanager
def for_programs(folder: Path, *, control: RecordedVfControl | None = None, ib: bool = True) -> Iterator[Rig]:
    """Open a node whose first VF is bound to vfio-pci. `control` may stand in for its PF."""
    with rdma_node.opened(folder, ib=ib) as rig:
        tiny_node.bind_to_vfio(folder)
        rig.machine.rdma.withdraw(vf(0))

    def host(machine: SimulatedMachine) -> SimulatedMachine:
        return replace(machine, vf_control=control) if control is not None else machine

    with open_rig(folder, host=host) as rig:
        yield rig


@pytest.fixture
def node(own_network: None, tmp_path: Path) -> Iterator[Rig]:
    with for_programs(tmp_path) as rig:
        yield rig


def guids(rig: Rig) -> tuple[str, str] | None:
    return rig.machine.vf_control.guids(PF_NETDEV, 0)


@pytest.mark.parametrize("kind", ["nodefabric", "ib-sriov"])
def test_both_guids_are_set_on_the_pf_and_put_back(node: Rig, kind: str) -> None:
    node.machine.vf_control.set_guids(PF_NETDEV, 0, *FORMER)
    before, pod = node.settings(), node.pod()
    conf: dict[str, Any] = {"type": kind, "runtimeConfig": {"infinibandGUID": GUID}, "link_state": "enable"}
    node.add("c1", pod, **conf)
    assert (guids(node), node.settings().link_state) == ((GUID, GUID), "enable")
    (row,) = node.ledger.attachments()
    assert row.undo.mode == "vfio"
    node.check("c1", pod, **conf)
    node.detach("c1", pod)
    assert (guids(node), node.settings(), node.ledger.quarantines()) == (FORMER, before, ())


def test_a_vf_that_had_no_guid_gets_the_one_that_means_none(node: Rig) -> None:
    """All zeros cannot be set."""
    pod = node.pod()
    assert guids(node) == (guid.NONE, guid.NONE)
    node.add("c1", pod, guid=GUID)
    node.detach("c1", pod)
    assert guids(node) == (guid.ALL_ONES, guid.ALL_ONES)


def test_a_vf_that_was_bound_to_the_kernel_in_the_pod_is_told_to_keep_its_guid(
    node: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    node.machine.vf_control.set_guids(PF_NETDEV, 0, *FORMER)
    pod = node.pod()
    node.add("c1", pod, guid=GUID)
    bind_to_kernel(node)
    node.machine.bind(vf(0), "mlx5_core")
    node.detach("c1", pod)
    assert (guids(node), node.ledger.quarantines()) == (FORMER, ())
    assert f"{vf(0)} is bound to mlx5_core now, and keeps the GUID {GUID}" in caplog.text


def test_a_guid_that_somebody_else_changed_is_told_by_check(node: Rig) -> None:
    pod = node.pod()
    node.add("c1", pod, guid=GUID)
    node.machine.vf_control.set_guids(PF_NETDEV, 0, *FORMER)
    with pytest.raises(AttachmentError, match=f"the PF of .* has the GUIDs {FORMER[0]} and .*, not {GUID}"):
        node.check("c1", pod, guid=GUID)


class Silent(RecordedVfControl):
    """Tells no GUIDs."""

    def guids(self, pf_netdev: str, vf_index: int) -> tuple[str, str] | None:
        return None


def test_a_guid_that_is_not_told_counts_as_none(own_network: None, tmp_path: Path) -> None:
    file = tmp_path / "vf-settings.json"
    with for_programs(tmp_path, control=Silent(file)) as rig:
        pod = rig.pod()
        rig.add("c1", pod, guid=GUID)
        assert RecordedVfControl(file).guids(PF_NETDEV, 0) == (GUID, GUID)
        rig.detach("c1", pod)
        assert RecordedVfControl(file).guids(PF_NETDEV, 0) == (guid.ALL_ONES, guid.ALL_ONES)


def test_a_guid_is_refused_where_the_pf_has_no_interface(node: Rig) -> None:
    away = node.pod("away")
    subprocess.run(["ip", "link", "set", PF_NETDEV, "netns", away], check=True)
    with pytest.raises(HardwareError, match=rf"guid cannot be set on {vf(0)}: its PF {PF}, which .*load ib_ipoib"):
        node.add("c1", node.pod(), guid=GUID)
    assert node.ledger.attachments() == ()


@pytest.mark.parametrize(
    ("conf", "key"),
    [
        ({"rdma": True}, "rdma: true"),
        ({"type": "ib-sriov", "rdmaIsolation": True}, "rdmaIsolation: true"),
        ({"pkey": "0x8001", "guid": GUID}, "pkey"),
    ],
)
def test_what_a_program_cannot_have_is_refused(node: Rig, conf: dict[str, Any], key: str) -> None:
    with pytest.raises(RequestInvalid, match=f"{key} cannot be heeded for {vf(0)}: it is bound to vfio-pci.*leave"):
        node.add("c1", node.pod(), "net1", **conf)
    assert node.ledger.attachments() == ()
    node.add("c1", node.pod("other"), rdma=False)


def test_the_partition_of_ib_sriov_is_for_ib_kubernetes_alone(node: Rig) -> None:
    node.add("c1", node.pod(), type="ib-sriov", pkey="0x8001", guid=GUID)
    assert guids(node) == (GUID, GUID)


def test_ethernet_has_no_guid(own_network: None, tmp_path: Path) -> None:
    with for_programs(tmp_path, ib=False) as rig:
        with pytest.raises(RequestInvalid, match=f"guid has no effect on {vf(0)}: its PF {PF} has no InfiniBand port"):
            rig.add("c1", rig.pod(), guid=GUID)
        assert (guids(rig), rig.ledger.attachments()) == ((guid.NONE, guid.NONE), ())


@pytest.mark.parametrize(("key", "value"), [("guid", GUID), ("pkey", "0x8001")])
def test_an_ethernet_vf_with_an_interface_is_refused_what_is_for_infiniband(rig: Rig, key: str, value: str) -> None:
    before = rig.found()
    with pytest.raises(RequestInvalid, match=f"{key} has no effect on {vf(0)}: .*leave {key} out"):
        rig.add("c1", rig.pod(), **{key: value})
    assert (rig.found(), rig.ledger.attachments()) == (before, ())


@pytest.mark.parametrize("kind", ["nodefabric", "ib-sriov"])
def test_a_whole_adapter_keeps_its_own_guid_which_only_ib_sriov_passes_over(
    own_network: None, tmp_path: Path, kind: str
) -> None:
    """ib-kubernetes gives a GUID to whatever is attached, and ib-sriov has no use for it there."""
    rdma_node.create(tmp_path, ib=True)
    tiny_node.bind_to_vfio(tmp_path)
    (tmp_path / "root/sys/bus/pci/devices" / vf(0) / "physfn").unlink()
    with open_rig(tmp_path) as rig:
        if kind == "ib-sriov":
            asked = {"rdmaIsolation": True, "runtimeConfig": {"infinibandGUID": GUID}}
            rig.add("c1", rig.pod(), "net1", type=kind, vfioPciMode=True, **asked)
        else:
            with pytest.raises(HardwareError, match=f"guid cannot be set on {vf(0)}: it is not a VF"):
                rig.add("c1", rig.pod(), guid=GUID)
        assert guids(rig) == (guid.NONE, guid.NONE)
