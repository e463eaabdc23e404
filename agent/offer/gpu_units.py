"""The units of a resource of GPUs: whole ones, slices (MIG), replicas that take turns on one, and rails. Pure.

`mig` says what becomes of GPUs that are cut into slices, in the words of NVIDIA's device plugin:

    none     nobody looks: a GPU is a unit, cut or not
    single   all GPUs of the resource are cut, into slices of one profile, and each slice is a unit of it
    mixed    uncut GPUs are its units; slices are those of resources that exist beside it, one for each
             profile, such as nvidia.com/mig-1g.10gb

A rail is a GPU with the NIC that is nearest to it, or with several.

A GPU that does not fit is not left out in silence: its unit is there, unhealthy, with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from agent.config import Resource
from agent.model.device import NO_NUMA_NODE, Gpu, MigDevice, Snapshot
from agent.model.health import Health, Reason, unhealthy
from agent.model.unit_id import UnitId, rail_id, replica_id
from agent.model.vf_identity import Rail
from agent.offer.offer import Unit
from agent.offer.rails import planes_in
from agent.offer.selection import Taken
from agent.placement import Distances, choose_sets

MISFIT = "MigUnfit"
NOTHING_KEPT: Mapping[str, tuple[str, ...]] = MappingProxyType({})
Judge = Callable[[Taken, str], Health]
"""Judges the GPU that a resource has, or the slice of it with that UUID."""
Place = Callable[[Taken], int]
"""Tells the NUMA node."""


def with_profiles(resources: Sequence[Resource], snapshot: Snapshot, seen: Iterable[Resource]) -> tuple[Resource, ...]:
    """Add the resources that `mig: mixed` makes, each behind the one it comes from.

    Those `seen` before stay, with no units if need be: kubelet would count what it lost as unhealthy, for
    nobody but GPUs that are being cut anew. A name that the configuration has itself is not made again.
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


def gpu_units(
    resource: Resource, taken: Sequence[Taken], snapshot: Snapshot, judge: Judge, numa_node: Place
) -> tuple[Unit, ...]:
    """List the units of a resource of GPUs, which has these."""
    found = [(t, snapshot.gpu_by_uuid[t.candidate.device]) for t in taken if t.candidate.device in snapshot.gpu_by_uuid]
    units = []
    for holder, device, health in _devices(resource, found, judge):
        for unit_id in _ids(device, resource.replicas):
            units.append(
                Unit(
                    unit_id=unit_id,
                    resource_name=resource.name,
                    kind="gpu",
                    device=device,
                    health=health,
                    numa_node=numa_node(holder),
                    alternative=holder.alternative,
                )
            )
    return tuple(units)


def _ids(device: str, replicas: int) -> Iterator[str]:
    if replicas == 1:
        yield device
    else:
        yield from (replica_id(device, n) for n in range(replicas))


def _devices(
    resource: Resource, found: Sequence[tuple[Taken, Gpu]], judge: Judge
) -> Iterator[tuple[Taken, str, Health]]:
    """List what the units stand for: the GPU it belongs to, its UUID, its health."""
    misfit = unhealthy(MISFIT)
    fits = resource.mig != "single" or _are_alike([gpu for _, gpu in found])
    for taken, gpu in found:
        is_cut = gpu.mig_mode and resource.mig != "none"
        slices = [m for m in gpu.mig_devices if not resource.mig_profile or m.profile == resource.mig_profile]
        if resource.mig_profile:
            yield from _slices(taken, slices if is_cut else (), judge)
        elif not fits or (is_cut and not gpu.mig_devices):
            yield taken, gpu.uuid, misfit
        elif not is_cut:
            yield taken, gpu.uuid, judge(taken, "")
        elif resource.mig == "single":
            yield from _slices(taken, slices, judge)


def _slices(taken: Taken, slices: Iterable[MigDevice], judge: Judge) -> Iterator[tuple[Taken, str, Health]]:
    return ((taken, mig.uuid, judge(taken, mig.uuid)) for mig in slices)


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
    withheld = (health for health in ill if health.reason == Reason.QUARANTINED)
    return Unit(
        unit_id=rail_id(gpu.device),
        resource_name=resource.name,
        kind="rail",
        device=first.device,
        health=next(withheld, None) or next(iter(ill), gpu.health),
        numa_node=gpu.numa_node,
        rdma_devices=first.rdma_devices,
        alternative=first.alternative,
        gpu=gpu.device,
        further=tuple(further),
    )
