"""A VF whose driver will not be told its MAC, as igbvf behaves: it asks the PF when it goes down."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.errors import HardwareError, NetlinkFailed
from agent.hardware.host import Link, LinkChange, RdmaLink, TcxProgram
from agent.model.allocation import Attachment, AttachmentState, NetnsId, Owner, PodRef, Undo, VfSettings
from agent.model.device import LinkLayer, Netdev, PciDevice, Snapshot
from cni import netconf
from cni.modes import vf
from cni.modes.mode import Target
from hack.sim.rdma import SimulatedRdma

PF, VF = "0000:3b:00.0", "0000:3b:02.0"
OWN_MAC, WANTED_MAC = "52:54:00:00:00:10", "02:00:00:00:00:07"
POD = 7
"""Descriptor of the pod's namespace."""


class Igb:
    """One PF with one VF, in the host or in the pod. `deaf`: the driver never asks the PF either."""

    def __init__(self, root: Path, *, deaf: bool = False) -> None:
        self.root = root
        folder = root / "sys/bus/pci/devices" / VF
        folder.mkdir(parents=True)
        (folder / "physfn").symlink_to(f"../{PF}")
        (folder / "driver").symlink_to("../../drivers/igbvf")
        self.links = self
        self.vf_control = self
        self.rdma = SimulatedRdma(root, root)
        self.settings = VfSettings(mac=OWN_MAC, vlan=0)
        self.pf_has_set = False
        self.deaf = deaf
        self.where: int | None = None
        self.uplink = Link("eth0", 2, "52:54:00:00:00:01", 1500, up=True, carrier=True, device=PF)
        self.link = Link("eth2", 9, OWN_MAC, 1500, up=False, carrier=False, device=VF)

    def read(self, pf_netdev: str, vf_index: int) -> VfSettings:
        return self.settings

    def apply(self, pf_netdev: str, vf_index: int, settings: VfSettings) -> None:
        self.pf_has_set = self.pf_has_set or settings.mac is not None
        self.settings = replace(self.settings, mac=settings.mac or self.settings.mac)

    def find(self, name: str, netns: int | None = None) -> Link | None:
        return self.link if (name, netns) == (self.link.name, self.where) else None

    def find_device(self, device: str, netns: int | None = None) -> Link | None:
        return self.link if (device, netns) == (VF, self.where) else None

    def find_netdev(self, device: str) -> Link | None:
        return self.uplink if device == PF else self.find_device(device)

    def guids(self, pf_netdev: str, vf_index: int) -> tuple[str, str] | None:
        return None

    def find_rdma(self, device: str) -> RdmaLink | None:
        return None

    def move_in(self, link: Link, netns: int, change: LinkChange) -> None:
        self.where = netns
        self.change(link, change, netns)

    def move_out(self, link: Link, netns: int, change: LinkChange) -> None:
        self.where = None
        self.change(link, change)

    def change(self, link: Link, change: LinkChange, netns: int | None = None) -> None:
        assert netns == self.where
        if change.mac is not None and change.mac != self.link.mac:
            if self.pf_has_set:
                raise NetlinkFailed("change the MAC", errno.EADDRNOTAVAIL, "Cannot assign requested address")
            self.link = replace(self.link, mac=change.mac)
        self.link = replace(self.link, name=change.name or self.link.name, mtu=change.mtu or self.link.mtu)
        if change.up is False and self.link.up and not self.deaf and self.settings.mac:
            self.link = replace(self.link, mac=self.settings.mac)
        if change.up is not None:
            self.link = replace(self.link, up=change.up)

    def tcx_programs(self, link: Link) -> tuple[TcxProgram, ...]:
        return ()

    def detach_tcx(self, link: Link, programs: tuple[int, ...], links: tuple[int, ...]) -> tuple[TcxProgram, ...]:
        assert (programs, links) == ((), ())
        return ()


def device(address: str, **more: object) -> PciDevice:
    facts = PciDevice(address, ("pci0000:3a", address), 0x020000, 0x8086, 0x10C9, "igb", 0, None)
    return replace(facts, **more)  # type: ignore[arg-type]


UPLINK = Netdev("eth0", 2, "52:54:00:00:00:01", 1500, "up", True, LinkLayer.ETHERNET, 1000)
SNAPSHOT = Snapshot(
    (device(PF, netdevs=(UPLINK,), vfs=(VF,), sriov_totalvfs=7), device(VF, physfn=PF, vf_index=0, driver="igbvf"))
)


def target() -> Target:
    return Target(VF, "rdma/vf", "c1", "net1", "vf", netconf.from_document({"deviceID": VF, "mac": WANTED_MAC}))


def attachment(undo: Undo) -> Attachment:
    owner = Owner("c1", "net1", PodRef("default", "pod"), NetnsId(4, 4026531840))
    return Attachment(
        1, owner, "net1", VF, "rdma/vf", AttachmentState.DETACHING, undo, "boot", "/run/netns/x", {}, None, 0
    )


def test_the_vf_fetches_its_mac_from_the_pf_and_gets_its_own_back(tmp_path: Path) -> None:
    host: Any = Igb(tmp_path)
    in_host = host.link
    in_pod = replace(in_host, name="net1", mac=WANTED_MAC, up=True)
    planned = vf.plan(host, SNAPSHOT, target())

    vf.enter(host, planned, POD)
    assert (host.find("net1", POD), host.find("eth2")) == (in_pod, None)

    vf.leave(host, SNAPSHOT, attachment(planned.undo), POD)
    assert (host.find("net1", POD), host.find("eth2")) == (None, in_host)


def test_a_mac_that_the_vf_does_not_get_is_an_error_that_names_both(tmp_path: Path) -> None:
    host: Any = Igb(tmp_path, deaf=True)
    planned = vf.plan(host, SNAPSHOT, target())
    with pytest.raises(HardwareError, match=f"takes no MAC {WANTED_MAC}: its PF gives it {OWN_MAC}"):
        vf.enter(host, planned, POD)
