"""GPUs and NICs chosen together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agent.placement.gpus import choose_gpus
from agent.placement.nics import NOTHING, match_nics
from agent.placement.terrain import Terrain


def choose_pairs(
    terrain: Terrain,
    free_gpus: Sequence[str],
    free_nics: Sequence[str],
    size: int,
    load: Mapping[str, int] = NOTHING,
) -> tuple[tuple[str, str], ...]:
    """Choose `size` GPUs and a NIC for each. Gives fewer pairs if one kind has fewer.

    The GPUs are those of `choose_gpus`, and no choice of others that NVLinks join as well has better
    pairs. Arguments as there.
    """
    size = min(size, len(free_nics))
    gpus = choose_gpus(terrain, free_gpus, (), size, free_nics, load)
    spare = [gpu for gpu in free_gpus if gpu not in gpus]
    return tuple(zip(gpus, match_nics(terrain, gpus, free_nics, len(gpus), load, spare_gpus=spare), strict=True))
