"""What is wrong with a row of the ledger: `look` finds out what is known of it, and `condition` decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from agent.hardware import netns as namespaces
from agent.model.allocation import Attachment, AttachmentState
from cni.finding import NOBODY, UNKNOWN
from cni.modes.choice import mode_of
from cni.node import Node

REBOOTED = "rebooted"
OWNER_GONE = "owner-gone"
BROUGHT_BACK = "brought-back"
PodKnown = Callable[[Attachment], bool | None]
"""Tells whether kubelet or the runtime know a row's pod; None if they cannot be asked."""


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


def condition(row: RowFacts) -> str | None:
    """Name what is wrong with a row that nobody works on: one word that says why it is undone. None if nothing is.

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


def look(node: Node, row: Attachment, pod_known: PodKnown) -> RowFacts:
    """Look at what a row is about. The caller holds the device's lock, so no ADD is in flight."""
    this_boot = row.boot_id == node.ledger.boot_id
    namespace_lives = this_boot and namespaces.is_at(row.owner.netns, row.netns_path)
    stands = this_boot and row.state is AttachmentState.ATTACHED
    may_be_gone, nobodys = stands and not namespace_lives, stands and namespace_lives and is_nobodys(row)
    away = (may_be_gone or nobodys) and mode_of(row).away(node.host, row)
    return RowFacts(
        this_boot=this_boot,
        state=row.state,
        namespace_lives=namespace_lives,
        away=may_be_gone and away,
        tells=bool(row.undo.netdev) or row.undo.mode in ("vfio", "bond"),  # whose `away` looks at the path
        pod_known=pod_known(row) if may_be_gone else None,
        is_orphan=nobodys and not away,
    )


def owner_alive(node: Node, row: Attachment) -> bool:
    """Tell whether an attachment's pod may still use the device.

    The namespace at its path decides. Where that path cannot be seen, a device that is not back
    in the host still sits in a namespace that lives, and is left alone.
    """
    return condition(look(node, replace(row, state=AttachmentState.ATTACHED), nobody_to_ask)) is None


def nobody_to_ask(row: Attachment) -> bool | None:
    """Stand in for kubelet and the runtime where neither can be asked."""
    return None


def is_nobodys(row: Attachment) -> bool:
    """Tell whether a device was found in a namespace, and neither container nor pod is known to have it there."""
    return row.owner.container_id == UNKNOWN and row.owner.pod == NOBODY and bool(row.undo.netdev)
