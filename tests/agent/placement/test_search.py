"""The search for GPUs on usual hosts: exact, and over long before its bound."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations, product

import pytest

from agent.model.device import Snapshot
from agent.model.locality import Locality
from agent.placement import Distances, choose_gpus, choose_sets
from agent.placement.distances import FINE
from agent.placement.gpus import SEARCH, collect, search
from agent.placement.nics import spans
from tests.agent.placement.hosts import Host


def test_the_bound_ends_the_search(node_snapshot: Callable[[str], Snapshot]) -> None:
    snapshot = node_snapshot("v100-16gpu")
    distances = Distances(snapshot)
    room = Counter(distances.port(device.address) for device in snapshot.devices if device.is_vf)
    chance = random.Random(3)
    cut_short = 0
    for _ in range(20):
        free = chance.sample(distances.gpus, 11)
        choices = [collect(distances, free, (), 5, room, {}, 5) for _ in range(2)]
        cut_short += search(choices[0], 1) != search(choices[1], SEARCH)
    assert cut_short


MESH = ("01", "02", "033", "044", "122", "13", "155", "233", "26", "37", "45", "46", "477", "566", "57", "677")
"""NVLinks of a hybrid cube mesh as `nvidia-smi topo -m` shows them on a host of 8 V100s: from, and to for each link."""


def mesh() -> Host:
    """Make a host of eight GPUs, two below each switch."""
    host = Host()
    for number in range(8):
        links = [(int(text[1]), len(text) - 1) for text in MESH if int(text[0]) == number]
        host.gpu((f"pci0000:{number // 2}0", "p", "s", f"g{number}"), number // 4, nvlinks=links)
    return host


def test_in_a_mesh_no_other_gpus_are_joined_by_more_nvlinks() -> None:
    host = mesh()
    nics = [host.nic((f"pci0000:{number}0", "p", "s", "n"), number // 2) for number in range(4)]
    distances = Distances(host.snapshot())

    def joined(gpus: Sequence[str]) -> int:
        return sum(distances.links(a, b) for a, b in combinations(gpus, 2))

    for free in (chosen for count in (4, 6, 8) for chosen in combinations(distances.gpus, count)):
        for size in range(2, len(free)):
            most = max(joined(gpus) for gpus in combinations(free, size))
            assert joined(choose_gpus(distances, free, (), size, nics)) == most


def test_with_fewer_nics_than_gpus_rails_are_of_the_gpus_beside_them_before_nvlinks_count() -> None:
    host = mesh()
    nics = [host.nic((f"pci0000:{number}0", "p", "s", "n"), number // 2) for number in range(4)]
    distances = Distances(host.snapshot())
    found = choose_sets(distances, distances.gpus, dict.fromkeys(nics, 1), 1)
    assert [distances.distance(gpu, nic) for gpu, (nic,) in found.items()] == [Locality.PIX] * 4
    joined = sum(distances.links(a, b) for a, b in combinations(found, 2))
    one_below_each = product(*(distances.gpus[n : n + 2] for n in range(0, 8, 2)))
    assert joined == max(sum(distances.links(a, b) for a, b in combinations(gpus, 2)) for gpus in one_below_each)


@pytest.mark.parametrize("seed", range(24))
def test_among_sixteen_gpus_with_uneven_links_no_other_set_is_better(seed: int) -> None:
    chance = random.Random(seed)
    host = Host()
    for number in range(16):
        links = [(peer, n) for peer in range(number) if (n := uneven(chance, number, peer, in_pairs=seed % 2 == 0))]
        host.gpu((f"pci0000:{number // 2}0", "p", "s", f"g{number}"), number // 8, nvlinks=links)
    for number in range(8):
        host.nic((f"pci0000:{number}0", "p", "s", "n"), number // 4)
    distances = Distances(host.snapshot())
    ports = [device.address for device in host.devices if device.pci_class == 0x020000]
    free = chance.sample(distances.gpus, chance.randint(12, 16))
    size = chance.randint(3, 8)
    nics = chance.sample(ports, chance.randint(2, 8))
    found = choose_gpus(distances, free, (), size, nics)

    def joined(gpus: Sequence[str]) -> int:
        return sum(joins[a][b] for a, b in combinations(gpus, 2))

    joins = {a: {b: distances.links(a, b) for b in free} for a in free}
    by_links: dict[int, list[tuple[str, ...]]] = {}
    for gpus in combinations(free, size):
        by_links.setdefault(joined(gpus), []).append(gpus)
    assert joined(found) == max(by_links)
    best = min(after_links(distances, gpus, free, nics) for gpus in by_links[max(by_links)])
    assert after_links(distances, found, free, nics) == best


def uneven(chance: random.Random, number: int, peer: int, *, in_pairs: bool) -> int:
    """Draw how many links join two GPUs: of any, or of GPUs that are built in pairs, as an MI250's."""
    if in_pairs:
        return 4 if number // 2 == peer // 2 else chance.choice((0, 0, 1, 1, 2))
    return chance.choice((0, 0, 1, 2, 4))


def after_links(
    distances: Distances, chosen: Sequence[str], free: Sequence[str], nics: Sequence[str]
) -> tuple[int, ...]:
    """Work out what a set costs besides missing links, with pairs by the matching that is tested by itself."""
    pairs = spans(distances, [(chosen, min(len(chosen), len(nics)))], Counter(nics))
    near = [span for span in pairs if span is not None]
    apart = sum(distances.span(a, b) for a, b in combinations(chosen, 2))
    left = [(a, b) for a in chosen for b in free if a != b]
    links = sum(distances.links(a, b) for a, b in left)
    kept = sum(Locality.SYS - distances.between(a, b) for a, b in left)
    return max(near) // FINE, sum(near), apart, links, kept
