"""GPUs with several NICs each: the sets that rails are made of. Pure, and the same for as long as the hardware is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from agent.model.device import NO_NUMA_NODE
from agent.placement.distances import Distances
from agent.placement.gpus import choose_pairs
from agent.placement.nics import Group, match_groups


def choose_sets(
    distances: Distances, gpus: Sequence[str], room: Mapping[str, int], count: int
) -> Mapping[str, tuple[str, ...]]:
    """Give each GPU `count` NICs, as near as can be. `room` tells how many GPUs each NIC may serve.

    With too few NICs some GPUs get none at all: those that would have the farthest, whatever NVLinks join. Where each
    NIC serves one GPU the sets are an exact minimum; else the GPUs choose in turn, of NICs that are equally near the
    one with the fewest GPUs.
    """
    free = {nic: places for nic, places in room.items() if places > 0}
    if count == 1:
        listed = sorted(nic for nic, places in free.items() for _ in range(places))
        return {gpu: (nic,) for gpu, nic in choose_pairs(distances, gpus, listed, len(gpus))}
    if any(places > 1 for places in free.values()):
        return _in_turn(distances, gpus, free, count)
    is_enough = len(free) >= count * len(gpus)
    able = gpus if is_enough else _in_turn(distances, gpus, free, count)
    served = [gpu for gpu in gpus if gpu in able]
    groups = [Group((NO_NUMA_NODE,) * count, (gpu,)) for gpu in served]
    found = match_groups(distances, groups, dict.fromkeys(free, NO_NUMA_NODE), {}) or ()
    return {gpu: tuple(sorted(nics, key=distances.order)) for gpu, nics in zip(served, found, strict=True)}


def _in_turn(
    distances: Distances, gpus: Sequence[str], free: Mapping[str, int], count: int
) -> Mapping[str, tuple[str, ...]]:
    """Let the GPU choose next that finds the nearest NICs, until none finds enough of them."""
    left, load, waiting = dict(free), Counter[str](), list(gpus)
    found: dict[str, tuple[str, ...]] = {}
    while waiting:
        wishes = {gpu: _nearest(distances, gpu, left, load, count) for gpu in waiting}
        able = [gpu for gpu in waiting if len(wishes[gpu]) == count]
        if not able:
            break
        chosen = min(able, key=lambda gpu: sorted((_span(distances, gpu, nic) for nic in wishes[gpu]), reverse=True))
        for nic in wishes[chosen]:
            left[nic] -= 1
            load[distances.port(nic)] += 1
        found[chosen] = tuple(sorted(wishes[chosen], key=distances.order))
        waiting.remove(chosen)
    return found


def _nearest(
    distances: Distances, gpu: str, left: Mapping[str, int], load: Mapping[str, int], count: int
) -> tuple[str, ...]:
    """List a GPU's nearest NICs that have room; of equally near ones of the ports that serve the fewest."""
    mine, own = list[str](), Counter[str]()
    for _ in range(count):
        able = [nic for nic, places in left.items() if places > 0 and nic not in mine]
        if not able:
            break

        def cost(nic: str) -> tuple[int, int, tuple[str, int, str]]:
            port = distances.port(nic)
            return _span(distances, gpu, nic), load.get(port, 0) + own[port], distances.order(nic)

        nic = min(able, key=cost)
        mine.append(nic)
        own[distances.port(nic)] += 1
    return tuple(mine)


def _span(distances: Distances, gpu: str, nic: str) -> int:
    return distances.span(distances.port(gpu), distances.port(nic))
