"""GPUs that belong together and find NICs near them.

One set is better than another by, in this order: replicas of one GPU taken together (they would share it);
NVLinks between the GPUs; the worst locality, then the sum, of the best matching of the GPUs to the free
NICs; how much replicas' GPUs are in use; the locality of the GPUs to each other; how few free GPUs near
them (by NVLink, then by locality) stay behind, so that switches and NUMA nodes are kept whole; how loaded
the nearest NICs are; the driver's order.

GPUs that are alike in all distances are counted, not told apart, and a branch of the search that cannot
beat what was found is left out. On usual hosts that leaves dozens of sets. SEARCH bounds it on strange ones:
the best set so far is the answer then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agent.placement.choices import Choices, collect
from agent.placement.nics import NOTHING
from agent.placement.search import search
from agent.placement.terrain import Terrain

SEARCH = 400
"""Steps of the search, some microseconds each."""


def choose_gpus(
    terrain: Terrain,
    free_gpus: Sequence[str],
    must_include: Sequence[str],
    size: int,
    free_nics: Sequence[str] = (),
    load: Mapping[str, int] = NOTHING,
) -> tuple[str, ...]:
    """Choose `size` of the free GPUs, those that must be included among them and first.

    GPUs are UUIDs, MIG UUIDs or replicas (`UUID::2`). `free_nics` are PCI addresses as for `match_nics`; without
    any, NICs do not count. `load` counts what is in use of a port or a GPU. Gives fewer if fewer are free.
    """
    must = tuple(dict.fromkeys(must_include))[: max(size, 0)]
    room: dict[str, int] = {}
    for nic in free_nics:
        port = terrain.port(nic)
        room[port] = room.get(port, 0) + 1
    rest = [gpu for gpu in dict.fromkeys(free_gpus) if gpu not in must]
    size = min(size, len(must) + len(rest))
    if size <= len(must):
        return must[: max(size, 0)]
    choices: Choices = collect(terrain, rest, must, size, room, load)
    counts = search(choices, SEARCH)
    return (*must, *choices.names(counts))
