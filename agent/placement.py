"""Which units a request should get: pure, deterministic, and never a reason to fail.

The caller names the free units, how many are wanted, and the devices that the new ones should be
near to (a GPU's NIC, a NIC's GPU). Nearness comes first; then the load is spread over the adapters
behind the units. A wrong guess costs bandwidth, never correctness, so any surprise ends in "the
first ones available".
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agent.model.device import PciDevice, Snapshot
from agent.model.topology import Locality, locality

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Option:
    """A unit that may be chosen."""

    unit_id: str
    device: str
    """PCI address, or the GPU's UUID."""


class Layout:
    """Where all units of one resource are. Made once per snapshot, so that a choice is quick."""

    def __init__(self, snapshot: Snapshot, options: Iterable[Option] = ()) -> None:
        self._snapshot = snapshot
        ordered = sorted(options, key=self._order)
        self.rank = {option.unit_id: rank for rank, option in enumerate(ordered)}
        """Natural order: `…-2` before `…-10`, VF index order before text order."""
        self.adapter = {option.unit_id: self._adapter(option.device) for option in ordered}
        """The device that a unit's bandwidth comes from: the PF behind a VF, else the device itself."""
        self.offered = Counter(self.adapter.values())
        self._distances: dict[tuple[str, str], Locality] = {}

    def distance(self, adapter: str, other: str) -> Locality:
        """Tell how near an adapter is to any device. A VF is as near as its PF."""
        key = (adapter, other)
        if key not in self._distances:
            a, b = self._pci(adapter), self._pci(other)
            self._distances[key] = Locality.SYS if a is None or b is None else locality(a, b)
        return self._distances[key]

    def _pci(self, device: str) -> PciDevice | None:
        gpu = self._snapshot.gpu_by_uuid.get(device)
        return self._snapshot.by_address.get(gpu.pci_address if gpu else device)

    def _adapter(self, device: str) -> str:
        pci = self._snapshot.by_address.get(device)
        return (pci.physfn if pci else None) or device

    def _order(self, option: Option) -> tuple[str, int, str, int, str]:
        pci = self._pci(option.device)
        index = pci.vf_index if pci is not None and pci.vf_index is not None else -1
        place = self._adapter(option.device) if index >= 0 or pci is None else pci.address
        head, _, tail = option.unit_id.rpartition("-")
        return place, index, head, int(tail) if tail.isdecimal() else -1, option.unit_id


def choose(
    layout: Layout, available: Sequence[str], must_include: Sequence[str], size: int, near: Sequence[str] = ()
) -> tuple[str, ...]:
    """Choose `size` of the available unit IDs, those that must be included among them.

    `near` are the devices that the choice should be close to, each of which should get a device of
    its own. Always answers; with fewer IDs if fewer are there.
    """
    try:
        return _choose(layout, available, must_include, size, near)
    except Exception:
        log.exception("no preference could be worked out; taking the first units available")
        return tuple(dict.fromkeys((*must_include, *available)))[: max(size, 0)]


def _choose(
    layout: Layout, available: Sequence[str], must_include: Sequence[str], size: int, near: Sequence[str]
) -> tuple[str, ...]:
    chosen = list(dict.fromkeys(must_include))[: max(size, 0)]
    free: dict[str, list[int]] = {}
    """Adapter → ranks of its free units, the first one last."""
    unit_of: dict[int, str] = {}
    for unit in set(available).difference(chosen):
        if (rank := layout.rank.get(unit)) is not None:
            free.setdefault(layout.adapter[unit], []).append(rank)
            unit_of[rank] = unit
    load = {adapter: layout.offered[adapter] - len(ranks) for adapter, ranks in free.items()}
    for ranks in free.values():
        ranks.sort(reverse=True)
    peers = [layout.adapter[unit] for unit in chosen if unit in layout.adapter]
    while free and len(chosen) < size:
        # Each device of `near` takes its turn, so that each finds the nearest adapter that serves
        # no other one yet; without any, the new units should at least be near each other.
        turn = near[len(chosen) % len(near)] if near else None

        def cost(adapter: str, turn: str | None = turn) -> tuple[int, int, int, int, int]:
            return (
                layout.distance(adapter, turn) if turn is not None else 0,
                peers.count(adapter),
                sum(layout.distance(adapter, peer) for peer in peers),
                load[adapter],
                free[adapter][-1],
            )

        best = min(free, key=cost)
        chosen.append(unit_of[free[best].pop()])
        peers.append(best)
        load[best] += 1
        if not free[best]:
            del free[best]
    taken = set(chosen)
    rest = [unit for unit in dict.fromkeys(available) if unit not in taken]
    return (*chosen, *rest[: max(size - len(chosen), 0)])
