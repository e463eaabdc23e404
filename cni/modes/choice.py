"""Which mode a call or a row of the ledger means."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from agent.errors import AttachmentError, RequestInvalid
from agent.model.allocation import Attachment
from agent.model.device import LinkLayer, Snapshot
from cni.modes import infiniband, nic, vf, vfio
from cni.modes.child import Bond, Ipoib, Ipvlan, Macvlan
from cni.modes.mode import Mode
from cni.netconf import NetConf

MODES: Mapping[str, Mode] = MappingProxyType(
    {
        "vf": vf,
        "vfio": vfio,
        "nic": nic,
        "infiniband": infiniband,
        "macvlan": Macvlan(),
        "ipvlan": Ipvlan(),
        "ipoib": Ipoib(),
        "bond": Bond(),
    }
)


def name_for(conf: NetConf, snapshot: Snapshot) -> str:
    """Choose the mode for a configuration: the asked one, or what the VF shows to be."""
    if conf.ports and conf.device is None:
        return "bond"
    if conf.mode not in ("vf", "nic"):
        return conf.mode
    facts = snapshot.by_address.get(conf.device or "")
    if conf.vfio or (conf.vfio is None and facts is not None and facts.is_for_programs):
        return "vfio"  # whose `plan` refuses any other driver
    if conf.mode == "nic":
        return conf.mode
    uplink = snapshot.pf_netdev(facts) if facts is not None else None
    if uplink is not None and uplink.link_layer is LinkLayer.INFINIBAND:
        return "infiniband"
    return "vf"


def named(name: str) -> Mode:
    """Return the mode of a name. Raises RequestInvalid for one that there is none of."""
    mode = MODES.get(name)
    if mode is None:
        raise RequestInvalid(f"mode must be one of {', '.join(sorted(MODES))}, is {name!r}")
    return mode


def mode_of(attachment: Attachment) -> Mode:
    """Return the mode that a row was written by."""
    mode = MODES.get(attachment.undo.mode)
    if mode is None:
        raise AttachmentError(
            f"{attachment.device} was attached in mode {attachment.undo.mode!r}, which this version does not know:"
            " install the version that attached it, or release the device"
        )
    return mode
