"""All modes, and which of them a row of the ledger means."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from agent.errors import AttachmentError
from agent.model.allocation import Attachment
from cni.modes import infiniband, nic, vf, vfio
from cni.modes.child import Bond, Ipoib, Ipvlan, Macvlan
from cni.modes.mode import Mode

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


def mode_of(attachment: Attachment) -> Mode:
    """Return the mode that a row was written by."""
    mode = MODES.get(attachment.undo.mode)
    if mode is None:
        raise AttachmentError(
            f"{attachment.device} was attached in mode {attachment.undo.mode!r}, which this version does not know:"
            " install the version that attached it, or release the device"
        )
    return mode
