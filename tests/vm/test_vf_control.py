"""VF settings on a real PF: what igb takes reads back, and what it refuses is an error that says so."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace

import pytest

from agent.errors import HardwareError, NetlinkFailed
from agent.hardware.netlink.vf_control import PfNetlink
from agent.model.allocation import VfSettings
from tests.vm.adapters import Pf

VF = 1


@pytest.fixture(scope="module")
def control() -> PfNetlink:
    return PfNetlink(settle_seconds=10.0)


@pytest.fixture
def pf(pfs: tuple[Pf, ...], vfs: Callable[[Pf, int], tuple[str, ...]]) -> Pf:
    vfs(pfs[0], 2)
    return pfs[0]


def test_what_igb_enforces_is_set_and_read_back_and_put_back(control: PfNetlink, pf: Pf) -> None:
    before = control.read(pf.netdev, VF)
    wanted = VfSettings(mac="02:00:00:00:00:07", vlan=100, vlan_qos=3, trust=True, spoofchk=False, max_tx_rate=200)
    control.apply(pf.netdev, VF, wanted)
    after = control.read(pf.netdev, VF)
    assert after == replace(
        before, mac="02:00:00:00:00:07", vlan=100, vlan_qos=3, trust=True, spoofchk=False, max_tx_rate=200
    )
    shown = pf.settings(VF)
    assert (shown["address"], shown["vlan_list"]) == ("02:00:00:00:00:07", [{"vlan": 100, "qos": 3}])
    assert (shown["trust"], shown["spoofchk"], shown["rate"]["max_tx"]) == (True, False, 200)

    control.apply(pf.netdev, VF, replace(before, mac=None, link_state=None))
    assert control.read(pf.netdev, VF) == replace(before, mac="02:00:00:00:00:07")


def test_the_other_vf_keeps_its_settings(control: PfNetlink, pf: Pf) -> None:
    before = control.read(pf.netdev, 0)
    control.apply(pf.netdev, VF, VfSettings(vlan=7, trust=True))
    assert control.read(pf.netdev, 0) == before


@pytest.mark.parametrize(
    ("settings", "number", "word"),
    [
        (VfSettings(link_state="disable"), errno.EOPNOTSUPP, "link state disable"),
        (VfSettings(vlan=5, vlan_proto="802.1ad"), errno.EPROTONOSUPPORT, "VLAN 5"),
        (VfSettings(min_tx_rate=10), errno.EINVAL, "rate 10"),
        (VfSettings(mac="01:00:5e:00:00:01"), errno.EINVAL, "MAC 01:00:5e:00:00:01"),
    ],
    ids=["link state", "802.1ad", "minimal rate", "multicast MAC"],
)
def test_what_igb_refuses_is_named_with_its_errno(
    control: PfNetlink, pf: Pf, settings: VfSettings, number: int, word: str
) -> None:
    before = control.read(pf.netdev, VF)
    with pytest.raises(NetlinkFailed, match=word) as caught:
        control.apply(pf.netdev, VF, settings)
    assert caught.value.errno == number
    assert pf.netdev in str(caught.value)
    assert control.read(pf.netdev, VF) == before


def test_a_vf_that_does_not_exist_is_named(control: PfNetlink, pf: Pf) -> None:
    with pytest.raises(HardwareError, match=f"{pf.netdev} has no VF 5"):
        control.read(pf.netdev, 5)
