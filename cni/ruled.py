"""VFs whose adapter a pod has: it would set their MAC and their VLAN, and what they may send."""

from __future__ import annotations

from agent.ledger import Ledger
from agent.model.allocation import Attachment
from agent.model.device import Snapshot


def ruler(ledger: Ledger, snapshot: Snapshot, device: str, container_id: str) -> Attachment | None:
    """Return the row by which another container than this one has the adapter of a VF. None for what is no VF."""
    found = snapshot.by_address.get(device)
    row = ledger.attachment_on(found.physfn) if found is not None and found.physfn is not None else None
    is_others = row is not None and row.undo.mode == "nic" and row.owner.container_id != container_id
    return row if is_others else None
