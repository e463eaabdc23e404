"""Which replicas and slices a container should get."""

from __future__ import annotations

from dataclasses import replace

from agent.config import Resource
from agent.model.device import MigDevice, Snapshot
from agent.offer.units import plain_offer, with_profiles
from agent.placement import Distances, Layout, Option, choose
from tests.deviceplugin.machines import node

NAME = "nvidia.com/gpu"


def layout(snapshot: Snapshot, resource: Resource, name: str = NAME) -> Layout:
    units = plain_offer(with_profiles([resource], snapshot, ()), snapshot).offered[name]
    return Layout(Distances(snapshot), (Option(unit.unit_id, unit.device) for unit in units))


def gpus_of(units: tuple[str, ...]) -> list[str]:
    return [unit.partition("::")[0] for unit in units]


def test_pods_that_come_one_by_one_are_spread_evenly() -> None:
    snapshot = node(rails=4)
    place = layout(snapshot, Resource(NAME, "gpu", replicas=4))
    free = list(place.rank)
    counts = dict.fromkeys((gpu.uuid for gpu in snapshot.gpus), 0)
    for given in range(1, 17):
        [unit] = choose(place, free, (), 1)
        free.remove(unit)
        counts[unit.partition("::")[0]] += 1
        assert max(counts.values()) - min(counts.values()) <= 1, (given, counts)


def test_slices_of_several_gpus_are_chosen_among() -> None:
    snapshot = node(rails=2)
    cut = [
        replace(
            gpu, mig_mode=True, mig_devices=tuple(MigDevice(f"MIG-{gpu.index}{n}", "1g.10gb", n, 0, 1) for n in (7, 8))
        )
        for gpu in snapshot.gpus
    ]
    snapshot = replace(snapshot, gpus=tuple(cut))
    place = layout(snapshot, Resource(NAME, "gpu", mig="mixed"), "nvidia.com/mig-1g.10gb")
    chosen = choose(place, list(place.rank), ("MIG-18",), 2)
    assert chosen[0] == "MIG-18"
    assert chosen[1] in place.rank
