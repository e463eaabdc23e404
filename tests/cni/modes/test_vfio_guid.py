"""GUIDs of InfiniBand VFs that programs drive: set on the PF, without binding anything anew, and put back."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.errors import AttachmentError, HardwareError, RequestInvalid
from cni.call import GrantedDevice
from cni.modes import guid
from hack.sim.machine import RecordedVfControl, SimulatedMachine
from tests.cni.modes import rdma_node
from tests.cni.modes.guids import GUID
from tests.cni.modes.test_vfio import bind, unplug_interface
from tests.cni.networks import network
from tests.cni.tiny_node import PF, PF_NETDEV, Rig, open_rig, vf

FORMER = ("02:00:00:00:00:00:0f:01", "02:00:00:00:00:00:0f:02")


@contextmanager
def for_programs(folder: Path, *, control: RecordedVfControl | None = None, ib: bool = True) -> Iterator[Rig]:
    """Open a node whose first VF is bound to vfio-pci. `control` may stand in for its PF."""
    rdma_node.create(folder, ib=ib)
    with open_rig(folder) as rig:
        bind(rig, "vfio-pci")
        unplug_interface(rig)
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
    node.delete("c1", pod)
    node.await_back()
    assert (guids(node), node.settings(), node.ledger.quarantines()) == (FORMER, before, ())


def test_a_vf_that_had_no_guid_gets_the_one_that_means_none(node: Rig) -> None:
    """All zeros cannot be set."""
    pod = node.pod()
    assert guids(node) == (guid.NONE, guid.NONE)
    node.add("c1", pod, guid=GUID)
    node.delete("c1", pod)
    node.await_back()
    assert guids(node) == (guid.ALL_ONES, guid.ALL_ONES)


def test_without_a_guid_none_is_touched(node: Rig) -> None:
    pod = node.pod()
    node.add("c1", pod)
    (row,) = node.ledger.attachments()
    assert "guids" not in row.undo.extra
    node.delete("c1", pod)
    node.await_back()
    assert guids(node) == (guid.NONE, guid.NONE)


def test_a_pod_that_is_gone_leaves_its_guid_to_nobody(node: Rig) -> None:
    node.machine.vf_control.set_guids(PF_NETDEV, 0, *FORMER)
    pod = node.pod()
    node.add("c1", pod, guid=GUID)
    assert guids(node) == (GUID, GUID)
    node.remove(pod)
    assert node.attachments.heal(vf(0)) == "owner-gone"
    assert guids(node) == FORMER


def test_a_vf_that_was_bound_to_the_kernel_in_the_pod_is_told_to_keep_its_guid(
    node: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    node.machine.vf_control.set_guids(PF_NETDEV, 0, *FORMER)
    pod = node.pod()
    node.add("c1", pod, guid=GUID)
    bind(node, "mlx5_core")
    node.machine.bind(vf(0), "mlx5_core")
    node.delete("c1", pod)
    node.await_back()
    assert (guids(node), node.ledger.quarantines()) == (FORMER, ())
    assert f"{vf(0)} is bound to mlx5_core now, and keeps the GUID {GUID}" in caplog.text


def test_a_guid_that_somebody_else_changed_is_told_by_check(node: Rig) -> None:
    pod = node.pod()
    node.add("c1", pod, guid=GUID)
    node.machine.vf_control.set_guids(PF_NETDEV, 0, *FORMER)
    with pytest.raises(AttachmentError, match=f"the PF {PF_NETDEV} has the GUIDs {FORMER[0]} and .*, not {GUID}"):
        node.check("c1", pod, guid=GUID)


def test_a_vf_of_the_pods_resource_gets_the_guid_of_its_network(node: Rig) -> None:
    pod = node.pod()
    node.granted.append(GrantedDevice(vf(0), "example.com/ib", network=network({"name": "rails", "guid": GUID})))
    previous = {"cniVersion": "1.1.0", "interfaces": [{"name": "eth0"}]}
    node.add("c1", pod, prevResult=previous, name="cluster")
    assert guids(node) == (GUID, GUID)


class Stubborn(RecordedVfControl):
    """Takes GUIDs, but not the former ones, until told to."""

    obeys = False

    def set_guids(self, pf_netdev: str, vf_index: int, node: str, port: str) -> None:
        if node != GUID and not self.obeys:
            raise HardwareError(f"set the node GUID of VF {vf_index} of {pf_netdev} to {node}: refused")
        super().set_guids(pf_netdev, vf_index, node, port)


def test_a_guid_that_cannot_be_put_back_withholds_the_vf_until_it_can(own_network: None, tmp_path: Path) -> None:
    stubborn = Stubborn(tmp_path / "vf-settings.json")
    with for_programs(tmp_path, control=stubborn) as rig:
        pod = rig.pod()
        rig.add("c1", pod, guid=GUID)
        rig.delete("c1", pod)
        assert "set the node GUID of VF 0" in rig.await_withheld()
        stubborn.obeys = True
        assert rig.attachments.heal(vf(0)) == "half-detaching"
        assert guids(rig) == (guid.ALL_ONES, guid.ALL_ONES)
        assert (rig.ledger.quarantines(), rig.ledger.attachments()) == ((), ())


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
        rig.delete("c1", pod)
        rig.await_back()
        assert RecordedVfControl(file).guids(PF_NETDEV, 0) == (guid.ALL_ONES, guid.ALL_ONES)


def test_a_guid_is_refused_where_the_pf_has_no_interface(node: Rig) -> None:
    away = node.pod("away")
    subprocess.run(["ip", "link", "set", PF_NETDEV, "netns", away], check=True)
    with pytest.raises(HardwareError, match=rf"guid cannot be set on {vf(0)}: its PF {PF}, which .*load ib_ipoib"):
        node.add("c1", node.pod(), guid=GUID)
    assert node.ledger.attachments() == ()


def test_a_partition_is_refused(node: Rig) -> None:
    with pytest.raises(RequestInvalid, match=rf"pkey cannot be heeded for {vf(0)}: it is bound to vfio-pci.*leave"):
        node.add("c1", node.pod(), pkey="0x8001", guid=GUID)
    assert node.ledger.attachments() == ()


@pytest.mark.parametrize(
    ("conf", "key"), [({"rdma": True}, "rdma"), ({"type": "ib-sriov", "rdmaIsolation": True}, "rdmaIsolation")]
)
def test_an_rdma_device_that_must_go_along_is_refused(node: Rig, conf: dict[str, Any], key: str) -> None:
    with pytest.raises(
        RequestInvalid, match=f"{key}: true cannot be heeded for {vf(0)}: it is bound to vfio-pci.*leave"
    ):
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
    with open_rig(tmp_path) as rig:
        device = rig.machine.root / "sys/bus/pci/devices" / vf(0)
        bind(rig, "vfio-pci")
        unplug_interface(rig)
        (device / "physfn").unlink()
    with open_rig(tmp_path) as rig:
        if kind == "ib-sriov":
            asked = {"rdmaIsolation": True, "runtimeConfig": {"infinibandGUID": GUID}}
            rig.add("c1", rig.pod(), "net1", type=kind, vfioPciMode=True, **asked)
        else:
            with pytest.raises(HardwareError, match=f"guid cannot be set on {vf(0)}: it is not a VF"):
                rig.add("c1", rig.pod(), guid=GUID)
        assert guids(rig) == (guid.NONE, guid.NONE)
