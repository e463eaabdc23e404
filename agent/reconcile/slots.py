"""Which bindings of slots have outlived their sandbox. Pure, but for the protocol of who lets go of them.

A binding with an attachment follows it: that one is healed, or not, by what its namespace and device show. One without
(a device that a program drives, or an ADD that was killed half way) follows what runtime and kubelet know.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from agent.model.allocation import Attachment, Binding


class Slots(Protocol):
    """Who binds slots. Methods block."""

    def release(self, is_over: Callable[[Binding], bool]) -> tuple[Binding, ...]:
        """Let go of bindings whose time is over, and return them."""

    def mend_specs(self, claimed: Collection[str] | None) -> tuple[tuple[str, str], ...]:
        """Make the CDI specs fit the bindings; tell what was done: (action, slot)."""


@dataclass(frozen=True, slots=True)
class Known:
    """What was known of pods at one moment."""

    asked_at: float
    """Seconds since the epoch, before anybody was asked."""
    attachments: Collection[Attachment]
    pods: Collection[tuple[str, str]] | None
    """Namespace and name of kubelet's pods; None if it did not answer."""
    sandboxes: Collection[str] | None
    """The runtime's; None if it did not answer, or cannot be asked."""


def is_over(binding: Binding, known: Known) -> bool:
    """Tell whether a binding's sandbox is no more, for certain."""
    if binding.since >= known.asked_at:
        return False  # its ADD may have begun since
    if any((row.owner.container_id, row.device) == (binding.container_id, binding.device) for row in known.attachments):
        return False
    if known.sandboxes is not None:
        return binding.container_id not in known.sandboxes
    if not known.pods:
        return False  # a kubelet that has started anew while the API server is away knows none, though they run
    return (binding.pod.namespace, binding.pod.name) not in known.pods
