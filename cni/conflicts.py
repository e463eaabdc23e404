"""What keeps a device out of a pod: others in pods have it, have its adapter, or have a part of it."""

from __future__ import annotations

from agent.errors import DeviceBusy, RequestInvalid
from agent.hardware.host import Child, Link
from agent.ledger import Ledger
from agent.model.allocation import Attachment, AttachmentState, Owner
from agent.model.device import Snapshot
from cni.modes import nic
from cni.modes.mode import Planned, Target

SORTS = ("macvlan", "ipvlan")
"""Kinds of children of which an interface carries one alone."""


def pf_in_pod(ledger: Ledger, snapshot: Snapshot, device: str, container_id: str) -> Attachment | None:
    """Return the row by which another container than this one has the PF of a VF. None for what is no VF.

    That one would set the VF's MAC and its VLAN, and what it may send.
    """
    found = snapshot.by_address.get(device)
    row = ledger.attachment_on(found.physfn) if found is not None and found.physfn is not None else None
    is_others = row is not None and row.undo.mode == "nic" and row.owner.container_id != container_id
    return row if is_others else None


def refuse_second_interface(owner: Owner, row: Attachment) -> None:
    """Refuse a device that the same sandbox has under another interface: no waiting can help."""
    if row.owner.container_id == owner.container_id != "" and row.owner != owner:
        raise RequestInvalid(
            f"{row.device} is in this pod already, attached by the call for {row.owner.cni_ifname}: let either"
            " the chained plugin or Multus attach the pod's VFs, not both"
        )


def refuse_shared(ledger: Ledger, snapshot: Snapshot, owner: Owner, target: Target, planned: Planned) -> None:
    """Refuse to take an adapter away that pods have a part of: its VFs, or what was made upon its interface.

    From another namespace it could not give back what it enforces on VFs, and the pod with it would rule them.
    The kernel shows an interface's uppers in its own namespace only. So a VF waits, too, while another pod has
    its adapter, and so does what is to be made upon an interface that is about to move.
    """
    row = pf_in_pod(ledger, snapshot, planned.device, owner.container_id)
    if row is not None:
        raise DeviceBusy(f"{planned.device} is ruled by {row.device}, which pod {row.owner.pod} has")
    if "kind" in planned.undo.extra and planned.link is not None:
        row = ledger.attachment_on(nic.device_of(planned.link))
        if row is not None and row.state is not AttachmentState.DETACHING:
            raise DeviceBusy(f"{planned.link.name} is on its way into pod {row.owner.pod}")
    if planned.child is not None and planned.link is not None and planned.child.kind in SORTS:
        _refuse_mixed(ledger, planned.child, planned.link)
    if target.mode != "nic":
        return
    assert planned.link is not None
    for row in ledger.attachments():
        facts = snapshot.by_address.get(row.device)
        is_vf = facts is not None and facts.physfn == planned.device
        if is_vf or ("kind" in row.undo.extra and row.undo.netdev == planned.link.name):
            raise DeviceBusy(f"{planned.link.name} is needed by {row.device}, which pod {row.owner.pod} has")


def _refuse_mixed(ledger: Ledger, child: Child, parent: Link) -> None:
    """Refuse what the kernel would refuse without a reason, or do at the cost of others.

    An interface carries macvlans or ipvlans. All ipvlans upon it have one mode: the last one made would change it for
    all (drivers/net/ipvlan/ipvlan_main.c, ipvlan_link_new).
    """
    for row in ledger.attachments():
        kind, mode = row.undo.extra.get("kind"), row.undo.extra.get("ipvlan_mode")
        if kind not in SORTS or row.undo.netdev != parent.name or row.state is AttachmentState.DETACHING:
            continue
        if kind != child.kind or mode not in (None, child.mode):
            held = f"{kind}s" if mode is None else f"ipvlans of mode {mode}"
            wanted = child.kind if kind != child.kind else f"{child.kind} of mode {child.mode}"
            raise DeviceBusy(
                f"{parent.name} carries {held}, one of pod {row.owner.pod} among them, so it can carry no {wanted}:"
                " give all networks upon it one mode, or the one of them another master"
            )
