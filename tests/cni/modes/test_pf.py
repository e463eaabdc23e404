"""What is put back on a PF: what is otherwise, and nothing else."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from agent.errors import HardwareError, NetlinkFailed
from agent.hardware.host import Link, LinkChange
from agent.hardware.netlink.links import Netlink
from agent.model.allocation import Undo, VfSettings
from agent.model.device import RdmaDevice
from cni.modes import pf
from cni.modes.pf import NEUTRAL, lacking
from hack.sim.fabric import device_of
from hack.sim.machine import RecordedVfControl, SimulatedMachine
from tests.cni.tiny_node import PF_NETDEV, Rig, mac_of, open_rig, vf

BEFORE = VfSettings("02:00:00:00:00:01", 7, 3, "802.1ad", 10, 20, spoofchk=True, trust=False, link_state="auto")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, {}),
        ({"trust": True}, {"trust": False}),
        ({"vlan": 9}, {"vlan": 7, "vlan_qos": 3, "vlan_proto": "802.1ad"}),
        ({"vlan_proto": "802.1q"}, {"vlan": 7, "vlan_qos": 3, "vlan_proto": "802.1ad"}),
        ({"max_tx_rate": 99}, {"min_tx_rate": 10, "max_tx_rate": 20}),
        ({"mac": None, "link_state": "disable"}, {"mac": "02:00:00:00:00:01", "link_state": "auto"}),
    ],
)
def test_only_what_is_otherwise_is_set(change: dict[str, object], expected: dict[str, object]) -> None:
    assert lacking(BEFORE, replace(BEFORE, **change)) == VfSettings(**expected)  # type: ignore[arg-type]
    assert lacking(VfSettings(spoofchk=True), replace(BEFORE, **change)) == VfSettings()  # type: ignore[arg-type]


class LikeIgb(RecordedVfControl):
    """A PF whose driver refuses any link state, the one it has too."""

    def apply(self, pf_netdev: str, vf_index: int, settings: VfSettings) -> None:
        super().apply(pf_netdev, vf_index, replace(settings, link_state=None))
        if settings.link_state is not None:
            raise NetlinkFailed(f"set link state of VF {vf_index} on {pf_netdev}", 95, "Operation not supported")


class TooMany(RecordedVfControl):
    """A PF with so many VFs that the kernel cannot list them."""

    def read(self, pf_netdev: str, vf_index: int) -> VfSettings:
        raise NetlinkFailed(f"read VF {vf_index} of {pf_netdev}", 90, "Message too long")

    def apply(self, pf_netdev: str, vf_index: int, settings: VfSettings) -> None:
        reader = RecordedVfControl(self._path)
        before = reader.read(pf_netdev, vf_index)
        changed = settings.document()
        reader.apply(pf_netdev, vf_index, replace(before, **changed))


def with_control(folder: Path, kind: type[RecordedVfControl]) -> Callable[[SimulatedMachine], SimulatedMachine]:
    return lambda machine: replace(machine, vf_control=kind(folder / "vf-settings.json"))


def test_what_the_driver_refused_once_does_not_lose_the_vf(own_network: None, tmp_path: Path) -> None:
    with open_rig(tmp_path, host=with_control(tmp_path, LikeIgb)) as rig:
        pod, before = rig.pod(), rig.found()
        with pytest.raises(NetlinkFailed, match="set link state"):
            rig.add("c1", pod, link_state="disable", vlan=100, trust="on")
        assert (rig.found(), rig.ledger.attachments(), rig.ledger.quarantines()) == (before, (), ())


def test_a_pf_that_cannot_be_asked_gets_back_the_usual(own_network: None, tmp_path: Path) -> None:
    with open_rig(tmp_path, host=with_control(tmp_path, TooMany)) as rig:
        pod, before = rig.pod(), rig.settings()
        rig.add("c1", pod, vlan=100, trust="on", max_tx_rate=50)
        assert (rig.settings().vlan, rig.settings().trust, rig.settings().max_tx_rate) == (100, True, 50)
        rig.check("c1", pod)
        rig.detach("c1", pod)
        assert rig.settings() == before == replace(NEUTRAL, mac=before.mac)
        assert rig.ledger.quarantines() == ()


def test_the_pf_is_not_asked_of_a_vf_of_which_nothing_is_wanted(own_network: None, tmp_path: Path) -> None:
    """rtnetlink can only list all VFs of a PF, which takes milliseconds with hundreds of them."""

    class Unasked(RecordedVfControl):
        def read(self, pf_netdev: str, vf_index: int) -> VfSettings:
            raise AssertionError("the PF was asked")

    with open_rig(tmp_path, host=with_control(tmp_path, Unasked)) as rig:
        pod = rig.pod()
        rig.add("c1", pod, mtu=1400)
        rig.check("c1", pod)
        rig.detach("c1", pod)
        assert rig.ledger.quarantines() == ()


def test_an_mlx5_vf_with_an_rdma_device_keeps_a_mac_on_its_pf(rig: Rig) -> None:
    """With an all-zero MAC its node GUID would be zero too, and RDMA-CM fails until the driver is bound anew."""
    facts = replace(
        rig.machine.scan().by_address[vf(0)],
        rdma_devices=(RdmaDevice("mlx5_1", "CA", "0", "", (), ()),),
    )
    undo = Undo("ens1f0v0", "02:00:00:00:01:00", 1500, up=False)
    wanted = VfSettings(mac="02:00:00:00:00:77")
    assert pf.with_settings(rig.machine, facts, undo, wanted).settings.mac == "02:00:00:00:01:00"
    assert pf.with_settings(rig.machine, replace(facts, driver="iavf"), undo, wanted).settings.mac == pf.NO_MAC


class Igbvf(Netlink):
    """A driver that takes no MAC from anybody but its PF, which it asks when its interface goes down."""

    deaf = False
    """Whether it never asks either."""

    def __init__(self, machine: SimulatedMachine) -> None:
        super().__init__(device_of)
        self.control = machine.vf_control

    def move_in(self, link: Link, netns: int, change: LinkChange) -> None:
        super().move_in(link, netns, replace(change, mac=None) if change.mac is None else LinkChange())
        self._refuse(change)

    def change(self, link: Link, change: LinkChange, netns: int | None = None) -> None:
        self._refuse(change)
        super().change(link, change, netns)
        if change.up is False and not self.deaf:
            super().change(link, LinkChange(mac=self.control.read(PF_NETDEV, 0).mac), netns)

    def _refuse(self, change: LinkChange) -> None:
        if change.mac is not None:
            raise NetlinkFailed("change the MAC", errno.EADDRNOTAVAIL, "Cannot assign requested address")


@pytest.mark.parametrize("deaf", [False, True])
def test_a_vf_whose_driver_takes_no_mac_fetches_it_from_the_pf(own_network: None, tmp_path: Path, deaf: bool) -> None:
    def with_links(machine: SimulatedMachine) -> SimulatedMachine:
        made.append(Igbvf(machine))
        made[0].deaf = deaf
        return replace(machine, links=made[0])

    made: list[Igbvf] = []
    with open_rig(tmp_path, host=with_links) as rig, closing(made[0]):
        rig.machine.vf_control.apply(PF_NETDEV, 0, VfSettings(mac=mac_of(0)))
        pod, before, wanted = rig.pod(), rig.found(), "02:00:00:00:00:77"
        if deaf:
            with pytest.raises(HardwareError, match=f"takes no MAC {wanted}: its PF gives it {mac_of(0)}"):
                rig.add("c1", pod, mac=wanted)
        else:
            rig.add("c1", pod, mac=wanted)
            assert (rig.link(pod).mac, rig.link(pod).up) == (wanted, True)
            rig.detach("c1", pod)
        assert (rig.found(), rig.ledger.quarantines()) == (before, ())
