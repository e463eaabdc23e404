"""GPUs that belong together and find NICs near them.

One set is better than another by, in this order: replicas of one GPU taken together (they would share it);
NVLinks between the GPUs; the worst locality, then the sum of spans, of the best matching of the GPUs to the
free NICs; how much replicas' GPUs are in use; how far the GPUs are from each other; how few free GPUs near
them (by NVLink, then by locality) stay behind, so that switches and NUMA nodes are kept whole; how loaded
the nearest NICs are; the driver's order.

GPUs that are alike in all distances are counted, not told apart, and a branch of the search that cannot
beat what was found is left out. On usual hosts that leaves dozens of sets. SEARCH bounds it on strange ones:
the best set so far is the answer then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agent.placement.choices import Choices, collect
from agent.placement.distances import Distances
from agent.placement.nics import NOTHING, match_nics
from agent.placement.search import search

SEARCH = 1600
"""Steps of the search, some tens of microseconds each."""


def choose_gpus(
    distances: Distances,
    free_gpus: Sequence[str],
    must_include: Sequence[str],
    size: int,
    free_nics: Sequence[str] = (),
    load: Mapping[str, int] = NOTHING,
    nics: int | None = None,
    *,
    nics_first: bool = False,
) -> tuple[str, ...]:
    """Choose `size` of the free GPUs, those that must be included among them and first.

    GPUs are UUIDs, MIG UUIDs or replicas (`UUID::2`). `free_nics` are PCI addresses as for `match_nics`; without
    any, NICs do not count. `load` counts what is in use of a port or a GPU, `nics` the NICs that the GPUs get in all
    (default: one each). Gives fewer if fewer are free. `nics_first`: the pairs count before NVLinks.
    """
    must = tuple(dict.fromkeys(must_include))[: max(size, 0)]
    room: dict[str, int] = {}
    for nic in free_nics:
        port = distances.port(nic)
        room[port] = room.get(port, 0) + 1
    rest = [gpu for gpu in dict.fromkeys(free_gpus) if gpu not in must]
    size = min(size, len(must) + len(rest))
    if size <= len(must):
        return must[: max(size, 0)]
    choices: Choices = collect(distances, rest, must, size, room, load, size if nics is None else nics, nics_first)
    counts = search(choices, SEARCH)
    return (*must, *choices.names(counts))


def choose_pairs(
    distances: Distances,
    free_gpus: Sequence[str],
    free_nics: Sequence[str],
    size: int,
    load: Mapping[str, int] = NOTHING,
) -> tuple[tuple[str, str], ...]:
    """Choose `size` GPUs and a NIC for each. Gives fewer pairs if one kind has fewer.

    No choice of other GPUs has better pairs; among equal ones NVLinks decide. Arguments as for `choose_gpus`.
    """
    size = min(size, len(free_nics))
    gpus = choose_gpus(distances, free_gpus, (), size, free_nics, load, nics_first=True)
    spare = [gpu for gpu in free_gpus if gpu not in gpus]
    return tuple(zip(gpus, match_nics(distances, gpus, free_nics, len(gpus), load, spare_gpus=spare), strict=True))
