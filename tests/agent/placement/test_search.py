"""The search for GPUs on usual hosts: exact, and over long before its bound."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from agent.model.device import Snapshot
from agent.placement import Terrain
from agent.placement.choices import collect
from agent.placement.gpus import SEARCH
from agent.placement.search import search

FEW, ALL = SEARCH // 2, 20_000


@pytest.mark.parametrize("name", ["a100-8gpu-4nic", "b200-8gpu-2nic", "gb200-4gpu", "h100-8gpu", "v100-16gpu"])
def test_more_looks_find_nothing_better(node_snapshot: Callable[[str], Snapshot], name: str) -> None:
    snapshot = node_snapshot(name)
    terrain = Terrain(snapshot)
    vfs = [device.address for device in snapshot.devices if device.is_vf]
    chance = random.Random(3)
    for _ in range(40):
        free = chance.sample(terrain.gpus, chance.randint(1, len(terrain.gpus)))
        size = chance.randint(1, min(8, len(free)))
        room = Counter(map(terrain.port, chance.sample(vfs, len(vfs) // chance.randint(1, 2))))
        load = {port: chance.randrange(3) for port in room}

        choices = [collect(terrain, free, (), size, room, load) for _ in range(2)]
        assert search(choices[0], FEW) == search(choices[1], ALL)
