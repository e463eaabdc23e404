"""How long a choice takes: on the largest host, of 16 GPUs and 256 VFs, and on any other."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from agent.hardware import recorded
from agent.placement import Distances, Layout, choose, choose_gpus, choose_pairs, match_nics
from measure.alignment.scenarios import Scenario, scenarios
from measure.alignment.stream import SIZES
from measure.figures import Figures, quantile

NODE = "v100-16gpu"
RUNS = 3
"""Of each choice. It takes the same steps every time; what makes one run slower is another process."""


def measure(choices: int) -> Figures:
    """Make each kind of choice so many times, every time with other units free."""
    with tempfile.TemporaryDirectory(prefix="nf-") as folder:
        scenario = next(scenarios(recorded.find(NODE), Path(folder)))
    if (len(Distances(scenario.snapshot).gpus), len(scenario.devices)) != (16, 256):
        raise RuntimeError(f"{NODE} is not the host of 16 GPUs and 256 VFs any more")
    return _of(scenario, choices)


def on(scenario: Scenario, choices: int) -> Figures:
    """Tell how long a choice takes on another host."""
    return {"placement_p99_ms": round(_of(scenario, choices)["placement_p99_ms"], 3)}


def _of(scenario: Scenario, choices: int) -> Figures:
    nics = Layout(Distances(scenario.snapshot), {device: device for device in scenario.devices})
    distances = nics.distances
    gpus = Layout(distances, {uuid: uuid for uuid in distances.gpus})
    most = min(len(distances.gpus), len(scenario.devices))
    sizes = [size for size in SIZES if size <= most]
    chance = random.Random(11)
    samples: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        runs = []
        for _ in range(RUNS):
            began = time.perf_counter()
            work()
            runs.append((time.perf_counter() - began) * 1000)
        samples.setdefault(name, []).append(min(runs))

    for _ in range(choices):
        size = chance.choice(sizes)
        free_gpus = chance.sample(distances.gpus, chance.randint(size, len(distances.gpus)))
        free_nics = chance.sample(scenario.devices, chance.randint(size, len(scenario.devices)))
        some = free_gpus[:size]
        near = free_nics[:size]
        timed("match_nics", lambda: match_nics(distances, some, free_nics, size))  # noqa: B023
        timed("choose_gpus", lambda: choose_gpus(distances, free_gpus, (), size, free_nics))  # noqa: B023
        timed("choose_pairs", lambda: choose_pairs(distances, free_gpus, free_nics, size))  # noqa: B023
        timed("nic_units", lambda: choose(nics, free_nics, (), size, some, partners=free_gpus))  # noqa: B023
        timed("gpu_units", lambda: choose(gpus, free_gpus, (), size, near))  # noqa: B023
    everything = [value for values in samples.values() for value in values]
    return {
        "placement_p50_ms": quantile(everything, 0.5),
        "placement_p99_ms": quantile(everything, 0.99),
        **{f"{name}_p99_ms": quantile(values, 0.99) for name, values in samples.items()},
    }
