"""What is wrong with a row of the ledger. Pure; the caller has looked, and nobody works on the device."""

from __future__ import annotations

from dataclasses import dataclass

from agent.model.allocation import AttachmentState

REBOOTED = "rebooted"
OWNER_GONE = "owner-gone"
BROUGHT_BACK = "brought-back"


@dataclass(frozen=True, slots=True)
class RowFacts:
    """What is known of a row."""

    this_boot: bool
    state: AttachmentState
    namespace_lives: bool
    """The pod's network namespace is where it was."""
    away: bool
    """The device is where only a living namespace can keep it, though nobody may see that one."""
    tells: bool
    """Its interface shows whether it is back. A device without one (vfio) shows nothing."""
    pod_known: bool | None
    """Whether kubelet or the runtime still know the pod; None if they could not be asked."""
    is_orphan: bool = False
    """It was found in a namespace that no container is known to have; that lives, and it is there no more."""


def ailment(row: RowFacts) -> str | None:
    """Name what is wrong, in one word that says why the row is undone; None if nothing is.

    A namespace of the same number in another boot is another one. What an administrator had moved by hand and has
    brought back is free, though the namespace lives: no DEL will ever come for it. Where the kernel cannot tell that an
    owner is gone, it is gone once nobody knows its pod: rather a device too few than one with two owners.
    """
    if not row.this_boot:
        return REBOOTED
    if row.state is not AttachmentState.ATTACHED:
        return f"half-{row.state.value}"
    if row.is_orphan:
        return BROUGHT_BACK
    if row.namespace_lives or row.away:
        return None
    if not row.tells and row.pod_known is not False:
        return None
    return OWNER_GONE
