"""A simulated node as another boot may find it: all devices where they were, under each other's numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

from agent.hardware import recorded
from hack.sim.machine import SimulatedMachine

NUMBERED = ("uverbs", "umad", "issm", "mlx5_", "iommu_groups/")
BOOT_ID = "11111111-2222-3333-4444-555555555555\n"


def permuted(text: str) -> str:
    """Give each device of a modelled node the number of the next one, sort by sort."""
    for sort in NUMBERED:
        numbers = sorted({int(number) for number in re.findall(rf"{sort}(\d+)", text)})
        following = dict(zip(map(str, numbers), [*numbers[1:], *numbers[:1]], strict=True))
        first, *parts = re.split(rf"{sort}(\d+)", text)
        text = first + "".join(f"{sort}{following[n]}{rest}" for n, rest in zip(parts[::2], parts[1::2], strict=True))
    return text


def lay_out(folder: Path, name: str, text: str, *, with_links: bool = True) -> Path:
    """Lay a modelled node out, under a name, as it is after a reboot."""
    document = json.loads(text)
    document["tree"]["proc"]["sys"]["kernel"]["random"]["boot_id"] = BOOT_ID
    place = folder / name
    SimulatedMachine.create(place, recorded.parse(document, name), with_links=with_links)
    return place
