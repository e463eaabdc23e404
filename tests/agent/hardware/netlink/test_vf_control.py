"""VF settings: interfaces that have no VFs, as a real kernel answers, and drivers that do not do as they say."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from agent.errors import HardwareError
from agent.hardware.netlink.vf_control import PfNetlink
from agent.hardware.sysfs import trunk
from agent.model.allocation import VfSettings
from tests.agent.hardware.attributes import attribute
from tests.vf_trunk import TrunkDriver


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


class Driver:
    """A PF with one VF, as its driver tells and takes its trust. It stands where a netlink socket does."""

    def __init__(self, *, ignores: int = 0, is_busy: int = 0) -> None:
        """How many requests it acknowledges and forgets, and how many it refuses before for a reset."""
        self.ignores, self.is_busy = ignores, is_busy
        self.trust = False
        self.asked = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def find(self, name: str) -> Any:
        return SimpleNamespace(ifindex=7)

    def find_with_vfs(self, name: str) -> tuple[int, bytes]:
        mac, trust = struct.pack("=I", 0) + bytes(32), struct.pack("=II", 0, self.trust)
        info = attribute(1, attribute(1, mac) + attribute(9, trust))
        return 7, attribute(21, struct.pack("=I", 1)) + attribute(22, info)

    def set_vf(self, ifindex: int, request: bytes) -> None:
        self.asked += 1
        if self.is_busy:
            self.is_busy -= 1
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        if self.ignores:
            self.ignores -= 1
        else:
            self.trust = bool(struct.unpack("=I", request[-4:])[0])


def control(driver: Driver, settle_seconds: float = 30.0) -> PfNetlink:
    return PfNetlink(settle_seconds, open_links=lambda: driver)  # type: ignore[arg-type, return-value]


def test_a_trunk_goes_with_what_rtnetlink_sets(tmp_path: Path) -> None:
    kept, path = TrunkDriver(), trunk.path_of(tmp_path, "ens1f0", 0)
    kept.create(path, 5)
    driver = Driver()
    of_pf = PfNetlink(30.0, tmp_path, lambda: driver, kept.write)  # type: ignore[arg-type, return-value]
    of_pf.apply("ens1f0", 0, VfSettings(trunk="100,200-210"))
    assert (driver.asked, of_pf.read("ens1f0", 0).trunk) == (0, "100,200-210")
    of_pf.apply("ens1f0", 0, VfSettings(trust=True))
    assert of_pf.read("ens1f0", 0).trunk == "100,200-210"
    of_pf.apply("ens1f0", 0, VfSettings(trust=False, trunk=""))
    assert (driver.trust, driver.asked, of_pf.read("ens1f0", 0).trunk) == (False, 2, "")
    path.unlink()
    assert of_pf.read("ens1f0", 0).trunk is None


class Crowded(Driver):
    """A PF with so many VFs that the kernel has no room for them in its answer."""

    def find_with_vfs(self, name: str) -> tuple[int, bytes]:
        raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))


@pytest.mark.parametrize("settings", [VfSettings(vlan=7), VfSettings(max_tx_rate=50), VfSettings(trust=True)])
def test_a_pf_that_cannot_be_asked_can_be_told(settings: VfSettings) -> None:
    driver = Crowded()
    control(driver).apply("ens1f0", 0, settings)
    assert driver.asked == 1


def test_what_a_driver_forgets_is_set_until_it_holds() -> None:
    driver = Driver(ignores=2)
    control(driver).apply("ens1f0", 0, VfSettings(trust=True))
    assert (driver.trust, driver.asked) == (True, 3)


def test_what_a_driver_never_does_is_told_with_what_is_instead() -> None:
    with pytest.raises(HardwareError, match="trust was set to True without an error but is False after 0 s"):
        control(Driver(ignores=1 << 30), 0.0).apply("ens1f0", 0, VfSettings(trust=True))


def test_a_driver_that_resets_its_vf_is_asked_again() -> None:
    driver = Driver(is_busy=2)
    control(driver).apply("ens1f0", 0, VfSettings(trust=True))
    assert (driver.trust, driver.asked) == (True, 3)
    with pytest.raises(HardwareError, match="set trust True of VF 0 on ens1f0"):
        control(Driver(is_busy=1 << 30), 0.0).apply("ens1f0", 0, VfSettings(trust=True))
