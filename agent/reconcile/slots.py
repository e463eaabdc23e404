"""Which bindings of slots have outlived their sandbox. Pure, but for the protocol of who lets go of them.

A binding with an attachment follows it: that one is healed, or not, by what its namespace and device show. One without
(a device that a program drives, or an ADD that was killed half way) follows what runtime and kubelet know.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from agent.clients.cri import Sandbox
from agent.model.allocation import Attachment, Binding
from agent.model.device import Snapshot
from agent.reconcile.grants import Claim

SANDBOX_SECONDS = 240.0
"""How long a runtime may take from the ADD until it lists the sandbox: kubelet gives it as long to make one (twice its
runtimeRequestTimeout). containerd lists a sandbox when all of it stands."""


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
    claims: Collection[Claim] | None = None
    """What kubelet said that pods hold; None if it did not answer."""


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
