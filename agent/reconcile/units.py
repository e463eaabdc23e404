"""Units and slots that kubelet has granted: what it replays to their containers, their bindings and CDI specs.

At the start, before anybody is served, and each minute; in between specs follow each offer (`deviceplugin.plugins`).
Containers whose answer names device files cannot be helped: their units become unhealthy, so that kubelet
admits no other pod with them, and a condition names them.

A binding with an attachment follows it: that one is healed, or not, by what its namespace and device show. One without
(a device that a program drives, or an ADD that was killed half way) follows what runtime and kubelet know.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from agent.config import Config
from agent.edits.unit_specs import Misled, UnitSpecs, misled
from agent.kubelet import checkpoint
from agent.kubelet.checkpoint import Answer, Entry, answer_of
from agent.kubelet.cri import Sandbox
from agent.kubelet.podresources import HeldUnit
from agent.ledger import Ledger
from agent.model.allocation import Attachment, Binding
from agent.model.device import Snapshot
from agent.offer.offer import Offer
from agent.reconcile.view import Outside, View
from agent.state import Latest

MOST_NAMED = 8

log = logging.getLogger(__name__)


class Units:
    """Heals specs, withholds units of misled containers, and tells whether answers may have CDI names."""

    name = "units"

    def __init__(
        self,
        config: Latest[Config],
        ledger: Ledger,
        specs: UnitSpecs,
        by_cdi: Latest[bool],
        outside: Outside,
        settled: Latest[bool],
    ) -> None:
        """`by_cdi` is set; `settled` says whether the grants have agreed with kubelet's word since the start."""
        self._config = config
        self._ledger = ledger
        self._specs = specs
        self._by_cdi = by_cdi
        self._outside = outside
        self._settled = settled

    def heal(self, view: View) -> None:
        """Look at all specs and answers. Raises LedgerError, and Unavailable if a spec cannot be written or removed."""
        config, offer = self._config.value, self._outside.offer()
        entries = checkpoint.entries(config.kubelet_dir)
        answers = {entry: answer_of(entry.answer) for entry in entries or ()}
        resolves = self._outside.resolves_cdi is not False and is_writable(config.cdi_dir)
        drops = self._drops_names(answers)
        if drops and self._by_cdi.value:
            log.error("kubelet drops CDI names from answers: set cdiNames: false, or update it to 1.29 or later")
        self._by_cdi.set(config.cdi_names and resolves and not drops)
        if entries is not None:
            self._compare(entries, offer, view)
        self._specs.look()
        by_name = [entry for entry, answer in answers.items() if answer is not None and answer.names_ours]
        self._specs.adopt(by_name, offer, config.resources)
        for _ in self._specs.renew(offer, config.resources):
            self._outside.count("spec-write", "renumbered")
        for _ in self._specs.rewrite():
            self._outside.count("spec-write", "mended")
        for _ in self._specs.tidy():
            self._outside.count("spec-remove", "grant-gone")

    def rewrite(self) -> Sequence[str]:
        """Write the specs that are missing or say something else, and list their units. Raises AgentError."""
        return self._specs.rewrite()

    def _compare(self, entries: Sequence[Entry], offer: Offer, view: View) -> None:
        """Withhold the units of containers that would get another's device."""
        names = {resource.name for resource in self._config.value.resources}
        granted = {grant.unit_id: grant.devices for grant in self._ledger.grants()}
        found = misled([e for e in entries if not self._is_over(e, granted, view)], granted, names, offer)
        units = frozenset((one.entry.resource_name, unit_id) for one in found for unit_id in one.entry.unit_ids)
        told = [_told(one, self._pod(one.entry, view)) for one in found]
        more = len(told) - MOST_NAMED
        text = "; ".join(told[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
        self._outside.misled(units, text or None)

    def _is_over(self, entry: Entry, granted: Collection[str], view: View) -> bool:
        """Tell whether a container is gone. kubelet drops it with its next Allocate, and unhealthy units get none."""
        if not self._settled.value or view.held_units is None:
            return False
        held = {h.unit_id for h in view.held_units if h.resource_name == entry.resource_name}
        runs = {sandbox.pod.uid for sandbox in view.sandboxes or () if sandbox.ready}
        return entry.pod_uid not in runs and all(i not in held and i not in granted for i in entry.unit_ids)

    def _pod(self, entry: Entry, view: View) -> str:
        """Name the pod of a container: as kubelet or the books do, or by its UID."""
        held = [h.pod for h in view.held_units or () if h.unit_id in entry.unit_ids and _of(h) == _of(entry)]
        noted = [pod for i in entry.unit_ids if (pod := self._ledger.pod_of(i)) is not None]
        return str(next(iter((*held, *noted)), f"with UID {entry.pod_uid}"))

    def _drops_names(self, answers: Mapping[Entry, Answer | None]) -> bool:
        """Tell whether kubelet has kept an answer of ours without the CDI names that were all of it (before 1.29)."""
        by_name = {g.unit_id for g in self._ledger.grants() if g.spec is not None and g.pod is not None}
        return any(answer == Answer() and not by_name.isdisjoint(entry.unit_ids) for entry, answer in answers.items())


def _of(found: Entry | HeldUnit) -> tuple[str, str]:
    return found.resource_name, found.container


def _told(found: Misled, pod: str) -> str:
    of = ", ".join(found.now_of)
    units = ", ".join(found.entry.unit_ids[:2]) + (" …" if len(found.entry.unit_ids) > 2 else "")
    return (
        f"container {found.entry.container} of pod {pod} has {units} of {found.entry.resource_name}, and would find"
        f" {found.path} there, which is a file of {of} by now: recreate the pod"
    )


def is_writable(folder: Path) -> bool:
    """Tell whether a folder can be written to, or made."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    return os.access(there, os.W_OK | os.X_OK)


SANDBOX_SECONDS = 240.0
"""How long a runtime may take from the ADD until it lists the sandbox: kubelet gives it as long to make one (twice its
runtimeRequestTimeout). containerd lists a sandbox when all of it stands."""


class Slots(Protocol):
    """Who binds slots. Methods block."""

    def release(self, is_over: Callable[[Binding], bool]) -> tuple[Binding, ...]:
        """Let go of bindings whose time is over, and return them."""

    def is_noted(self, binding: Binding) -> bool:
        """Tell whether kubelet's checkpoint counts a slot to the pod that it is bound for."""

    def mend(self, known: SlotView, snapshot: Snapshot) -> tuple[tuple[str, str], ...]:
        """Make CDI specs and bindings fit each other; tell what was done: (action, slot)."""


@dataclass(frozen=True, slots=True)
class SlotView:
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
        known = SlotView(view.asked_at, self._ledger.attachments(), view.pods, view.sandboxes, view.held_units)
        for binding in self._slots.release(partial(is_over, known=known, is_noted=self._slots.is_noted)):
            log.warning("%s was still bound for pod %s, which is gone", binding.unit_id, binding.pod)
            self._outside.count("slot-release", "sandbox-gone")
        for action, slot in self._slots.mend(known, self._snapshot.value):
            log.info("%s: %s", action, slot)
            self._outside.count(action, "mended")


def is_over(binding: Binding, known: SlotView, is_noted: Callable[[Binding], bool] = lambda binding: False) -> bool:
    """Tell whether a binding's sandbox is no more, for certain.

    A kubelet that has restarted while the API server is away lists none but static pods, though the others run. It
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
