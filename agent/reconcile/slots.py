"""Slots that are bound for sandboxes that are no more."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from agent.config import Config
from agent.edits.specs import Specs
from agent.kubelet import checkpoint
from agent.ledger import Ledger
from agent.model.allocation import Attachment, Hold
from agent.reconcile.view import Outside, View
from agent.state import Latest

SANDBOX_SECONDS = 240.0
"""How long a runtime may take from the ADD until it lists the sandbox: kubelet gives it as long to make one (twice its
runtimeRequestTimeout). containerd lists a sandbox when all of it stands."""

log = logging.getLogger(__name__)


class Slots:
    """Lets go of what was bound for sandboxes that are over."""

    name = "slots"

    def __init__(self, config: Latest[Config], ledger: Ledger, specs: Specs, outside: Outside) -> None:
        self._config = config
        self._ledger = ledger
        self._specs = specs
        self._outside = outside

    def heal(self, view: View) -> None:
        """Look at all slots that are bound."""
        rows = self._ledger.attachments()
        over = [slot for slot in self._ledger.bound_slots() if is_over(slot, view, rows, self.is_noted)]
        for slot in self._specs.let_go(over):
            log.warning("%s was still bound for pod %s, which is gone", slot.key, slot.pod)
            self._outside.count("slot-release", "sandbox-gone")

    def is_noted(self, slot: Hold) -> bool:
        """Whether kubelet's checkpoint counts a slot to the pod that it is bound for. True if it cannot be read."""
        noted = checkpoint.entries(self._config.value.kubelet_dir)
        if noted is None:
            return (self._config.value.kubelet_dir / checkpoint.FILE).exists()
        uid = slot.pod.uid if slot.pod is not None else ""
        return any(slot.key in entry.unit_ids and uid in ("", entry.pod_uid) for entry in noted)


def is_over(
    slot: Hold,
    view: View,
    rows: Collection[Attachment] = (),
    is_noted: Callable[[Hold], bool] = lambda _: False,
) -> bool:
    """Tell whether the sandbox that a slot is bound for is no more, for certain.

    A kubelet that has restarted while the API server is away lists none but static pods, though the others run. It
    strikes nothing off its checkpoint before it knows them again: `is_noted` tells what stands there.
    """
    if slot.bound_at >= view.asked_at:
        return False  # its ADD may have begun since
    if any((row.owner.container_id, row.device) == (slot.container_id, slot.device) for row in rows):
        return False
    if slot.pod is None:
        return False  # whose it is has still to be found out
    if view.sandboxes is not None and slot.container_id:
        is_new = slot.bound_at >= view.asked_at - SANDBOX_SECONDS
        return not is_new and all(sandbox.sandbox_id != slot.container_id for sandbox in view.sandboxes)
    if not view.pods or slot.pod.names in view.pods:
        return False
    return not is_noted(slot)
