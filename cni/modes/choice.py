"""Which mode a call or a row of the ledger means."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from agent.errors import AttachmentError
from agent.model.allocation import Attachment
from agent.model.device import Snapshot
from cni.modes import vf
from cni.modes.mode import Mode
from cni.netconf import NetConf

MODES: Mapping[str, Mode] = MappingProxyType({"vf": vf})


def name_for(conf: NetConf, snapshot: Snapshot) -> str:
    """Choose the mode for a configuration."""
    return "vf"


def mode_of(attachment: Attachment) -> Mode:
    """Return the mode that a row was written by."""
    mode = MODES.get(attachment.undo.mode)
    if mode is None:
        raise AttachmentError(
            f"{attachment.device} was attached in mode {attachment.undo.mode!r}, which this version does not know:"
            " install the version that attached it, or release the device"
        )
    return mode
