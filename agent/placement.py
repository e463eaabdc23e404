"""Which units a request should get: pure, deterministic, and never a reason to fail.

The caller names the free units, how many are wanted, and the devices that the new ones should be
near to (a GPU's NIC, a NIC's GPU). Nearness comes first; then the load is spread over the adapters
behind the units. A wrong guess costs bandwidth, never correctness, so any surprise ends in "the
first ones available".
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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


def choose(
    snapshot: Snapshot,
    offered: Iterable[Option],
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
    near: Sequence[str] = (),
) -> tuple[str, ...]:
    """Choose `size` of the available unit IDs, those that must be included among them.

    `offered` are all units of the resource, `near` the devices that the choice should be close to,
    each of which should get a device of its own. Always answers; with fewer IDs if fewer are there.
    """
    try:
        return _choose(snapshot, {o.unit_id: o for o in offered}, available, must_include, size, near)
    except Exception:
        log.exception("no preference could be worked out; taking the first units available")
        return _first(available, must_include, size)


def _first(available: Sequence[str], must_include: Sequence[str], size: int) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*must_include, *available)))[: max(size, 0)]


def _choose(
    snapshot: Snapshot,
    offered: Mapping[str, Option],
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
    near: Sequence[str],
) -> tuple[str, ...]:
    chosen = list(dict.fromkeys(must_include))[: max(size, 0)]
    free = [offered[i] for i in dict.fromkeys(available) if i in offered and i not in chosen]
    places = _Places(snapshot)
    load = Counter(places.adapter(o.device) for o in offered.values())
    load.subtract(places.adapter(o.device) for o in free)
    mine = Counter(places.adapter(offered[i].device) for i in chosen if i in offered)
    wanted = [places.pci(device) for device in near]
    while free and len(chosen) < size:
        # Each device of `near` takes its turn, so that each finds the nearest adapter that serves
        # no other one yet; without any, the new units should at least be near each other.
        turn = [wanted[len(chosen) % len(wanted)]] if wanted else []
        peers = [places.pci(offered[i].device) for i in chosen if i in offered]

        def cost(option: Option, turn: list[PciDevice | None] = turn, peers: list[PciDevice | None] = peers) -> object:
            adapter = places.adapter(option.device)
            return (
                [places.distance(option.device, other) for other in turn],
                mine[adapter],
                sum(places.distance(option.device, other) for other in peers),
                load[adapter],
                *places.order(option),
            )

        best = min(free, key=cost)  # type: ignore[arg-type]
        free.remove(best)
        chosen.append(best.unit_id)
        mine[places.adapter(best.device)] += 1
    rest = [i for i in available if i not in chosen]
    return (*chosen, *rest[: max(size - len(chosen), 0)])


class _Places:
    """Where the devices of one snapshot are."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._known: dict[tuple[str, str], Locality] = {}

    def pci(self, device: str) -> PciDevice | None:
        gpu = self.snapshot.gpu_by_uuid.get(device)
        return self.snapshot.by_address.get(gpu.pci_address if gpu else device)

    def adapter(self, device: str) -> str:
        """The PF behind a VF; anything else is its own adapter."""
        pci = self.snapshot.by_address.get(device)
        return (pci.physfn if pci else None) or device

    def distance(self, device: str, other: PciDevice | None) -> Locality:
        """A VF is as near as its PF, so the answer is kept per adapter."""
        pci = self.pci(self.adapter(device)) or self.pci(device)
        if pci is None or other is None:
            return Locality.SYS
        key = (pci.address, other.address)
        if key not in self._known:
            self._known[key] = locality(pci, other)
        return self._known[key]

    def order(self, option: Option) -> tuple[object, ...]:
        """Natural order: `…-2` before `…-10`, VF index order before text order."""
        pci = self.pci(option.device)
        head, _, tail = option.unit_id.rpartition("-")
        number = int(tail) if tail.isdecimal() else -1
        index = pci.vf_index if pci is not None and pci.vf_index is not None else -1
        return (pci.address if pci is not None and index < 0 else option.device, index, head, number, option.unit_id)
