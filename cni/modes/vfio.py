"""Mode `vfio`: a VF that a program in the pod drives itself, through vfio or uio.

It has no interface, so there is nothing to move: its PF's settings are all, with the GUIDs on InfiniBand, and the row
in the ledger that says whose it is. The character device reaches the container by kubelet's grant.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from agent.errors import HardwareError, RequestInvalid
from agent.hardware import netns as namespaces
from agent.hardware.host import Host, LinkChange
from agent.hardware.sysfs import pci
from agent.model.allocation import Attachment, Undo
from agent.model.device import LinkLayer, PciDevice, Snapshot, drives_for_programs
from cni.modes import guid, moving, pf
from cni.modes.mode import InterfaceFacts, Planned, Target
from cni.modes.vf import key as key
from cni.netconf import NetConf

log = logging.getLogger(__name__)


def plan(host: Host, snapshot: Snapshot, target: Target) -> Planned:
    """Find the device and record what its PF enforces. Changes nothing.

    Raises DeviceGone for a device that vanished, HardwareError for one that no program can drive or whose PF cannot
    do what was asked for, RequestInvalid for a key that is of no use here.
    """
    device, conf = target.device, target.conf
    facts = pf.known(snapshot, device)
    bound = pf.driver(host, device)
    if not drives_for_programs(bound):
        raise HardwareError(
            f"{device} is bound to {bound or 'no driver'}: bind it to vfio-pci for programs to drive it"
        )
    if conf.mtu is not None or conf.altnames:
        log.info("%s has no interface: MTU and names are up to the program that drives it", device)
    if conf.rdma and not _is_whole_and_old(facts, conf):
        key = "rdmaIsolation" if conf.kind == "ib-sriov" else "rdma"
        raise RequestInvalid(
            f"{key}: true cannot be heeded for {device}: it is bound to {bound}, which makes no RDMA device that could"
            f" go along; leave {key} out, or bind the VF to its own driver"
        )
    if conf.pkey is not None:
        raise RequestInvalid(
            f"pkey cannot be heeded for {device}: it is bound to {bound}, and the program that drives it takes its"
            " partition from the subnet manager, which gives it by GUID; leave pkey out"
        )
    if conf.function_reset:
        pci.require_writable(host.root, "functionReset")
        _require_reset(host, device)
    undo = Undo("", "", 0, up=False, mode="vfio", extra={"function_reset": conf.function_reset})
    if not conf.settings.is_empty:
        if facts.physfn is None:
            raise HardwareError(f"{device} is not a VF: nothing can enforce VLAN, MAC or rates on it")
        undo = pf.with_settings(host, facts, undo, conf.settings, conf.name)
    if conf.guid is not None and not _is_passed_over(facts, conf):
        extra = {**undo.extra, **guid.recorded_on_pf(host, snapshot, facts), "rdma_guid": conf.guid}
        undo = replace(undo, vf_index=facts.vf_index, extra=extra)
    mac = conf.settings.mac or ("" if _is_infiniband(snapshot, facts) else pf.given_mac(host, facts))
    change = LinkChange(mac=mac or None)  # which a program in the pod finds, or makes so
    return Planned(target, undo, change=change)


def enter(host: Host, planned: Planned, netns: int) -> InterfaceFacts:
    """Set the VF up on its PF."""
    undo = planned.undo
    pf.apply(host, planned.target.device, undo, planned.target.conf.settings)
    if "guids" in undo.extra:
        guid.set_on_pf(host, planned.target.device, undo, str(undo.extra["rdma_guid"]))
    return moving.facts(planned, planned.change.mac or "", 0, in_kernel=False)


def leave(host: Host, attachment: Attachment, netns: int | None) -> Sequence[str]:
    """Reset the function if that was asked for, and put its PF's settings and GUIDs back, verified. Repeatable.

    A VF that was bound to a network driver meanwhile has an interface in the host; that is left as it is.
    """
    device, undo = attachment.device, attachment.undo
    if not pf.exists(host, device):
        return ()
    if undo.extra.get("function_reset"):
        _reset_function(host, device)
    pf.restore(host, device, undo)
    guid.put_back_on_pf(host, device, undo)
    return ()


def away(host: Host, attachment: Attachment) -> bool:
    """Tell whether the pod's namespace cannot be judged from here.

    No interface tells whether it lives, so its path must.
    """
    return namespaces.is_hidden(attachment.owner.netns, attachment.netns_path)


def differences(host: Host, attachment: Attachment, netns: int, conf: NetConf) -> list[str]:
    """Tell what about an attached VF is not as it was set up."""
    bound = pf.driver(host, attachment.device)
    found = pf.differences(host, attachment) + guid.differences(host, attachment.device, attachment.undo)
    if not drives_for_programs(bound):
        found.append(f"{attachment.device} is bound to {bound or 'no driver'} now: no program can drive it")
    return found


def _is_infiniband(snapshot: Snapshot, facts: PciDevice) -> bool:
    uplink = snapshot.pf_netdev(facts)
    return uplink is not None and uplink.link_layer is LinkLayer.INFINIBAND


def _is_whole_and_old(facts: PciDevice, conf: NetConf) -> bool:
    """Tell whether this is a PF by a configuration of ib-sriov, which has no use for what is meant for VFs there."""
    return facts.physfn is None and conf.kind == "ib-sriov"


def _is_passed_over(facts: PciDevice, conf: NetConf) -> bool:
    """Tell whether a GUID means nothing: ib-kubernetes gives one for a PF too."""
    if not _is_whole_and_old(facts, conf):
        return False
    log.info("%s is not a VF and keeps its own GUID", facts.address)
    return True


def _require_reset(host: Host, device: str) -> None:
    """Raise HardwareError if the kernel offers no reset of this function alone.

    `reset_method` (Linux 5.15) lists the ways; a reset of the bus would hit its neighbours.
    """
    folder = host.root / "sys/bus/pci/devices" / device
    try:
        methods = (folder / "reset_method").read_text().split()
    except OSError:
        if not (folder / "reset").exists():
            raise HardwareError(f"{device} cannot be reset: leave functionReset out") from None
        return
    if not {"flr", "af_flr", "device_specific"} & set(methods):
        raise HardwareError(
            f"{device} has no function-level reset, only {' '.join(methods) or 'none'}: leave functionReset out"
        )


def _reset_function(host: Host, device: str) -> None:
    path = host.root / "sys/bus/pci/devices" / device / "reset"
    try:
        path.write_text("1")
    except OSError as error:
        raise HardwareError(f"function-level reset of {device} failed: {error.strerror}") from error
