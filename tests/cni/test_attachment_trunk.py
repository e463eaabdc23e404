"""The VLANs that a VF may send tagged: set at ADD, held against the PF by CHECK, put back whatever ended the agent."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.errors import AttachmentError, HardwareError, NetlinkFailed
from agent.hardware.sysfs import trunk
from agent.model.allocation import VfSettings
from cni.call import GrantedDevice
from hack.sim.machine import SimulatedMachine
from tests import sandbox
from tests.cni import tiny_node
from tests.cni.networks import PREVIOUS, network
from tests.cni.tiny_node import PF_NETDEV, Rig, open_rig, vf
from tests.vf_trunk import TrunkDriver, WithTrunk

TRUNK = "100,200-210"


@pytest.fixture
def driver() -> TrunkDriver:
    return TrunkDriver()


@pytest.fixture
def rig(own_network: None, tmp_path: Path, driver: TrunkDriver) -> Iterator[Rig]:
    """A node whose PF has a list for each VF, in which that of the first one has a VLAN already."""
    create(tmp_path, driver)
    with opened(tmp_path, driver) as rig:
        yield rig


def create(folder: Path, driver: TrunkDriver) -> None:
    tiny_node.create(folder)
    for index in range(3):
        driver.create(trunk.path_of(folder / "root", PF_NETDEV, index), *([5] if index == 0 else []))


def opened(folder: Path, driver: TrunkDriver, kind: type[WithTrunk] = WithTrunk) -> Any:
    def with_control(machine: SimulatedMachine) -> SimulatedMachine:
        return replace(machine, vf_control=kind(folder, driver))

    return open_rig(folder, host=with_control)


def shown(folder: Path, index: int = 0) -> str | None:
    return trunk.read(folder / "root", PF_NETDEV, index)


@pytest.mark.parametrize("chained", [True, False])
def test_a_trunk_is_set_for_the_pod_and_put_back_after_it(rig: Rig, chained: bool) -> None:
    pod, before, keys = rig.pod(), rig.found(), {"trunk": [100, "200-205", {"minID": 206, "maxID": 210}]}
    rig.granted[:] = [GrantedDevice(vf(0), "rdma/vf", network(keys))]
    rig.add("c1", pod, **({"prevResult": PREVIOUS} if chained else keys))
    assert shown(rig.folder) == TRUNK
    (row,) = rig.ledger.attachments()
    assert row.undo.settings == VfSettings(trunk="5")
    rig.check("c1", pod)
    rig.delete("c1", pod)
    rig.await_back()
    assert (shown(rig.folder), rig.found(), rig.ledger.quarantines()) == ("5", before, ())


def test_check_tells_of_a_trunk_that_was_changed(rig: Rig, driver: TrunkDriver) -> None:
    pod = rig.pod()
    rig.add("c1", pod, trunk=TRUNK)
    driver.write(trunk.path_of(rig.folder / "root", PF_NETDEV, 0), "rem 205 206")
    with pytest.raises(AttachmentError) as caught:
        rig.check("c1", pod)
    assert str(caught.value) == "the PF ens1f0 has trunk '100,200-204,207-210', not '100,200-210'"
    rig.delete("c1", pod)
    rig.await_back()
    assert shown(rig.folder) == "5"


@pytest.mark.parametrize("ids", [(), (0, 4095)])
def test_what_a_list_held_before_is_put_back_whatever_it_is(
    rig: Rig, driver: TrunkDriver, ids: tuple[int, ...]
) -> None:
    path, pod = trunk.path_of(rig.folder / "root", PF_NETDEV, 0), rig.pod()
    driver.create(path, *ids)
    rig.add("c1", pod, trunk="1-4094")
    assert driver.list_in(path) == set(range(1, 4095))
    rig.check("c1", pod)  # the driver cannot show so many
    rig.delete("c1", pod)
    rig.await_back()
    assert driver.list_in(path) == set(ids)


def test_a_driver_without_trunks_is_told_with_all_that_is_needed_to_help(own_network: None, tmp_path: Path) -> None:
    with open_rig(tmp_path) as rig:
        pod, before = rig.pod(), rig.found()
        with pytest.raises(HardwareError) as caught:
            rig.add("c1", pod, trunk=TRUNK)
        path = trunk.path_of(tmp_path / "root", PF_NETDEV, 0)
        assert str(caught.value) == (
            "trunk of network rails cannot be set for VF 0 of ens1f0: the driver mlx5_core has no"
            f" {path}: of drivers, only those that NVIDIA (DOCA, MLNX_OFED) and Intel give out themselves have it;"
            " install one on the node, or leave trunk out"
        )
        assert (rig.found(), rig.ledger.attachments()) == (before, ())


def test_a_sysfs_that_is_read_only_is_told_before_anything_is_changed(rig: Rig) -> None:
    pod, folder = rig.pod(), rig.machine.root / "sys/bus/pci"
    with sandbox.mounts():
        subprocess.run(["mount", "--bind", folder, folder], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        with pytest.raises(HardwareError, match="is read-only, and trunk writes there: add daemonset/components/sysfs"):
            rig.add("c1", pod, trunk=TRUNK)
    assert (shown(rig.folder), rig.ledger.attachments()) == ("5", ())


def test_a_list_that_could_not_be_put_back_is_left_alone(rig: Rig, driver: TrunkDriver) -> None:
    driver.create(trunk.path_of(rig.folder / "root", PF_NETDEV, 0), *range(1, 4000))
    with pytest.raises(HardwareError, match="has more VLANs than the driver can show, so they could not be put back"):
        rig.add("c1", rig.pod(), trunk=TRUNK)
    assert (driver.said, rig.ledger.attachments()) == ([], ())


def test_what_the_driver_refuses_undoes_the_add(rig: Rig, driver: TrunkDriver) -> None:
    pod, before = rig.pod(), rig.found()

    def full() -> int:
        return int(any(text.startswith("add 100") for text in driver.said))

    driver.tag = full
    with pytest.raises(HardwareError, match=r'the driver refuses "add 100 100" in .*/trunk: Operation not permitted'):
        rig.add("c1", pod, trunk=TRUNK)
    assert [row.device for row in rig.ledger.attachments()] == [vf(0)]  # the 5 is refused, too
    driver.tag = lambda: 0
    rig.await_healed()
    assert (shown(rig.folder), rig.found(), rig.ledger.quarantines()) == ("5", before, ())


class Exclusive(WithTrunk):
    """A PF that does not tag for a VF with a list, nor has a list for one that it tags for."""

    def apply(self, pf_netdev: str, vf_index: int, settings: VfSettings) -> None:
        self._driver.tag = lambda: self.read(pf_netdev, vf_index).vlan or 0
        super().apply(pf_netdev, vf_index, settings)

    def _set(self, pf_netdev: str, vf_index: int, settings: VfSettings) -> None:
        if settings.vlan and self.read(pf_netdev, vf_index).trunk:
            raise NetlinkFailed(f"set VLAN {settings.vlan}", errno.EPERM, "Operation not permitted")
        super()._set(pf_netdev, vf_index, settings)


def test_a_vlan_of_the_pf_is_in_the_way_until_the_network_takes_it_off(
    own_network: None, tmp_path: Path, driver: TrunkDriver
) -> None:
    create(tmp_path, driver)
    driver.create(trunk.path_of(tmp_path / "root", PF_NETDEV, 0))
    with opened(tmp_path, driver, Exclusive) as rig:
        rig.machine.vf_control.apply(PF_NETDEV, 0, VfSettings(vlan=7))
        pod, before = rig.pod(), rig.found()
        with pytest.raises(HardwareError, match="the PF tags for it, with VLAN 7: add `vlan: 0` beside trunk, or take"):
            rig.add("c1", pod, trunk=TRUNK)
        rig.add("c1", pod, trunk=TRUNK, vlan=0)
        assert (rig.settings().vlan, shown(tmp_path)) == (0, TRUNK)
        rig.delete("c1", pod)
        rig.await_back()
        assert (rig.found(), shown(tmp_path), rig.ledger.quarantines()) == (before, "", ())
