"""Units that kubelet has granted: what it replays to their containers, and their CDI specs.

At the start, before anybody is served, and each minute; in between specs follow each offer (`deviceplugin.plugins`).
Containers whose answer names device files cannot be helped: their units become unhealthy, so that kubelet
admits no other pod with them, and a condition names them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from agent.config import Config
from agent.edits.unit_specs import Misled, UnitSpecs, misled
from agent.kubelet import checkpoint
from agent.kubelet.checkpoint import Answer, Entry, answer_of
from agent.kubelet.podresources import HeldUnit
from agent.ledger import Ledger
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
        by_name = [entry for entry, answer in answers.items() if answer is not None and answer.names_ours]
        self._specs.adopt(by_name, offer, config.resources)
        for _ in self._specs.renew(offer, config.resources):
            self._outside.count("spec-write", "renumbered")
        for _ in self._specs.tidy():
            self._outside.count("spec-remove", "grant-gone")

    def _compare(self, entries: Sequence[Entry], offer: Offer, view: View) -> None:
        """Withhold the units of containers that would get another's device."""
        names = {resource.name for resource in self._config.value.resources}
        granted = {hold.key: hold.devices for hold in self._ledger.holds()}
        found = misled([e for e in entries if not self._is_over(e, granted, view)], granted, names, offer)
        units = frozenset((one.entry.resource_name, unit_id) for one in found for unit_id in one.entry.unit_ids)
        sentences = [_sentence(one, self._pod(one.entry, view)) for one in found]
        more = len(sentences) - MOST_NAMED
        text = "; ".join(sentences[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
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
        by_name = {
            hold.key
            for hold in self._ledger.holds()
            if hold.spec is not None and hold.pod is not None and not hold.is_slot
        }
        return any(answer == Answer() and not by_name.isdisjoint(entry.unit_ids) for entry, answer in answers.items())


def _of(found: Entry | HeldUnit) -> tuple[str, str]:
    return found.resource_name, found.container


def _sentence(found: Misled, pod: str) -> str:
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
