"""What igb refuses, and PFs with hundreds of VFs: netdevsim, built by hack/vm/extra-modules."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agent.hardware.netlink.rtnetlink import NetlinkSocket
from agent.hardware.netlink.vf_control import PfNetlink, with_vfs
from agent.hardware.sysfs.counters import traffic_of_all
from agent.model.allocation import VfSettings
from agent.model.counters import VF_KINDS
from tests.vm.adapters import EXTRA, run, wait_until

BUS = Path("/sys/bus/netdevsim")
DEBUG = Path("/sys/kernel/debug")
DEVICE = BUS / "devices/netdevsim7"
WRAP = 1 << 16
"""The list of VFs has 16 bits for its length."""


@pytest.fixture(scope="module")
def simulated() -> Iterator[str]:
    """A PF without VFs; returns the name of its interface."""
    if not (EXTRA / "netdevsim.ko").exists():
        pytest.skip("hack/vm/extra-modules has not built netdevsim")
    if not BUS.exists():
        run("modprobe", "psample")
        run("insmod", str(EXTRA / "ptp_mock.ko"))
        run("insmod", str(EXTRA / "netdevsim.ko"))
    if not (DEBUG / "netdevsim").exists():
        run("mount", "-t", "debugfs", "debugfs", str(DEBUG))
    (BUS / "new_device").write_text("7 1")
    yield str(wait_until("the interface of netdevsim7", lambda: _names())[0])
    (BUS / "del_device").write_text("7")


def _names() -> list[str]:
    folder = DEVICE / "net"
    return sorted(os.listdir(folder)) if folder.exists() else []


def vfs(count: int) -> None:
    (DEVICE / "sriov_numvfs").write_text("0")
    (DEBUG / "netdevsim/netdevsim7/max_vfs").write_text(str(count))
    (DEVICE / "sriov_numvfs").write_text(str(count))


def asked(index: int) -> VfSettings:
    return VfSettings(
        mac=f"02:00:00:00:{index >> 8:02x}:{index & 255:02x}",
        vlan=index + 1,
        vlan_qos=index % 8,
        vlan_proto="802.1ad" if index % 2 else "802.1q",
        min_tx_rate=index,
        max_tx_rate=1000 + index,
        spoofchk=index % 2 == 0,
        trust=index % 3 == 0,
        link_state=("auto", "enable", "disable")[index % 3],
    )


def test_what_igb_refuses_is_set_read_back_and_put_back_and_traffic_is_told_of_each_vf(simulated: str) -> None:
    vfs(7)
    control = PfNetlink()
    untouched = control.read(simulated, 0)
    assert untouched.vlan_proto is None  # this driver begins with none at all, and takes none
    before = [replace(control.read(simulated, index), vlan_proto="802.1q") for index in range(7)]
    for index in range(7):
        control.apply(simulated, index, asked(index))
    assert [control.read(simulated, index) for index in range(7)] == [asked(index) for index in range(7)]
    for index in range(7):
        control.apply(simulated, index, before[index])
    assert [control.read(simulated, index) for index in range(7)] == before
    tells_the_traffic_of_all(simulated, 7)


def test_one_part_of_what_goes_together_leaves_the_other_as_it_was(simulated: str) -> None:
    vfs(2)
    control = PfNetlink()
    control.apply(simulated, 1, asked(1))
    control.apply(simulated, 1, VfSettings(vlan=9))
    control.apply(simulated, 1, VfSettings(max_tx_rate=5))
    now = control.read(simulated, 1)
    assert (now.vlan, now.vlan_qos, now.vlan_proto) == (9, 1, "802.1ad")
    assert (now.min_tx_rate, now.max_tx_rate) == (1, 5)


@pytest.mark.parametrize("count", [128, 256, 400])
def test_each_of_hundreds_of_vfs_is_read_and_set_as_itself_and_its_traffic_told(simulated: str, count: int) -> None:
    vfs(count)
    control = PfNetlink()
    chosen = (0, 1, 127, count // 2, count - 2, count - 1)
    before = control.read(simulated, count - 3)
    for index in chosen:
        control.apply(simulated, index, asked(index))
    for index in chosen:
        assert control.read(simulated, index) == asked(index)
    assert control.read(simulated, count - 3) == before
    with NetlinkSocket() as links:
        found = with_vfs(links, simulated)
    assert found is not None
    assert (len(found) > WRAP) == (count == 400)  # what the kernel says of the list's length is wrong then
    tells_the_traffic_of_all(simulated, count)


def tells_the_traffic_of_all(simulated: str, count: int) -> None:
    body = PfNetlink().traffic(simulated)
    assert body is not None
    # This driver does not count: the kernel answers noughts.
    assert traffic_of_all(body) == {index: dict.fromkeys(VF_KINDS, 0) for index in range(count)}
