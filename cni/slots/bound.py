"""What slots are bound to, in books and CDI specs: made, let go, healed, and rebuilt where the books have lost it.

Lost ones are rebuilt from what specs, kubelet and runtime say. A spec names the devices of a container, and kubelet who
has the slot: PodResources app containers, its checkpoint (by pod UID) init containers, too. A slot's own device is the
one whose files its spec names; one without files (a VF that is only an interface) is any of its container's: these are
let go together.

The books come first: a bound slot without its spec is completed by the reconciler, and a spec without one is what the
books have lost, or nobody's. In between the runtime knows no such device, and creates no container.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from agent.config import Config
from agent.edits.specs import Specs
from agent.edits.unit_specs import files_of
from agent.errors import Unavailable
from agent.kubelet import checkpoint
from agent.kubelet.checkpoint import Entry
from agent.kubelet.cri import Sandbox
from agent.ledger import Ledger
from agent.model.allocation import Attachment, Hold, PodRef, Spec
from agent.model.device import NO_NUMA_NODE, Snapshot, is_pci_address
from agent.model.unit_id import UnitId
from agent.reconcile.view import Outside, View
from agent.state import Latest

SANDBOX_SECONDS = 240.0
"""How long a runtime may take from the ADD until it lists the sandbox: kubelet gives it as long to make one (twice its
runtimeRequestTimeout). containerd lists a sandbox when all of it stands."""
PCIDEVICE = "PCIDEVICE_"


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has a slot. Empty where that cannot be told now."""

    pod: PodRef | None = None
    container: str = ""
    resource_name: str = ""
    sandbox: str = ""
    """As its runtime calls it; empty if the runtime cannot be asked."""


def slot_holders(slots: Collection[str], view: View, noted: Sequence[Entry] | None) -> Mapping[str, Holder]:
    """Map each slot to its holder; one that is missing from the answer has certainly none.

    `noted` is kubelet's checkpoint, None if it cannot be read. Without a sandbox a pod has no container, whatever
    kubelet counts to it.
    """
    held_units = {held.unit_id: held for held in view.held_units or ()}
    entries = {unit: entry for entry in noted or () for unit in entry.unit_ids}
    found: dict[str, Holder] = {}
    for slot in slots:
        held, entry = held_units.get(slot), entries.get(slot)
        if held is not None:
            pod, container, resource_name = held.pod, held.container, held.resource_name
            mine = [s for s in view.sandboxes or () if (s.pod.namespace, s.pod.name) == (pod.namespace, pod.name)]
        elif entry is not None:
            pod, container, resource_name = PodRef("", "", entry.pod_uid), entry.container, entry.resource_name
            mine = [s for s in view.sandboxes or () if s.pod.uid == entry.pod_uid]
        else:
            # A kubelet that has restarted while the API server is away lists no pods, though they run.
            if view.held_units is None or (noted is None and not view.pods):
                found[slot] = Holder()
            continue
        if view.sandboxes is None:
            found[slot] = Holder(pod if pod.name else None, container, resource_name)
        elif mine:
            sandbox = _running_first(mine)
            found[slot] = Holder(sandbox.pod, container, resource_name, sandbox.sandbox_id)
    return found


def slot_devices(
    specs: Mapping[str, Spec], snapshot: Snapshot, taken: Collection[str], attached: Collection[str]
) -> Mapping[str, str]:
    """Find the device of each slot: slot → PCI address. A slot is missing if nothing is left for it.

    `taken` are devices of other slots, `attached` those in pods.
    """
    groups: dict[str, list[str]] = {}
    for slot, spec in specs.items():
        groups.setdefault(_variable(spec), []).append(slot)
    found: dict[str, str] = {}
    for variable, slots in groups.items():
        told = [a for a in variable.partition("=")[2].split(",") if is_pci_address(a)]

        def likeness(pair: tuple[str, str], told: Sequence[str] = told) -> tuple[object, ...]:
            slot, device = pair
            has_its_files = bool(_files(specs[slot]) & frozenset(_files_of(snapshot, device)))
            pci = snapshot.by_address.get(device)
            is_near = UnitId.parse(slot).numa_node == (pci.numa_node if pci is not None else NO_NUMA_NODE)
            return not has_its_files, device not in attached, not is_near, told.index(device)

        left = [device for device in told if device not in taken and device not in found.values()]
        for slot, device in sorted(product(sorted(slots), left), key=likeness):
            if slot not in found and device not in found.values():
                found[slot] = device
    return found


def with_holder(slot: Hold, holder: Holder, resource_name: str) -> Hold:
    """Put what is known of a slot's holder into it; what is not stays as it is.

    `resource_name` is what the slot's name says, for want of a better witness.
    """
    return replace(
        slot,
        resource_name=holder.resource_name or slot.resource_name or resource_name,
        container=holder.container or slot.container,
        container_id=holder.sandbox,
        pod=holder.pod or slot.pod,
    )


def _running_first(sandboxes: Sequence[Sandbox]) -> Sandbox:
    """Pick one of a pod's sandboxes: the running one, if there is one."""
    return max(sandboxes, key=lambda sandbox: sandbox.ready)


def _variable(spec: Spec) -> str:
    """Return the variable that lists the addresses of the container's devices, with its name."""
    env = spec.edits.get("env")
    texts = (text for text in env if isinstance(text, str)) if isinstance(env, list) else iter(())
    return next((text for text in texts if text.startswith(PCIDEVICE) and is_pci_address(_first(text))), "")


def _first(variable: str) -> str:
    return variable.partition("=")[2].partition(",")[0]


def _files(spec: Spec) -> frozenset[str]:
    nodes = spec.edits.get("deviceNodes")
    listed = (node for node in nodes if isinstance(node, dict)) if isinstance(nodes, list) else iter(())
    return frozenset(str(node.get("hostPath") or node.get("path")) for node in listed)


def _files_of(snapshot: Snapshot, device: str) -> Iterator[str]:
    """List the files that are one device's alone."""
    pci = snapshot.by_address.get(device)
    return files_of(pci) if pci is not None else iter(())


log = logging.getLogger(__name__)


class BoundSlots:
    """What slots are bound to. Methods block and may run on many threads at once."""

    def __init__(self, config: Latest[Config], ledger: Ledger, specs: Specs) -> None:
        self._config = config
        self._ledger = ledger
        self._specs = specs
        self.guard = threading.Lock()
        """Held while slots and their specs change."""
        self.had_slots = any(hold.is_slot for hold in ledger.holds())
        """Whether a pod may have slots of a resource that the configuration does not bind late any more."""
        self._reported: frozenset[str] = frozenset()
        """Slots of which it was said that nobody can tell their device."""

    def unbind(self, container_id: str, ifname: str) -> None:
        """Let go of what was chosen for a sandbox in calls for this interface, and of what no call has used."""
        if self._ledger.bound_slots(container_id):
            with self.guard:
                mine = self._ledger.bound_slots(container_id)
                self._let_go([slot for slot in mine if slot.cni_ifname in ("", ifname)])

    def bind(self, made: Sequence[Hold]) -> None:
        """Write books and specs, in this order. The caller holds the guard."""
        with self._specs.guard:
            bound = self._ledger.bind_slots(made)
            try:
                self._specs.sync(slot.key for slot in bound)
            except Unavailable:
                self._let_go(bound)
                raise
        for slot in bound:
            log.info("%s is bound to %s for container %s of pod %s", slot.key, slot.device, slot.container, slot.pod)

    def forget(self, slots: Collection[str]) -> None:
        """Let go of what some slots were bound to: kubelet gives them to another pod. Not even a stray spec stays."""
        self.had_slots = True
        with self.guard:
            self._let_go([slot for slot in self._ledger.bound_slots() if slot.key in slots])
            for key in slots:
                self._remove_spec(key)

    def release(self, is_over: Callable[[Hold], bool]) -> tuple[Hold, ...]:
        """Let go of slots whose sandbox is over, and return them."""
        over = [slot for slot in self._ledger.bound_slots() if is_over(slot)]
        if not over:
            return ()
        with self.guard:
            return self._let_go(over)

    def is_noted(self, slot: Hold) -> bool:
        """Whether kubelet's checkpoint counts a slot to the pod that it is bound for. True if it cannot be read."""
        noted = checkpoint.entries(self._config.value.kubelet_dir)
        if noted is None:
            return (self._config.value.kubelet_dir / checkpoint.FILE).exists()
        uid = slot.pod.uid if slot.pod is not None else ""
        return any(slot.key in entry.unit_ids and uid in ("", entry.pod_uid) for entry in noted)

    def mend(self, view: View, snapshot: Snapshot) -> tuple[tuple[str, str], ...]:
        """Settle the specs of slots that the books do not know to be bound.

        Such a spec was written before the books were lost. Its container has the device files still, and may start
        again: so its device is bound again to whoever has the slot, held for the slot while nobody can tell who that
        is, and free once nobody has it. Returns what was done: (action, slot). Raises Unavailable and LedgerError.
        """
        with self.guard:
            bound = {slot.key: slot for slot in self._ledger.bound_slots()}
            there = {name for name in self._specs.names() if UnitId.parse(name).is_slot}
            unsure = (there - bound.keys()) | {slot.key for slot in bound.values() if not slot.container_id}
            done = self._settle(unsure, bound, view, snapshot) if unsure else []
            self._reported &= unsure
        return tuple(done)

    def _settle(
        self, unsure: Collection[str], bound: Mapping[str, Hold], view: View, snapshot: Snapshot
    ) -> list[tuple[str, str]]:
        """Find out who has some slots, and go by it. The caller holds the guard."""
        done = []
        holders = slot_holders(unsure, view, checkpoint.entries(self._config.value.kubelet_dir))
        strays = holders.keys() - bound.keys()
        specs = {slot: spec for slot in sorted(strays) if (spec := self._specs.read(slot)) is not None}
        alone = (hold for claim in self._ledger.claims() for hold in claim.devices if hold.exclusive)
        taken = {device for hold in (*bound.values(), *alone) for device in hold.devices}
        found = slot_devices(specs, snapshot, taken, {row.device for row in self._ledger.attachments()})
        self._report_unknown(strays - found.keys())
        before = {key: slot for key, slot in bound.items() if key in holders}
        before |= {key: self._bare(key, device, specs[key]) for key, device in found.items()}
        now = {key: with_holder(slot, holders[key], self._resource_of(key)) for key, slot in before.items()}
        made = [slot for key, slot in sorted(now.items()) if bound.get(key) != slot]
        if made:
            self._ledger.bind_slots(made)
        for slot in made:
            if slot.pod is not None:
                log.warning("%s was in no books: it is bound to %s again, for pod %s", slot.key, slot.device, slot.pod)
                done.append(("slot-rebind", slot.key))
            else:
                held = "%s was in no books, and whose it is cannot be told yet: %s is held for it"
                log.warning(held, slot.key, slot.device)
                done.append(("slot-hold", slot.key))
        for key in sorted(set(unsure) - holders.keys()):
            if key in bound:
                self._let_go([bound[key]])
            else:
                self._specs.remove(key)
            done.append(("spec-remove", key))
        return done

    def _bare(self, key: str, device: str, spec: Spec) -> Hold:
        """Make the bound slot that a spec tells of, without its holder."""
        known = self._ledger.hold(key) or Hold(key, "")
        return replace(known, devices=(device,), spec=spec, kind=spec.kind)

    def _resource_of(self, slot: str) -> str:
        names = (resource.name for resource in self._config.value.resources)
        return next((name for name in names if UnitId.parse(slot).is_slot_of(name)), "")

    def _report_unknown(self, slots: Collection[str]) -> None:
        for slot in sorted(set(slots) - self._reported):
            log.error(
                "%s is in no books, and its CDI spec names no device that is not another slot's: its container may have"
                " one that another pod is given, too; recreate its pod",
                slot,
            )
        self._reported |= frozenset(slots)

    def _let_go(self, slots: Iterable[Hold]) -> tuple[Hold, ...]:
        """Remove specs, then the devices of slots, but not of those that are another sandbox's by now.

        The caller holds the guard.
        """
        mine = [
            slot for slot in slots if (known := self._ledger.hold(slot.key)) is not None and known.is_bound_as(slot)
        ]
        with self._specs.guard:  # who writes missing specs would find them bound still
            for slot in mine:
                self._remove_spec(slot.key)
            return self._ledger.unbind(mine)

    def _remove_spec(self, key: str) -> None:
        try:
            self._specs.remove(key)
        except Unavailable as error:
            log.error("%s; it is tried again", error)


class SlotHealer:
    """Lets go of what was bound for sandboxes that are no more, and settles what lost books have left."""

    name = "slots"

    def __init__(self, ledger: Ledger, slots: BoundSlots, snapshot: Latest[Snapshot], outside: Outside) -> None:
        self._ledger = ledger
        self._slots = slots
        self._snapshot = snapshot
        self._outside = outside

    def heal(self, view: View) -> None:
        """Look at all slots that are bound, then at all specs."""
        rows = self._ledger.attachments()
        for slot in self._slots.release(partial(is_over, view=view, rows=rows, is_noted=self._slots.is_noted)):
            log.warning("%s was still bound for pod %s, which is gone", slot.key, slot.pod)
            self._outside.count("slot-release", "sandbox-gone")
        for action, key in self._slots.mend(view, self._snapshot.value):
            log.info("%s: %s", action, key)
            self._outside.count(action, "mended")


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
