"""VF settings on interfaces that have no VFs, as a real kernel answers."""

from __future__ import annotations

import subprocess

import pytest

from agent.errors import HardwareError
from agent.hardware.vf_control import PfNetlink
from agent.model.allocation import VfSettings


def test_an_interface_without_vfs_has_no_vf_settings(own_network: None) -> None:
    subprocess.run(["ip", "link", "add", "v0", "type", "veth", "peer", "name", "p0"], check=True)
    control = PfNetlink(settle_seconds=0.1)
    with pytest.raises(HardwareError, match="v0 has no VF 0: look at its sriov_numvfs"):
        control.read("v0", 0)
    with pytest.raises(HardwareError, match="set trust True of VF 0 on v0"):
        control.apply("v0", 0, VfSettings(trust=True))
    with pytest.raises(HardwareError, match="v0 has no VF 0"):
        control.apply("v0", 0, VfSettings(vlan=7))  # the rest of what goes with a VLAN must be read first
    with pytest.raises(HardwareError, match="nothing"):
        control.read("nothing", 0)
    with pytest.raises(HardwareError, match="PF interface nothing is gone"):
        control.apply("nothing", 0, VfSettings(trust=True))
    control.apply("nothing", 0, VfSettings())
