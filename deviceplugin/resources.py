"""Configuration and snapshot → the units that each resource offers to kubelet.

Pure. A unit's ID is unique over all resources of the node and survives a reboot: a VF's is its PCI
address, a GPU's its UUID, an HCA share's the node GUID with a number. kubelet keeps IDs in its
checkpoint and looks a unit's pod up by ID alone, whatever the resource.

A device that is no longer in the snapshot has no unit here; `missing` keeps those of the last offer
for a while. A VF whose interface sits in a pod is still a PCI device of the host, so it stays.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from agent.config import Resource, SharedPool
from agent.model.device import NO_NUMA_NODE, RdmaDevice, Snapshot, is_pci_address
from agent.model.health import HEALTHY, Health, unhealthy
from agent.model.nic_health import judge_nic
from agent.model.reasons import Reason
from agent.model.terms import PLAIN_TERMS, Terms
from agent.placement import Terrain
from deviceplugin.assignment import Assignment, Taken, assign
from deviceplugin.compat_units import is_counted, pool_units
from deviceplugin.gpu_units import gpu_units
from deviceplugin.rails import NOTHING_KEPT, gpu_resource, list_rails, nic_resource
from deviceplugin.selectors import NETWORK_CLASS, NO_NAMES, Candidate
from deviceplugin.slots import NOTHING_HELD, Holdings, list_slots
from deviceplugin.unit import MAX_UNIT_ID as MAX_UNIT_ID
from deviceplugin.unit import Unit as Unit

NO_QUARANTINE: Mapping[str, str] = MappingProxyType({})
_NO_GUID = frozenset({"", "0" * 16, "f" * 16})


@dataclass(frozen=True, slots=True)
class Listed:
    """All units of the node, and what is behind slots."""

    units: Mapping[str, tuple[Unit, ...]]
    """Resource name → its units."""
    pools: Mapping[str, tuple[Unit, ...]]
    """Late-bound resource → a unit for each device that may be chosen, as early binding would offer it."""


def list_units(
    resources: Sequence[Resource],
    snapshot: Snapshot,
    quarantined: Mapping[str, str] = NO_QUARANTINE,
    host_names: Mapping[str, str] = NO_NAMES,
) -> Mapping[str, tuple[Unit, ...]]:
    """List every resource's units, in the order of the configuration.

    `quarantined` maps withheld devices to the reason, `host_names` devices in pods to the name of
    their interface in the host. A device that two resources select goes to the first of them:
    `check_overlaps` refuses such a configuration at start, but a device may also appear later.
    """
    found = assign(resources, snapshot, host_names)
    return units_of(resources, found, snapshot, quarantined)


def units_of(
    resources: Sequence[Resource],
    assignment: Assignment,
    snapshot: Snapshot,
    quarantined: Mapping[str, str] = NO_QUARANTINE,
) -> Mapping[str, tuple[Unit, ...]]:
    """List every resource's units, once it is known which devices each has."""
    return list_all(resources, assignment, snapshot, quarantined).units


def list_all(
    resources: Sequence[Resource],
    assignment: Assignment,
    snapshot: Snapshot,
    quarantined: Mapping[str, str] = NO_QUARANTINE,
    held: Holdings = NOTHING_HELD,
    terms: Terms = PLAIN_TERMS,
    kept: Mapping[str, str] = NOTHING_KEPT,
    strays: Collection[str] = (),
    rulers: Collection[str] = (),
) -> Listed:
    """List every resource's units, and the devices behind slots.

    `held` is what the books say of slots, `terms` tell what of the facts counts, `kept` which NICs rails were
    granted with; `strays` are slices of GPUs that pods hold under another name than they would be offered by. `rulers`
    are adapters that pods have whole.
    """
    guids = _shared_guids(snapshot)
    units: dict[str, tuple[Unit, ...]] = {}
    pools: dict[str, tuple[Unit, ...]] = {}
    for resource in resources:
        mine = assignment.taken[resource.derived_from or resource.name]
        of_gpus = [taken for taken in mine if taken.kind == "gpu"]
        as_gpus = resource if resource.kind != "rail" else gpu_resource(resource)
        as_nics = resource if resource.kind != "rail" else nic_resource(resource)
        gpus = gpu_units(
            as_gpus,
            of_gpus,
            snapshot,
            partial(_judge_gpu, snapshot, quarantined, terms, strays),
            partial(_place, resource, snapshot),
        )
        others = tuple(
            unit
            for taken in mine
            if taken.kind != "gpu"
            for unit in _units(as_nics, taken, snapshot, quarantined, terms, guids, rulers)
        )
        found = (*gpus, *others)
        if resource.kind == "rail":
            found = list_rails(resource, Terrain(snapshot), gpus, others, kept)
        if resource.binding == "late":
            pools[resource.name] = found
            found = list_slots(resource, found, held)
        if isinstance(resource.compat, SharedPool):
            found = pool_units(resource, found)
        units[resource.name] = found
    return Listed(MappingProxyType(units), MappingProxyType(pools))


def vfs_of(
    units: Mapping[str, Sequence[Unit]], pools: Mapping[str, Sequence[Unit]], snapshot: Snapshot
) -> frozenset[str]:
    """List the VFs behind all units, and those that slots may get: what is ours to put back."""
    offered = [unit for mine in (*units.values(), *pools.values()) for unit in mine if unit.kind in ("vf", "rail")]
    return frozenset(
        unit.device for unit in offered if (pci := snapshot.by_address.get(unit.device)) is not None and pci.is_vf
    )


def network_devices(
    units: Mapping[str, Sequence[Unit]], pools: Mapping[str, Sequence[Unit]], snapshot: Snapshot
) -> Mapping[str, str]:
    """Map the PCI devices that resources offer, as units, behind slots or as shares, to the resource that does.

    A VF among the adapters of a pool that is shared as a whole is nobody's by that.
    """
    found: dict[str, str] = {}
    for name, mine in (*units.items(), *pools.items()):
        if any(map(is_counted, mine)):
            devices = {a for a in adapters_behind(mine, snapshot) if not snapshot.by_address[a].is_vf}
        else:
            devices = {unit.device for unit in mine if is_pci_address(unit.device)}
        for device in devices:
            found.setdefault(device, name)
    return MappingProxyType(found)


def adapters_behind(units: Sequence[Unit], snapshot: Snapshot) -> set[str]:
    """List the adapters of a pool each of whose units is all of them."""
    rdma = {name for unit in units[:1] for name in unit.rdma_devices}
    return {d.address for d in snapshot.devices if any(r.name in rdma for r in d.rdma_devices)}


def adapters_of(
    units: Mapping[str, Sequence[Unit]], pools: Mapping[str, Sequence[Unit]], snapshot: Snapshot
) -> frozenset[tuple[str, str]]:
    """List (resource, adapter) for each adapter that a resource offers: itself, or its VFs."""
    found: set[tuple[str, str]] = set()
    for name, mine in (*units.items(), *pools.items()):
        addresses = {unit.device for unit in mine}
        if any(map(is_counted, mine)):
            addresses = adapters_behind(mine, snapshot)
        devices = (snapshot.by_address.get(address) for address in addresses)
        found |= {(name, device.physfn or device.address) for device in devices if device is not None}
    return frozenset(found)


def _units(
    resource: Resource,
    taken: Taken,
    snapshot: Snapshot,
    quarantined: Mapping[str, str],
    terms: Terms,
    shared_guids: frozenset[str],
    rulers: Collection[str],
) -> Iterable[Unit]:
    candidate = taken.candidate
    if taken.held_for:
        health = unhealthy(Reason.HELD)
    elif candidate.pci is not None and candidate.pci.physfn in rulers:
        health = unhealthy(Reason.PARENT_DOWN)  # ADD would refuse it, for as long as that pod lives
    else:
        health = judge(candidate, snapshot, quarantined, terms)
    numa_node = _place(resource, snapshot, taken)
    if resource.kind == "hca":
        prefix = hca_prefix(candidate, shared_guids)
        ids = [f"{prefix}-{n}" for n in range(1 if resource.compat else resource.shares)]
    else:
        ids = [candidate.device]
    rdma = tuple(sorted(candidate.rdma_names))
    return (
        Unit(i, resource.name, taken.kind, candidate.device, health, numa_node, rdma, taken.alternative) for i in ids
    )


def _place(resource: Resource, snapshot: Snapshot, taken: Taken) -> int:
    return NO_NUMA_NODE if resource.exclude_topology else _numa_node(taken.candidate, snapshot)


def _judge_gpu(
    snapshot: Snapshot,
    quarantined: Mapping[str, str],
    terms: Terms,
    strays: Collection[str],
    taken: Taken,
    mig_uuid: str,
) -> Health:
    gpu = snapshot.gpu_by_uuid[taken.candidate.device]
    parts = [mig_uuid] if mig_uuid else [part.uuid for part in gpu.mig_devices]
    if taken.held_for or any(part in strays for part in parts):
        return unhealthy(Reason.HELD)
    health = judge(taken.candidate, snapshot, quarantined, terms)
    return terms.gpu(gpu, mig_uuid) if health.healthy else health


def judge(
    candidate: Candidate, snapshot: Snapshot, quarantined: Mapping[str, str], terms: Terms = PLAIN_TERMS
) -> Health:
    """Judge a device that is in the snapshot."""
    withheld = quarantined.get(candidate.device)
    if candidate.rdma is not None and not candidate.rdma.char_device("uverbs"):
        return unhealthy(Reason.NO_CHAR_DEVICE)
    if candidate.rdma is not None and snapshot.rdma_exclusive:
        # The device belongs to the host's namespace, and opening it in another is refused (EPERM):
        # drivers/infiniband/core/uverbs_main.c, ib_uverbs_open.
        return unhealthy(Reason.EXCLUSIVE_RDMA)
    if candidate.pci is not None and (candidate.rdma is not None or candidate.pci.pci_class >> 16 == NETWORK_CLASS):
        return judge_nic(candidate.pci, snapshot, quarantined=withheld, terms=terms)
    return HEALTHY if withheld is None else unhealthy(Reason.QUARANTINED)


def hca_prefix(candidate: Candidate, shared_guids: frozenset[str]) -> str:
    """Name an HCA by its node GUID, which moves with the card; by its PCI address where that says nothing.

    Zero GUIDs are usual on virtual machines, and two devices of one card may carry the same.
    """
    assert candidate.rdma is not None
    assert candidate.pci is not None
    guid = guid_hex(candidate.rdma)
    if guid not in _NO_GUID and guid not in shared_guids:
        return f"hca-{guid}"
    siblings = sorted(r.name for r in candidate.pci.rdma_devices)
    port = f"-{siblings.index(candidate.rdma.name)}" if len(siblings) > 1 else ""
    return f"hca-{candidate.device}{port}"


def guid_hex(rdma: RdmaDevice) -> str:
    """Spell a node GUID without separators: 0c42:a103:0065:1234 → 0c42a10300651234."""
    return re.sub(r"[^0-9a-f]", "", rdma.node_guid.lower())


def _shared_guids(snapshot: Snapshot) -> frozenset[str]:
    counts = Counter(guid_hex(r) for d in snapshot.devices if not d.is_vf for r in d.rdma_devices)
    return frozenset(guid for guid, count in counts.items() if count > 1)


def _numa_node(candidate: Candidate, snapshot: Snapshot) -> int:
    if candidate.pci is None:
        return NO_NUMA_NODE
    parent = snapshot.parent(candidate.pci)
    if candidate.pci.numa_node == NO_NUMA_NODE and parent is not None:
        return parent.numa_node
    return candidate.pci.numa_node
