"""Bindings that the books have lost, as CDI specs, kubelet and the runtime tell of them. Pure.

A spec tells the devices of a container, and kubelet who has the slot: PodResources app containers, its checkpoint (by
pod UID) init containers, too. A slot's own device is the one whose files its spec names; one without files (a VF that
is only an interface) is any of its container's: these are let go together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from agent.edits.cdi import SlotSpec
from agent.edits.unit_specs import files_of
from agent.kubelet.checkpoint import Entry
from agent.kubelet.cri import Sandbox
from agent.model.allocation import Binding, PodRef
from agent.model.device import NO_NUMA_NODE, Snapshot, is_pci_address
from agent.model.unit_id import UnitId
from agent.reconcile.slots import Known

PCIDEVICE = "PCIDEVICE_"
NOBODY = PodRef("", "")


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has a slot. Empty where that cannot be told now."""

    pod: PodRef = NOBODY
    container: str = ""
    resource_name: str = ""
    sandbox: str = ""
    """As its runtime calls it; empty if the runtime cannot be asked."""


def holders(slots: Collection[str], known: Known, noted: Sequence[Entry] | None) -> Mapping[str, Holder]:
    """Tell who has each slot; one that is missing from the answer is nobody's, for certain.

    `noted` is kubelet's checkpoint, None if it cannot be read. Without a sandbox a pod has no container, whatever
    kubelet counts to it.
    """
    held_units = {held.unit_id: held for held in known.held_units or ()}
    entries = {unit: entry for entry in noted or () for unit in entry.unit_ids}
    found: dict[str, Holder] = {}
    for slot in slots:
        held, entry = held_units.get(slot), entries.get(slot)
        if held is not None:
            pod, container, resource_name = held.pod, held.container, held.resource_name
            mine = [s for s in known.sandboxes or () if (s.pod.namespace, s.pod.name) == (pod.namespace, pod.name)]
        elif entry is not None:
            pod, container, resource_name = PodRef("", "", entry.pod_uid), entry.container, entry.resource_name
            mine = [s for s in known.sandboxes or () if s.pod.uid == entry.pod_uid]
        else:
            # A kubelet that has started anew while the API server is away lists no pods, though they run.
            if known.held_units is None or (noted is None and not known.pods):
                found[slot] = Holder()
            continue
        if known.sandboxes is None:
            found[slot] = Holder(pod if pod.name else NOBODY, container, resource_name)
        elif mine:
            sandbox = _running_first(mine)
            found[slot] = Holder(sandbox.pod, container, resource_name, sandbox.sandbox_id)
    return found


def devices(
    specs: Mapping[str, SlotSpec], snapshot: Snapshot, taken: Collection[str], attached: Collection[str]
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


def bare(slot: str, device: str, spec: SlotSpec) -> Binding:
    """Make the binding that a spec tells of, without its holder."""
    return Binding(slot, "", spec.kind, device, "", "", "", NOBODY, spec.edits)


def held(binding: Binding, holder: Holder, resource_name: str) -> Binding:
    """Put what is known of a slot's holder into its binding; what is not stays as it is.

    `resource_name` is what the slot's name says, for want of a better witness.
    """
    return replace(
        binding,
        resource_name=holder.resource_name or binding.resource_name or resource_name,
        container=holder.container or binding.container,
        container_id=holder.sandbox,
        pod=holder.pod if holder.pod.name else binding.pod,
    )


def _running_first(sandboxes: Sequence[Sandbox]) -> Sandbox:
    """Pick one of a pod's sandboxes: the running one, if there is one."""
    return max(sandboxes, key=lambda sandbox: sandbox.ready)


def _variable(spec: SlotSpec) -> str:
    """Return the variable that lists the addresses of the container's devices, with its name."""
    env = spec.edits.get("env")
    texts = (text for text in env if isinstance(text, str)) if isinstance(env, list) else iter(())
    return next((text for text in texts if text.startswith(PCIDEVICE) and is_pci_address(_first(text))), "")


def _first(variable: str) -> str:
    return variable.partition("=")[2].partition(",")[0]


def _files(spec: SlotSpec) -> frozenset[str]:
    nodes = spec.edits.get("deviceNodes")
    listed = (node for node in nodes if isinstance(node, dict)) if isinstance(nodes, list) else iter(())
    return frozenset(str(node.get("hostPath") or node.get("path")) for node in listed)


def _files_of(snapshot: Snapshot, device: str) -> Iterator[str]:
    """List the files that are one device's alone."""
    pci = snapshot.by_address.get(device)
    return files_of(pci) if pci is not None else iter(())
