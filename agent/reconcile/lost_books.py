"""Slots and claims that were lost with the books, and what lies in the folder of CDI specs and is nobody's.

Units need no copies: kubelet tells of them again (`agent.reconcile.grants`).
"""

from __future__ import annotations

import contextlib
import logging

from agent.edits.claim_metadata import CLAIM
from agent.edits.specs import SLOT, Specs, file_of_claim
from agent.errors import ClaimConflict, DeviceBusy, LedgerError, Unavailable
from agent.ledger import Ledger
from agent.model.allocation import Claim, ClaimState, Hold
from agent.reconcile.view import Outside, View

log = logging.getLogger(__name__)


class LostBooks:
    """Puts slots and claims of lost books back, then removes the specs of those that are in no books."""

    name = "lost books"

    def __init__(self, ledger: Ledger, specs: Specs, outside: Outside) -> None:
        self._ledger = ledger
        self._specs = specs
        self._outside = outside
        self._is_restored = False
        """Whether the books have the holds of this boot: they may have come in place of lost ones.

        That they are new does not tell: an agent may have begun them, and been killed before it got further.
        """

    def heal(self, view: View) -> None:
        """Look at all copies, once, then at all specs. Raises LedgerError, and Unavailable for a spec that stays."""
        if not self._is_restored:
            self._restore()
            self._is_restored = True
        self._tidy()

    def _restore(self) -> None:
        """Put back what can be. What the books did not take keeps nothing else from it, and is tried again."""
        refused: LedgerError | None = None
        with self._specs.guard:
            for copy in self._specs.copies():
                try:
                    if copy.boot_id == self._ledger.boot_id:
                        self._put_back(copy)
                except LedgerError as error:
                    refused = error
        if refused is not None:
            raise refused

    def _put_back(self, copy: Claim | Hold) -> None:
        name = f"claim {copy.ref}" if isinstance(copy, Claim) else f"slot {copy.key} of pod {copy.pod}"
        try:
            is_new = self._put_claim_back(copy) if isinstance(copy, Claim) else self._put_slot_back(copy)
        except (ClaimConflict, DeviceBusy) as error:
            log.error("%s was lost with the books, and cannot be put back: %s", name, error)
            return
        if is_new:
            log.warning("%s was lost with the books, and is in them again", name)
            self._outside.count("claim-adopt" if isinstance(copy, Claim) else "slot-rebind", "books-lost")

    def _put_slot_back(self, copy: Hold) -> bool:
        known = self._ledger.hold(copy.key)
        if known is not None and known.is_bound:
            return False
        self._ledger.bind_slots([copy])
        return True

    def _put_claim_back(self, copy: Claim) -> bool:
        uid, known = copy.ref.uid, self._ledger.claim(copy.ref.uid)
        claim, name = known or self._ledger.prepare_claim(copy), file_of_claim(uid)
        # Put back now, or by an agent that was killed. Another version may have spelled the spec otherwise.
        if claim.state is ClaimState.PREPARING and self._specs.is_there(name):
            with contextlib.suppress(Unavailable):  # which is told when all specs are looked at
                self._specs.sync([name])
                self._ledger.set_claim_state(uid, ClaimState.PREPARED)
        return known is None

    def _tidy(self) -> None:
        """Have specs of slots that are bound and of claims that are in the books, and no other ones.

        One of an earlier boot would name what may be another's now. That of a claim comes back when kubelet has it
        prepared, which it does before it makes a container.
        """
        for start, reason in ((SLOT, "slot-gone"), (CLAIM, "claim-gone")):
            for name in self._specs.tidy(start):
                log.warning("the CDI spec of %s is of no pod, and is removed", name)
                self._outside.count("spec-remove", reason)
