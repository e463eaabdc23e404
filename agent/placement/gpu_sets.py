"""GPUs with several NICs each: the sets that rails are made of. Pure, and the same for as long as the hardware is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from agent.model.device import NO_NUMA_NODE
from agent.placement.distances import Distances
from agent.placement.gpus import choose_pairs
from agent.placement.nics import Group, match_groups

NO_PLANES: Mapping[str, Sequence[str]] = MappingProxyType({})


def choose_sets(
    distances: Distances,
    gpus: Sequence[str],
    room: Mapping[str, int],
    count: int | None,
    planes: Mapping[str, Sequence[str]] = NO_PLANES,
) -> Mapping[str, tuple[str, ...]]:
    """Give each GPU `count` NICs, as near as can be; None: one of each plane of an adapter.

    `room` tells how many GPUs each NIC may serve, `planes` maps ports that are planes of one rail to all of these.
    With too few NICs some GPUs get none at all: those that would have the farthest, whatever NVLinks join. Where each
    NIC serves one GPU the sets are an exact minimum; else the GPUs choose in turn, of NICs that are equally near the
    one with the fewest GPUs. A set has planes of two adapters only if no GPU can have all planes of one any more.
    """
    free = {nic: places for nic, places in room.items() if places > 0}
    wholes = _wholes(distances, free, planes)
    sizes = {len(whole) for whole in wholes.values()} - {1}
    if count is not None and (len(sizes) != 1 or count % min(sizes)):
        return _of_any(distances, gpus, free, count)
    if count is not None:
        wholes = {head: whole for head, whole in wholes.items() if len(whole) in sizes}
    heads = {head: min(free[nic] for nic in whole) for head, whole in wholes.items()}
    chosen = _of_any(distances, gpus, heads, 1 if count is None else count // min(sizes))
    found = {gpu: tuple(nic for head in mine for nic in wholes[head]) for gpu, mine in chosen.items()}
    rest = [gpu for gpu in gpus if gpu not in found]
    if count is None or not rest:
        return found
    used = Counter(nic for mine in found.values() for nic in mine)
    left = {nic: places - used[nic] for nic, places in free.items() if places > used[nic]}
    return found | _of_any(distances, rest, left, count)


def _wholes(
    distances: Distances, nics: Iterable[str], planes: Mapping[str, Sequence[str]]
) -> Mapping[str, tuple[str, ...]]:
    """List the NICs that make an adapter with all its planes, one of each, by the first of them."""
    of_port: dict[str, list[str]] = {}
    for nic in sorted(nics, key=distances.order):
        of_port.setdefault(distances.port(nic), []).append(nic)
    adapters = dict.fromkeys(tuple(planes.get(port, (port,))) for port in of_port)
    found = (whole for ports in adapters for whole in zip(*(of_port.get(port, []) for port in ports), strict=False))
    return {whole[0]: whole for whole in found}


def _of_any(
    distances: Distances, gpus: Sequence[str], free: Mapping[str, int], count: int
) -> dict[str, tuple[str, ...]]:
    """Give each GPU `count` NICs, whatever adapters they are of."""
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
) -> dict[str, tuple[str, ...]]:
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
