"""What a mode asks of a VF's PF: where its interface is at this moment, and settings before and after."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Set
from dataclasses import fields, replace

from agent.errors import DeviceGone, HardwareError, NetlinkFailed, RequestInvalid
from agent.hardware.host import Host, Link
from agent.hardware.sysfs import pci, trunk
from agent.model.allocation import Attachment, Undo, VfSettings
from agent.model.device import PciDevice, Snapshot, drives_for_programs

NO_MAC = "00:00:00:00:00:00"
NEUTRAL = VfSettings(
    vlan=0,
    vlan_qos=0,
    vlan_proto="802.1q",
    min_tx_rate=0,
    max_tx_rate=0,
    spoofchk=True,
    trust=False,
    link_state="auto",
)
"""What drivers begin with, for PFs that cannot be asked. Their MACs are kept by the VFs."""

log = logging.getLogger(__name__)


def with_settings(host: Host, facts: PciDevice, undo: Undo, wanted: VfSettings, network: str = "") -> Undo:
    """Add to an undo record what the PF enforces now, as far as it is about to be changed.

    Raises HardwareError if the PF cannot be asked, or not be told of a trunk, RequestInvalid for a rate that is above
    its speed. `network` is what errors name.
    """
    if wanted.is_empty:
        return undo
    pf = interface(host, facts.address)
    if facts.vf_index is None or pf is None:
        raise HardwareError(
            f"the PF of {facts.address}, {facts.physfn}, has no interface: VLAN, MAC, rates cannot be set"
        )
    _refuse_rates(host, pf.name, wanted)
    before = _reading(host, pf.name, facts.vf_index)
    if before.mac is None:
        log.warning("%s has too many VFs to be asked about one: %s will get back the usual", pf.name, facts.address)
        before = replace(NEUTRAL, mac=undo.mac or None, trunk=before.trunk)
    if wanted.trunk is not None:
        _require_trunk(host, pf.name, facts.vf_index, network, None if wanted.vlan is not None else before.vlan)
    if before.mac == NO_MAC and undo.mac and facts.driver == "mlx5_core" and facts.rdma_devices:
        # mlx5 makes the VF's node GUID from this MAC; with none, RDMA-CM fails until the driver is bound anew.
        before = replace(before, mac=undo.mac)
    return replace(undo, pf_netdev=pf.name, vf_index=facts.vf_index, settings=only(before, wanted.document().keys()))


def _refuse_rates(host: Host, pf: str, wanted: VfSettings) -> None:
    """Raise RequestInvalid for a rate above a PF's speed: not all drivers do. Without a link it is not known."""
    if not (wanted.min_tx_rate or wanted.max_tx_rate):
        return
    try:
        speed = int((host.root / "sys/class/net" / pf / "speed").read_text())
    except (OSError, ValueError):
        return
    for key, rate in (("min_tx_rate", wanted.min_tx_rate), ("max_tx_rate", wanted.max_tx_rate)):
        if rate and rate > speed > 0:
            raise RequestInvalid(f"{key} {rate} is above the speed of {pf}, {speed} Mbit/s: take at most that")


def _reading(host: Host, pf: str, vf_index: int) -> VfSettings:
    """Read what a PF enforces on one VF; where it has too many to be asked about one, no more than sysfs has of it."""
    try:
        return host.vf_control.read(pf, vf_index)
    except NetlinkFailed as error:
        if error.errno != errno.EMSGSIZE:
            raise
    return VfSettings(trunk=trunk.read(host.root, pf, vf_index))


def _require_trunk(host: Host, pf: str, vf_index: int, network: str, vlan: int | None) -> None:
    """Raise HardwareError where no trunk can be set. `vlan` is what the PF tags with, and goes on to."""
    problem = trunk.problem(host.root, pf, vf_index)
    if not problem and vlan:
        problem = f"the PF tags for it, with VLAN {vlan}: add `vlan: 0` beside trunk, or take that off"
    if problem:
        raise HardwareError(f"trunk of network {network} cannot be set for VF {vf_index} of {pf}: {problem}")
    pci.require_writable(host.root, "trunk")


def apply(host: Host, device: str, undo: Undo, settings: VfSettings) -> None:
    """Make the PF enforce settings on its VF, and read them back. Raises HardwareError."""
    if settings.is_empty or undo.vf_index is None:
        return
    host.vf_control.apply(_uplink(host, device, undo).name, undo.vf_index, settings)


def restore(host: Host, device: str, undo: Undo) -> None:
    """Make the PF enforce on its VF what it did before, and read it back. Raises HardwareError.

    Only what is otherwise is set: what the driver has refused once (igb any link state, or a rate while there is
    no link), it would refuse again, and the VF would never be free.
    """
    if undo.settings.is_empty or undo.vf_index is None:
        return
    pf, before = _uplink(host, device, undo), undo.settings
    if before.trunk is not None and not trunk.exists(host.root, pf.name, undo.vf_index):
        log.warning("%s has another driver now, which keeps no trunk of %s", pf.name, device)
        before = replace(before, trunk=None)
    now = _reading(host, pf.name, undo.vf_index)
    host.vf_control.apply(pf.name, undo.vf_index, lacking(before, now))


def _uplink(host: Host, device: str, undo: Undo) -> Link:
    pf = interface(host, device)
    if pf is None:
        raise HardwareError(f"the PF of {device} (it was called {undo.pf_netdev}) has no interface in the host")
    return pf


def lacking(wanted: VfSettings, now: VfSettings) -> VfSettings:
    """Keep of settings what is otherwise now, with all that the kernel sets together with it."""
    return only(wanted, {name for name, value in wanted.document().items() if value != getattr(now, name)})


_TOGETHER = (("vlan", "vlan_qos", "vlan_proto"), ("min_tx_rate", "max_tx_rate"))
_GROUPS = (*_TOGETHER, *((f.name,) for f in fields(VfSettings) if not any(f.name in group for group in _TOGETHER)))


def differences(host: Host, attachment: Attachment) -> list[str]:
    """Tell what the PF enforces otherwise than it was asked to."""
    undo = attachment.undo
    if undo.vf_index is None:
        return []
    pf = interface(host, attachment.device)
    if pf is None:
        return [f"the PF of {attachment.device} has no interface in the host"]
    wanted = attachment.request["settings"]
    now = _reading(host, pf.name, undo.vf_index).document() if wanted else {}
    return [
        f"the PF {pf.name} has {name} {now[name]!r}, not {asked!r}"
        for name, asked in wanted.items()
        if now.get(name, asked) != asked
    ]


def given_mac(host: Host, facts: PciDevice) -> str:
    """Tell which MAC a PF has given to its VF; empty where it has given none, or does not tell."""
    pf = interface(host, facts.address)
    if facts.vf_index is None or pf is None:
        return ""
    try:
        mac = host.vf_control.read(pf.name, facts.vf_index).mac
    except HardwareError as error:
        log.info("the MAC of %s is not known: %s", facts.address, error)
        return ""
    return mac if mac is not None and mac != NO_MAC else ""


def known(snapshot: Snapshot, device: str) -> PciDevice:
    """Return what is known of a device. Raises DeviceGone."""
    facts = snapshot.by_address.get(device)
    if facts is None:
        raise DeviceGone(device, "among the node's PCI devices; its PF's sriov_numvfs may have been changed")
    return facts


def is_away(host: Host, device: str) -> bool:
    """Tell whether a device is there without its interface, which only a namespace that lives can keep."""
    return exists(host, device) and host.find_netdev(device) is None and can_have_interface(host, device)


def interface(host: Host, device: str) -> Link | None:
    """Find the interface of a VF's PF, whatever it is called now."""
    address = _target(host, device, "physfn")
    return host.find_netdev(address) if address is not None else None


def driver(host: Host, device: str) -> str | None:
    """Name the driver that a device is bound to at this moment."""
    return _target(host, device, "driver")


def can_have_interface(host: Host, device: str) -> bool:
    """Tell whether a device is bound to a driver that gives it an interface, in whichever namespace."""
    bound = driver(host, device)
    return bound is not None and not drives_for_programs(bound)


def exists(host: Host, device: str) -> bool:
    """Tell whether the PCI device is there at this moment; a snapshot may have missed it."""
    return os.path.exists(f"{host.root}/sys/bus/pci/devices/{device}")


def _target(host: Host, device: str, link: str) -> str | None:
    try:
        return os.path.basename(os.readlink(f"{host.root}/sys/bus/pci/devices/{device}/{link}"))
    except OSError:
        return None


def only(settings: VfSettings, names: Set[str]) -> VfSettings:
    """Keep some of the settings, with all that the kernel sets together with these."""
    kept = (name for group in _GROUPS if names & set(group) for name in group)
    return VfSettings(**{name: getattr(settings, name) for name in kept})
