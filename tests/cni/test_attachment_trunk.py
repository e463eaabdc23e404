"""The VLANs that a VF may send tagged: set at ADD, held against the PF by CHECK, put back whatever ended the agent."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agent.errors import HardwareError
from agent.hardware.sysfs import trunk
from agent.model.allocation import VfSettings
from cni.call import GrantedDevice
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
    tiny_node.create(tmp_path)
    for index in range(3):
        driver.create(trunk.path_of(tmp_path / "root", PF_NETDEV, index), *([5] if index == 0 else []))
    with open_rig(tmp_path, host=lambda machine: replace(machine, vf_control=WithTrunk(tmp_path, driver))) as rig:
        yield rig


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
    rig.detach("c1", pod)
    assert (shown(rig.folder), rig.found(), rig.ledger.quarantines()) == ("5", before, ())


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


def test_a_vlan_of_the_pf_is_in_the_way_until_the_network_takes_it_off(rig: Rig) -> None:
    rig.machine.vf_control.apply(PF_NETDEV, 0, VfSettings(vlan=7))
    pod, before = rig.pod(), rig.found()
    with pytest.raises(HardwareError, match="the PF tags for it, with VLAN 7: add `vlan: 0` beside trunk, or take"):
        rig.add("c1", pod, trunk=TRUNK)
    rig.add("c1", pod, trunk=TRUNK, vlan=0)
    assert (rig.settings().vlan, shown(rig.folder)) == (0, TRUNK)
    rig.detach("c1", pod)
    assert (rig.found(), rig.ledger.quarantines()) == (before, ())
