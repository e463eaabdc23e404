"""Bindings of slots that have outlived their sandbox, and CDI specs that do not fit them.

A binding with an attachment follows it: that one is healed, or not, by what its namespace and device show. One without
(a device that a program drives, or an ADD that was killed half way) follows what runtime and kubelet know.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from agent.kubelet.cri import Sandbox
from agent.kubelet.podresources import HeldUnit
from agent.ledger import Ledger
from agent.model.allocation import Attachment, Binding
from agent.model.device import Snapshot
from agent.reconcile.view import Outside, View
from agent.state import Latest

SANDBOX_SECONDS = 240.0
"""How long a runtime may take from the ADD until it lists the sandbox: kubelet gives it as long to make one (twice its
runtimeRequestTimeout). containerd lists a sandbox when all of it stands."""

log = logging.getLogger(__name__)


class Slots(Protocol):
    """Who binds slots. Methods block."""

    def release(self, is_over: Callable[[Binding], bool]) -> tuple[Binding, ...]:
        """Let go of bindings whose time is over, and return them."""

    def is_noted(self, binding: Binding) -> bool:
        """Tell whether kubelet's checkpoint counts a slot to the pod that it is bound for."""

    def mend(self, known: Known, snapshot: Snapshot) -> tuple[tuple[str, str], ...]:
        """Make CDI specs and bindings fit each other; tell what was done: (action, slot)."""


@dataclass(frozen=True, slots=True)
class Known:
    """What was known of pods at one moment."""

    asked_at: float
    """Seconds since the epoch, before anybody was asked."""
    attachments: Collection[Attachment]
    pods: Collection[tuple[str, str]] | None
    """Namespace and name of kubelet's pods; None if it did not answer."""
    sandboxes: Collection[Sandbox] | None
    """The runtime's; None if it did not answer, or cannot be asked."""
    held_units: Collection[HeldUnit] | None = None
    """What kubelet said that pods hold; None if it did not answer."""


class Bindings:
    """Lets go of what was bound for sandboxes that are no more, and has bindings and CDI specs agree."""

    name = "slots"

    def __init__(self, ledger: Ledger, slots: Slots, snapshot: Latest[Snapshot], outside: Outside) -> None:
        self._ledger = ledger
        self._slots = slots
        self._snapshot = snapshot
        self._outside = outside

    def heal(self, view: View) -> None:
        """Look at all bindings, then at all specs."""
        known = Known(view.asked_at, self._ledger.attachments(), view.pods, view.sandboxes, view.held_units)
        for binding in self._slots.release(partial(is_over, known=known, is_noted=self._slots.is_noted)):
            log.warning("%s was still bound for pod %s, which is gone", binding.unit_id, binding.pod)
            self._outside.count("slot-release", "sandbox-gone")
        for action, slot in self._slots.mend(known, self._snapshot.value):
            log.info("%s: %s", action, slot)
            self._outside.count(action, "mended")


def is_over(binding: Binding, known: Known, is_noted: Callable[[Binding], bool] = lambda binding: False) -> bool:
    """Tell whether a binding's sandbox is no more, for certain.

    A kubelet that has started anew while the API server is away lists none but static pods, though the others run. It
    strikes nothing off its checkpoint before it knows them again: `is_noted` tells what stands there.
    """
    if binding.since >= known.asked_at:
        return False  # its ADD may have begun since
    if any((row.owner.container_id, row.device) == (binding.container_id, binding.device) for row in known.attachments):
        return False
    if not binding.pod.name:
        return False  # whose it is has still to be found out
    if known.sandboxes is not None and binding.container_id:
        is_new = binding.since >= known.asked_at - SANDBOX_SECONDS
        return not is_new and all(sandbox.sandbox_id != binding.container_id for sandbox in known.sandboxes)
    if not known.pods or (binding.pod.namespace, binding.pod.name) in known.pods:
        return False
    return not is_noted(binding)
