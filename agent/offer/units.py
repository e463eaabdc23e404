"""Configuration and snapshot → the units that each resource offers to kubelet.

Pure. A unit's ID is unique over all resources of the node and survives a reboot: a VF's is its PCI
address, a GPU's its UUID, an HCA share's the node GUID with a number; an HCA whose shares are
claimed (DRA) is one unit, by its node GUID. kubelet keeps IDs in its
checkpoint and looks a unit's pod up by ID alone, whatever the resource.

A device that is no longer in the snapshot has no unit here; `offers` keeps those of the last offer
for a while. A VF whose interface sits in a pod is still a PCI device of the host, so it stays.

`mig` says what becomes of GPUs that are cut into slices, in the words of NVIDIA's device plugin:

    none     nobody looks: a GPU is a unit, cut or not
    single   all GPUs of the resource are cut, into slices of one profile, and each slice is a unit of it
    mixed    uncut GPUs are its units; slices are those of resources that exist beside it, one for each
             profile, such as nvidia.com/mig-1g.10gb

A GPU that does not fit is not left out in silence: its unit is there, unhealthy, with the reason. A rail is a GPU with
the NIC that is nearest to it, or with several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from operator import attrgetter
from types import MappingProxyType

from agent.config import Resource, SharedPool
from agent.model.device import NO_NUMA_NODE, Gpu, MigDevice, Snapshot
from agent.model.device_health import PLAIN_POLICY, HealthPolicy, judge_nic
from agent.model.health import HEALTHY, Health, Reason, unhealthy
from agent.model.unit_id import UnitId, adapter_id, rail_id, replica_id, share_id, slot_id
from agent.model.vf_identity import Rail
from agent.offer.offer import Offer, Unit
from agent.offer.rails import NamedRails, planes_in, rails_of
from agent.offer.selection import NO_NAMES, Assignment, Candidate, Taken, assign
from agent.placement import Distances, choose_sets

NO_SLOTS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Reading:
    """What the books say at one moment. Two that are equal make the same units, whoever has them."""

    quarantined: Mapping[str, str] = field(default_factory=dict)
    """Device → reason."""
    whole_adapters: frozenset[str] = frozenset()
    """Adapters that pods have whole, mode nic: no other pod gets a VF of one."""
    host_names: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Device in a pod → name of its interface in the host; empty if nobody asks."""
    holders: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Device in use → the resource that it was handed out under."""
    attached: frozenset[str] = field(default=frozenset(), compare=False)
    """Of these, the ones that are in a pod for certain."""
    forms: Mapping[str, tuple[str, str]] = field(default_factory=dict, compare=False)
    """Device that one container may have → the resource that it was handed out under, and as what: see `form_of`."""
    slots: Mapping[str, str] = field(default_factory=dict)
    """Slot that kubelet has granted → its device; empty for one that is not bound."""
    granted: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Device → how many units of it kubelet has granted."""
    shares_claimed: Mapping[str, int] = field(default_factory=dict)
    """Adapter → how many of its shares claims have."""
    shares_granted: frozenset[str] = field(default=frozenset())
    """Shares of these adapters that kubelet has granted by their IDs."""
    kept: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Rail in use → the NICs that it was granted with."""


NOTHING_READ = Reading()


@dataclass(frozen=True, slots=True)
class Inputs:
    """All that an offer is made of. Two that are equal make the same one, as long as health is the same."""

    resources: Sequence[Resource]
    snapshot: Snapshot
    assignment: Assignment
    """Which resource has each device."""
    books: Reading = NOTHING_READ
    policy: HealthPolicy = field(default=PLAIN_POLICY, compare=False)
    """What of the facts counts."""
    misplaced: Collection[str] = ()
    """Slices of GPUs that pods hold under another name than they would be offered by."""
    named_rails: NamedRails = ()
    """Adapters as the configuration numbers them."""
    known_rails: Sequence[Rail] = ()
    """Rails as they were numbered last."""
    is_new_node: bool = False
    """Whether the adapters of the node may still be appearing for the first time."""


def make_offer(inputs: Inputs) -> Offer:
    """List every resource's units, in the order of the configuration, and the devices behind slots and for claims."""
    snapshot = inputs.snapshot
    guids = _shared_guids(snapshot)
    distances = Distances(snapshot)
    numbered = inputs.named_rails, inputs.known_rails
    rails = rails_of(snapshot, distances, *numbered, inputs.assignment.adapters, is_new=inputs.is_new_node)
    units: dict[str, tuple[Unit, ...]] = {}
    pools: dict[str, tuple[Unit, ...]] = {}
    claimable: dict[str, tuple[Unit, ...]] = {}
    for resource in inputs.resources:
        mine = inputs.assignment.taken[resource.derived_from or resource.name]
        of_gpus = [taken for taken in mine if taken.kind == "gpu"]
        as_gpus = resource if resource.kind != "rail" else gpu_resource(resource)
        as_nics = resource if resource.kind != "rail" else nic_resource(resource)
        gpus = gpu_units(as_gpus, of_gpus, inputs)
        others = tuple(unit for taken in mine if taken.kind != "gpu" for unit in _units(as_nics, taken, inputs, guids))
        found = (*gpus, *others)
        if resource.kind == "rail":
            found = list_rails(resource, distances, rails, gpus, others, inputs.books.kept)
        if resource.offer == "dra":
            claimable[resource.name] = found
            continue
        if resource.has_slots:
            pools[resource.name] = found
            found = list_slots(resource, found, inputs.books.slots)
        if isinstance(resource.compat, SharedPool):
            found = _pool_units(resource, found)
        units[resource.name] = found
    return Offer(
        snapshot,
        MappingProxyType(units),
        inputs.assignment.overlaps,
        MappingProxyType(pools),
        MappingProxyType(claimable),
        resources=MappingProxyType({resource.name: resource for resource in inputs.resources}),
        rails=rails,
    )


def plain_offer(
    resources: Sequence[Resource],
    snapshot: Snapshot,
    host_names: Mapping[str, str] = NO_NAMES,
    named_rails: NamedRails = (),
    known_rails: Sequence[Rail] = (),
) -> Offer:
    """Make an offer by the selectors alone, as if no pod had anything.

    `host_names` maps devices in pods to the name of their interface in the host; the last two are for `rails_of`. A
    device that two resources select goes to the first of them: `overlap_problems` refuses such a configuration at
    start, but a device may also appear later.
    """
    assignment = assign(resources, snapshot, host_names)
    return make_offer(Inputs(resources, snapshot, assignment, named_rails=named_rails, known_rails=known_rails))


def _pool_units(resource: Resource, adapters: Sequence[Unit]) -> tuple[Unit, ...]:
    """List the units of a pool of k8s-rdma-shared-dev-plugin's: so many as it says, each of them all its adapters.

    `adapters` has one unit for each adapter; without any the list is empty. IDs are "0" to "N-1", the same for every
    pool, as kubelet's checkpoint of a running node has them: unique within their resource only, and neither the books
    nor look-ups by ID alone know them. The units are healthy while any adapter is. They have no NUMA node, as the
    adapters may be anywhere.
    """
    assert isinstance(resource.compat, SharedPool)
    if not adapters:
        return ()
    health = next((unit.health for unit in adapters if unit.health.healthy), adapters[0].health)
    names = tuple(sorted(name for unit in adapters for name in unit.rdma_devices))
    return tuple(
        Unit(str(number), resource.name, "hca", "", health, NO_NUMA_NODE, names)
        for number in range(resource.compat.hca_max)
    )


def _units(resource: Resource, taken: Taken, inputs: Inputs, shared_guids: frozenset[str]) -> Iterable[Unit]:
    candidate = taken.candidate
    if taken.held_for:
        health = unhealthy(Reason.HELD)
    elif candidate.pci is not None and candidate.pci.physfn in inputs.books.whole_adapters:
        health = unhealthy(Reason.PARENT_DOWN)  # ADD would refuse it, for as long as that pod lives
    else:
        health = judge(candidate, inputs.snapshot, inputs.books.quarantined, inputs.policy)
    numa_node = _place(resource, inputs.snapshot, taken)
    if resource.kind == "hca":
        name = _adapter_name(candidate, shared_guids)
        if resource.offer == "dra":
            ids = [adapter_id(name)]
        else:
            ids = [share_id(name, n) for n in range(1 if resource.compat else resource.shares)]
    else:
        ids = [candidate.device]
    rdma = tuple(sorted(candidate.rdma_names))
    claimed = _claimed(resource, candidate.device, ids, inputs)
    return (
        Unit(
            *(i, resource.name, taken.kind, candidate.device),
            unhealthy(Reason.HELD) if i in claimed and health.healthy else health,
            *(numa_node, rdma, taken.alternative),
        )
        for i in ids
    )


def _claimed(resource: Resource, device: str, shares: Sequence[str], inputs: Inputs) -> Collection[str]:
    """Pick as many shares of an adapter as claims still have: none that kubelet has granted, and the last ones."""
    count = inputs.books.shares_claimed.get(device, 0)
    if resource.kind != "hca" or resource.offer == "dra" or not count:
        return ()
    return [share for share in shares if share not in inputs.books.shares_granted][-count:]


def _place(resource: Resource, snapshot: Snapshot, taken: Taken) -> int:
    return NO_NUMA_NODE if resource.exclude_topology else _numa_node(taken.candidate, snapshot)


def _judge_gpu(inputs: Inputs, taken: Taken, mig_uuid: str) -> Health:
    gpu = inputs.snapshot.gpu_by_uuid[taken.candidate.device]
    parts = [mig_uuid] if mig_uuid else [part.uuid for part in gpu.mig_devices]
    if taken.held_for or any(part in inputs.misplaced for part in parts):
        return unhealthy(Reason.HELD)
    health = judge(taken.candidate, inputs.snapshot, inputs.books.quarantined, inputs.policy)
    return inputs.policy.gpu(gpu, mig_uuid) if health.healthy else health


def judge(
    candidate: Candidate, snapshot: Snapshot, quarantined: Mapping[str, str], policy: HealthPolicy = PLAIN_POLICY
) -> Health:
    """Judge a device that is in the snapshot."""
    reason = quarantined.get(candidate.device)
    if candidate.rdma is not None and not candidate.rdma.char_device("uverbs"):
        return unhealthy(Reason.NO_CHAR_DEVICE)
    if candidate.rdma is not None and snapshot.rdma_exclusive:
        # The device belongs to the host's namespace, and opening it in another is refused (EPERM):
        # drivers/infiniband/core/uverbs_main.c, ib_uverbs_open.
        return unhealthy(Reason.EXCLUSIVE_RDMA)
    if candidate.pci is not None and (candidate.rdma is not None or candidate.pci.is_network):
        return judge_nic(candidate.pci, snapshot, quarantined=reason, policy=policy)
    return HEALTHY if reason is None else unhealthy(Reason.QUARANTINED)


def _adapter_name(candidate: Candidate, shared_guids: frozenset[str]) -> str:
    """Name an HCA by its node GUID, which moves with the card; by its PCI address where that says nothing.

    Zero GUIDs are usual on virtual machines, and two devices of one card may carry the same.
    """
    assert candidate.rdma is not None
    assert candidate.pci is not None
    guid = candidate.rdma.guid
    if guid and guid not in shared_guids:
        return guid
    siblings = sorted(r.name for r in candidate.pci.rdma_devices)
    port = f"-{siblings.index(candidate.rdma.name)}" if len(siblings) > 1 else ""
    return f"{candidate.device}{port}"


def _shared_guids(snapshot: Snapshot) -> frozenset[str]:
    counts = Counter(r.guid for d in snapshot.devices if not d.is_vf for r in d.rdma_devices)
    return frozenset(guid for guid, count in counts.items() if count > 1)


def _numa_node(candidate: Candidate, snapshot: Snapshot) -> int:
    if candidate.pci is None:
        return NO_NUMA_NODE
    parent = snapshot.parent(candidate.pci)
    if candidate.pci.numa_node == NO_NUMA_NODE and parent is not None:
        return parent.numa_node
    return candidate.pci.numa_node


# ------------------------------------------------------------------------------------------------------------- slots


def list_slots(resource: Resource, devices: Sequence[Unit], held: Mapping[str, str] = NO_SLOTS) -> tuple[Unit, ...]:
    """List a resource's slots. `devices` are the units that it would offer with early binding.

    kubelet must always find as many healthy slots on a NUMA node as there are devices that no slot has, so that the
    hints it gives to its topology manager come true. A device may be bound to a slot of another NUMA node, if the pod's
    GPU is nearer to it; then one node has a slot less and the other one more. A slot that kubelet has granted stays
    listed until the grant ends; a bound one is as healthy as its device.
    """
    by_address = {unit.device: unit for unit in devices}
    mine = {slot: held[text] for text in held if (slot := UnitId.parse(text)).is_slot_of(resource.name)}
    bound = {slot: device for slot, device in mine.items() if device}
    taken = set(bound.values())
    limits = _shared_out(resource.slots, devices)
    slots = [_bound(resource, slot, device, by_address.get(device)) for slot, device in bound.items()]
    for node in sorted({unit.numa_node for unit in devices} | {slot.numa_node for slot in mine}):
        here = sorted((slot for slot in mine if slot.numa_node == node), key=attrgetter("number"))
        free = [unit for unit in devices if unit.numa_node == node and unit.device not in taken]
        waiting = [slot.text for slot in here if slot not in bound]
        room = len(free) if limits is None else min(len(free), max(0, limits[node] - len(here) + len(waiting)))
        fresh = (name for n in count() if (name := slot_id(resource.name, node, n)) not in held)
        slots += _free(resource, [*waiting, *islice(fresh, max(0, room - len(waiting)))], node, free)
    return tuple(sorted(slots, key=lambda unit: (unit.numa_node, UnitId.parse(unit.unit_id).number)))


def _shared_out(slots: int | None, devices: Sequence[Unit]) -> Counter[int] | None:
    """Share a configured number of slots out to NUMA nodes in proportion to their devices; largest rests first."""
    if slots is None or slots >= len(devices):
        return None
    counts = Counter(unit.numa_node for unit in devices)
    shares = Counter({node: slots * count // len(devices) for node, count in counts.items()})
    by_rest = sorted(counts, key=lambda node: (-(slots * counts[node] % len(devices)), node))
    shares.update(by_rest[: slots - shares.total()])
    return shares


def _free(resource: Resource, names: Sequence[str], node: int, free: Sequence[Unit]) -> list[Unit]:
    """Make the slots that are not bound. The first are the healthy ones."""
    healths = [unit.health for unit in sorted(free, key=lambda unit: (not unit.health.healthy, unit.device))]
    beside = free[0].device if free else ""
    return [
        Unit(
            name,
            resource.name,
            resource.kind,
            "",
            healths[i] if i < len(healths) else unhealthy(Reason.NO_FREE_DEVICE),
            node,
            is_slot=True,
            beside=free[i].device if i < len(free) else beside,
        )
        for i, name in enumerate(names)
    ]


def _bound(resource: Resource, slot: UnitId, device: str, unit: Unit | None) -> Unit:
    health: Health = unit.health if unit is not None else unhealthy(Reason.DEVICE_GONE)
    rdma = unit.rdma_devices if unit is not None else ()
    of = slot.text, resource.name, resource.kind, device, health, slot.numa_node, rdma
    return Unit(*of, is_slot=True, beside=device)


# ------------------------------------------------------------------------------------------------- GPUs and rails

NOTHING_KEPT: Mapping[str, tuple[str, ...]] = MappingProxyType({})


def with_profiles(resources: Sequence[Resource], snapshot: Snapshot, seen: Iterable[Resource]) -> tuple[Resource, ...]:
    """Add the resources that `mig: mixed` makes, each behind the one it comes from.

    Those `seen` before stay, with no units if need be: kubelet would count what it lost as unhealthy, for
    nobody but GPUs that are being cut again. A name that the configuration has itself is not made again.
    """
    names = {resource.name for resource in resources}
    found: list[Resource] = []
    for resource in resources:
        found.append(resource)
        if resource.mig != "mixed":
            continue
        profiles = {mig.profile for gpu in snapshot.gpus for mig in gpu.mig_devices}
        profiles |= {old.mig_profile for old in seen if old.derived_from == resource.name}
        for profile in sorted(profiles):
            name = profile_resource(resource.name, profile)
            if name not in names:
                names.add(name)
                found.append(replace(resource, name=name, mig_profile=profile, derived_from=resource.name))
    return tuple(found)


def profile_resource(name: str, profile: str) -> str:
    """Name the resource of a profile: 1g.10gb+me beside nvidia.com/gpu is nvidia.com/mig-1g.10gb.me."""
    domain, _, _ = name.rpartition("/")
    return f"{domain}/mig-{profile.replace('+', '.')}"


def offered_as(resource: Resource, part: MigDevice) -> str:
    """Name the resource under which a slice of one of a resource's GPUs is offered; empty if only its GPU is."""
    if resource.mig == "mixed":
        return profile_resource(resource.name, part.profile)
    return resource.name if resource.mig == "single" else ""


def gpu_units(resource: Resource, taken: Sequence[Taken], inputs: Inputs) -> tuple[Unit, ...]:
    """List the units of a resource of GPUs, which has these."""
    gpus = inputs.snapshot.gpu_by_uuid
    found = [(each, gpus[each.candidate.device]) for each in taken if each.candidate.device in gpus]
    return tuple(
        Unit(
            unit_id=unit_id,
            resource_name=resource.name,
            kind="gpu",
            device=device,
            health=health,
            numa_node=_place(resource, inputs.snapshot, holder),
            alternative=holder.alternative,
        )
        for holder, device, health in _devices(resource, found, inputs)
        for unit_id in _ids(device, resource.replicas)
    )


def _ids(device: str, replicas: int) -> Iterator[str]:
    if replicas == 1:
        yield device
    else:
        yield from (replica_id(device, n) for n in range(replicas))


def _devices(
    resource: Resource, found: Sequence[tuple[Taken, Gpu]], inputs: Inputs
) -> Iterator[tuple[Taken, str, Health]]:
    """List what the units stand for: the GPU it belongs to, its UUID, its health."""
    profile = resource.mig_profile
    fits = resource.mig != "single" or _are_alike([gpu for _, gpu in found])
    for taken, gpu in found:
        is_cut = gpu.mig_mode and resource.mig != "none"
        if not profile and (not fits or (is_cut and not gpu.mig_devices)):
            yield taken, gpu.uuid, unhealthy(Reason.MIG_UNFIT)
        elif not profile and not is_cut:
            yield taken, gpu.uuid, _judge_gpu(inputs, taken, "")
        elif is_cut and (profile or resource.mig == "single"):
            slices = [part.uuid for part in gpu.mig_devices if profile in ("", part.profile)]
            yield from ((taken, uuid, _judge_gpu(inputs, taken, uuid)) for uuid in slices)


def _are_alike(gpus: Sequence[Gpu]) -> bool:
    """Tell whether GPUs are all uncut, or all cut into slices of one profile."""
    profiles = {mig.profile for gpu in gpus for mig in gpu.mig_devices if gpu.mig_mode}
    return len({gpu.mig_mode for gpu in gpus}) <= 1 and len(profiles) <= 1


def list_rails(
    resource: Resource,
    distances: Distances,
    numbered: Sequence[Rail],
    gpus: Sequence[Unit],
    nics: Sequence[Unit],
    kept: Mapping[str, tuple[str, ...]] = NOTHING_KEPT,
) -> tuple[Unit, ...]:
    """List a resource's rails, in the driver's order of the GPUs. A GPU that does not find all its NICs makes none.

    The sets are matched over all GPUs and NICs of the resource, whatever their health and whoever has them, so they
    stay as they are for as long as the hardware does. A rail that is granted keeps the NICs it was granted with, even
    if other hardware comes or goes, or the configuration asks for another number of them.

    `gpus` and `nics` are units as resources of these kinds would offer them: an HCA's share is a NIC for one GPU.
    `numbered` says which adapters are planes of one rail; `kept` maps rails that are granted to their NICs.
    """
    by_uuid = {unit.device: unit for unit in gpus}
    by_address = {unit.device: unit for unit in nics}
    room = Counter(unit.device for unit in nics)
    sets: dict[str, tuple[str, ...]] = {}
    lost: dict[str, frozenset[str]] = {}
    for rail, held in kept.items():
        if not UnitId.parse(rail).is_rail:
            continue
        uuid = UnitId.parse(rail).device
        there = [nic for nic in held if room[nic]]
        for nic in there:
            room[nic] -= 1  # also of a GPU that is lost: its pod has the NIC still
        if uuid in by_uuid and (there or len(held) > 1):
            sets[uuid] = held
            lost[uuid] = frozenset(held).difference(there)
    rest = [uuid for uuid in distances.gpus if uuid in by_uuid and uuid not in sets]
    count = resource.nic.count if isinstance(resource.nic.count, int) else None
    sets |= choose_sets(distances, rest, room, count, planes_in(numbered))
    return tuple(
        _rail(resource, by_uuid[uuid], [_half(resource, nic, by_address, lost.get(uuid, ())) for nic in sets[uuid]])
        for uuid in distances.gpus
        if uuid in sets
    )


def nic_resource(resource: Resource) -> Resource:
    """Give the resource that the NICs of rails would be units of."""
    nic = resource.nic
    return replace(resource, kind=nic.kind, select=nic.select, shares=nic.shares)


def gpu_resource(resource: Resource) -> Resource:
    """Give the resource that the GPUs of rails would be units of."""
    return replace(resource, kind="gpu", select=resource.gpu)


def _half(resource: Resource, nic: str, there: Mapping[str, Unit], lost: Collection[str]) -> Unit:
    """Give a NIC of a rail as a unit: also one of a granted rail that is gone, or that somebody else has by now."""
    found = there.get(nic) or Unit(
        nic, resource.name, resource.nic.kind, nic, unhealthy(Reason.DEVICE_GONE), NO_NUMA_NODE
    )
    return replace(found, health=unhealthy(Reason.DEVICE_GONE)) if nic in lost else found


def _rail(resource: Resource, gpu: Unit, nics: Sequence[Unit]) -> Unit:
    """Make a rail. It is as ill as any of its parts; a NIC in quarantine counts first, as it must not be granted."""
    first, *further = nics
    ill = [part.health for part in (gpu, *nics) if not part.health.healthy]
    quarantined = (health for health in ill if health.reason == Reason.QUARANTINED)
    return Unit(
        unit_id=rail_id(gpu.device),
        resource_name=resource.name,
        kind="rail",
        device=first.device,
        health=next(quarantined, None) or next(iter(ill), gpu.health),
        numa_node=gpu.numa_node,
        rdma_devices=first.rdma_devices,
        alternative=first.alternative,
        gpu=gpu.device,
        further=tuple(further),
    )
