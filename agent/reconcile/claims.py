"""DRA claims that are nobody's any more.

Whether a claim is anybody's kubelet says in its own time, by unpreparing it. Where it does not, because it has lost its
notes, the API server decides, once nothing else on the node speaks for the claim.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from agent.edits.specs import Specs, file_of_claim
from agent.errors import Refused, Unavailable
from agent.ledger import Ledger
from agent.model.allocation import Claim, ClaimState
from agent.reconcile.view import Outside, View
from agent.state import Latest
from cni.pod_devices import ClaimReader, groups_of, pods_of

NEW_SECONDS = 120.0
"""How old a claim must be before its pods' absence from kubelet's list means anything."""
ASK_SECONDS = 600.0
"""How long after a question about a claim the API server is asked again."""

SLOW_SECONDS = 5.0
"""After so long no further question is asked in a round: all other healing waits for the answers."""

log = logging.getLogger(__name__)


class Claims:
    """Ends claims of nobody."""

    name = "claims"

    def __init__(
        self,
        ledger: Ledger,
        specs: Specs,
        outside: Outside,
        reader: Latest[ClaimReader | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`reader` asks the API server; None while nobody can."""
        self._ledger = ledger
        self._specs = specs
        self._outside = outside
        self._reader = reader
        self._clock = clock
        self._asked_at: dict[str, float] = {}

    def heal(self, view: View) -> None:
        """Look at all claims. Raises Unavailable if a spec cannot be removed."""
        reader = self._reader.value
        if reader is None:
            return
        claims = self._ledger.claims()
        began = self._clock()
        for claim in claims:
            if self._is_spoken_for(claim, view):
                self._asked_at.pop(claim.ref.uid, None)
                continue
            try:
                if self._is_due(claim) and not self._is_reserved(claim, reader):
                    self._end(claim)
            except Unavailable as error:
                log.info("whether claim %s is reserved is not known: %s", claim.ref, error)
                if self._clock() - began > SLOW_SECONDS and not isinstance(error, Refused):
                    # The server would be silent about the next claim, too.
                    self._asked_at |= {each.ref.uid: self._clock() for each in claims}
            if self._clock() - began > SLOW_SECONDS:
                return

    def _is_spoken_for(self, claim: Claim, view: View) -> bool:
        """Tell whether anybody on the node has the claim, or may have."""
        if view.pods is None or (view.asks_runtime and view.sandboxes is None):
            return True
        if claim.since > view.asked_at - NEW_SECONDS or self._ledger.attachments_of_claim(claim):
            return True
        # A pod of the same name may be another one, whose claim waits for what this one has.
        is_over = claim.state is ClaimState.UNPREPARING
        if not is_over and any((pod.namespace, pod.name) in view.pods for pod in claim.pods):
            return True
        return any(sandbox.ready and claim.is_for(sandbox.pod) for sandbox in view.sandboxes or ())

    def _is_due(self, claim: Claim) -> bool:
        now = self._clock()
        if now - self._asked_at.get(claim.ref.uid, -ASK_SECONDS) < ASK_SECONDS:
            return False
        self._asked_at[claim.ref.uid] = now
        return True

    def _is_reserved(self, claim: Claim, reader: ClaimReader) -> bool:
        found = reader.get(claim.ref)
        if found is None:
            return False
        pods = tuple(pods_of(found))
        if groups_of(found):
            return True  # of its pods the books know those that ADD has found
        if pods and pods != claim.pods:
            self._ledger.set_claim_pods(claim.ref.uid, pods)
        return bool(pods)

    def _end(self, claim: Claim) -> None:
        """Do what kubelet would have had done. From the first step on nothing of the claim comes into a pod."""
        self._ledger.set_claim_state(claim.ref.uid, ClaimState.UNPREPARING)
        if self._ledger.attachments_of_claim(claim):
            self._ledger.set_claim_state(claim.ref.uid, claim.state)
            return
        self._specs.remove(file_of_claim(claim.ref.uid))
        self._ledger.remove_claim(claim.ref.uid)
        self._asked_at.pop(claim.ref.uid, None)
        log.warning("claim %s was still in the books, and nobody has it any more", claim.ref)
        self._outside.count("claim-unprepare", "orphan")
