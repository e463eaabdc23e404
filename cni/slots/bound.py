"""Bindings and their CDI specs, kept together: made, let go, mended, and rebuilt where the books have lost them.

The books come first: a binding without its spec is completed by the reconciler, and a spec without a binding is one
that the books have lost, or nobody's. In between the runtime knows no such device, and creates no container.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agent.config import Config
from agent.edits.cdi import SlotSpecs
from agent.errors import Unavailable
from agent.kubelet import checkpoint
from agent.ledger import Ledger
from agent.model.allocation import Binding
from agent.model.device import Snapshot
from agent.model.unit_id import UnitId
from agent.reconcile.slots import Known
from agent.state import Latest
from cni.slots import lost

log = logging.getLogger(__name__)


class BoundSlots:
    """What slots are bound to. Methods block and may run on many threads at once."""

    def __init__(self, config: Latest[Config], ledger: Ledger, specs: SlotSpecs) -> None:
        self._config = config
        self._ledger = ledger
        self._specs = specs
        self.guard = threading.Lock()
        """Held while bindings and specs change."""
        self.had_slots = any(UnitId.parse(grant.unit_id).is_slot for grant in ledger.grants())
        """Whether a pod may have slots of a resource that the configuration does not bind late any more."""
        self._told: frozenset[str] = frozenset()
        """Slots of which it was said that nobody can tell their device."""

    def unbind(self, container_id: str, ifname: str) -> None:
        """Let go of what was chosen for a sandbox in calls for this interface, and of what no call has used."""
        if any(b.container_id == container_id for b in self._ledger.bindings()):
            with self.guard:
                mine = [b for b in self._ledger.bindings() if b.container_id == container_id]
                self._let_go([b for b in mine if b.cni_ifname in ("", ifname)])

    def bind(self, made: Sequence[Binding]) -> None:
        """Write books and specs, in this order. The caller holds the guard."""
        bound = self._ledger.bind_slots(made)
        try:
            for binding in bound:
                self._specs.write(binding.kind, binding.unit_id, binding.edits)
        except Unavailable:
            self._let_go(bound)
            raise
        for b in bound:
            log.info("%s is bound to %s for container %s of pod %s", b.unit_id, b.device, b.container, b.pod)

    def tell(self, container_id: str, edits: Mapping[str, Mapping[str, Any]]) -> None:
        """Have containers of a sandbox get something else for some slots: slot → containerEdits. Raises Unavailable."""
        with self.guard:
            known = [b for b in self._ledger.bindings() if b.container_id == container_id]
            changed = [replace(b, edits=edits[b.unit_id]) for b in known if edits.get(b.unit_id, b.edits) != b.edits]
            for binding in self._ledger.bind_slots(changed) if changed else ():
                self._specs.write(binding.kind, binding.unit_id, binding.edits)

    def forget(self, slots: Collection[str]) -> None:
        """Let go of what some slots were bound to: kubelet gives them to another pod. Not even a stray spec stays."""
        self.had_slots = True
        with self.guard:
            self._let_go([b for b in self._ledger.bindings() if b.unit_id in slots])
            for slot in slots:
                self._remove_spec(slot)

    def release(self, is_over: Callable[[Binding], bool]) -> tuple[Binding, ...]:
        """Let go of bindings whose time is over, and return them."""
        over = [binding for binding in self._ledger.bindings() if is_over(binding)]
        if not over:
            return ()
        with self.guard:
            return self._let_go(over)

    def is_noted(self, binding: Binding) -> bool:
        """Tell whether kubelet's checkpoint counts a slot to the pod that it is bound for. Yes if it cannot be read."""
        noted = checkpoint.entries(self._config.value.kubelet_dir)
        if noted is None:
            return (self._config.value.kubelet_dir / checkpoint.FILE).exists()
        return any(binding.unit_id in entry.unit_ids and binding.pod.uid in ("", entry.pod_uid) for entry in noted)

    def mend(self, known: Known, snapshot: Snapshot) -> tuple[tuple[str, str], ...]:
        """Write the specs that are missing or say something else, and settle those that no binding stands behind.

        Such a spec was written before the books were lost. Its container has the device files still, and may start
        again: so its device is bound again to whoever has the slot, held for the slot while nobody can tell who that
        is, and free once nobody has it. Returns what was done: (action, slot). Raises Unavailable and LedgerError.
        """
        with self.guard:
            bound = {binding.unit_id: binding for binding in self._ledger.bindings()}
            done = [("spec-write", slot) for slot in self._rewrite(bound.values())]
            unsure = (self._specs.slots() - bound.keys()) | {b.unit_id for b in bound.values() if not b.container_id}
            if unsure:
                done += self._settle(unsure, bound, known, snapshot)
            self._told &= unsure
        return tuple(done)

    def rewrite(self) -> Sequence[str]:
        """Write the specs that are missing or say something else; list their slots. Raises Unavailable and LedgerError.

        That much of `mend` needs nobody's word.
        """
        with self.guard:
            return self._rewrite(self._ledger.bindings())

    def _rewrite(self, bound: Collection[Binding]) -> list[str]:
        missing = [b for b in bound if not self._specs.is_written(b.kind, b.unit_id, b.edits)]
        for binding in missing:
            self._specs.write(binding.kind, binding.unit_id, binding.edits)
        return [binding.unit_id for binding in missing]

    def _settle(
        self, unsure: Collection[str], bound: Mapping[str, Binding], known: Known, snapshot: Snapshot
    ) -> list[tuple[str, str]]:
        """Find out who has some slots, and go by it. The caller holds the guard."""
        done = []
        holders = lost.holders(unsure, known, checkpoint.entries(self._config.value.kubelet_dir))
        strays = holders.keys() - bound.keys()
        specs = {slot: spec for slot in sorted(strays) if (spec := self._specs.read(slot)) is not None}
        taken = {binding.device for binding in bound.values()}
        found = lost.devices(specs, snapshot, taken, {row.device for row in known.attachments})
        self._tell_of_unknown(strays - found.keys())
        before = {slot: binding for slot, binding in bound.items() if slot in holders}
        before |= {slot: lost.bare(slot, device, specs[slot]) for slot, device in found.items()}
        now = {slot: lost.held(binding, holders[slot], self._resource_of(slot)) for slot, binding in before.items()}
        made = [binding for slot, binding in sorted(now.items()) if bound.get(slot) != binding]
        if made:
            self._ledger.bind_slots(made)
        for binding in made:
            slot, device = binding.unit_id, binding.device
            if binding.pod.name:
                log.warning("%s was in no books: it is bound to %s again, for pod %s", slot, device, binding.pod)
                done.append(("slot-rebind", slot))
            else:
                log.warning("%s was in no books, and whose it is cannot be told yet: %s is held for it", slot, device)
                done.append(("slot-hold", slot))
        for slot in sorted(set(unsure) - holders.keys()):
            if slot in bound:
                self._let_go([bound[slot]])
            else:
                self._specs.remove(slot)
            done.append(("spec-remove", slot))
        return done

    def _resource_of(self, slot: str) -> str:
        names = (resource.name for resource in self._config.value.resources)
        return next((name for name in names if UnitId.parse(slot).is_slot_of(name)), "")

    def _tell_of_unknown(self, slots: Collection[str]) -> None:
        for slot in sorted(set(slots) - self._told):
            log.error(
                "%s is in no books, and its CDI spec names no device that is not another slot's: its container may have"
                " one that another pod is given, too; recreate its pod",
                slot,
            )
        self._told |= frozenset(slots)

    def _let_go(self, bindings: Sequence[Binding]) -> tuple[Binding, ...]:
        """Remove specs and bindings, but none that is another sandbox's by now. The caller holds the guard."""
        mine = [b for b in bindings if (known := self._ledger.binding_of(b.unit_id)) is not None and _same(known, b)]
        for binding in mine:
            self._remove_spec(binding.unit_id)
        return self._ledger.unbind(mine)

    def _remove_spec(self, slot: str) -> None:
        try:
            self._specs.remove(slot)
        except Unavailable as error:
            log.error("%s; it is tried again", error)


def _same(known: Binding, other: Binding) -> bool:
    return (known.container_id, known.cni_ifname, known.device) == (other.container_id, other.cni_ifname, other.device)
