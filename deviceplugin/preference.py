"""Which units a container should get, with what is known of its other resources and of the node.

GetPreferredAllocation asks about one resource. The GPU that was granted just before draws the NIC near,
and the NIC the GPU. What comes first is chosen so that a near partner is free for what comes next.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from agent.clients.kubelet import PodDevices
from agent.config import Resource
from agent.model.gpu_ids import gpus_of
from agent.placement import Layout, Terrain, choose, first_units
from deviceplugin.occupancy import Occupancy
from deviceplugin.pairing import Pairing, is_gpu
from deviceplugin.unit import Unit

log = logging.getLogger(__name__)


class Offered(Protocol):
    """The part of an offer that a preference needs."""

    @property
    def terrain(self) -> Terrain:
        """Where everything is."""

    @property
    def units(self) -> Mapping[str, tuple[Unit, ...]]:
        """Resource name → its units."""

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """Resource name → where its units are."""


class Preference:
    """What was granted and what is in use, and what to prefer in the light of that. For one thread."""

    def __init__(self, clock: Callable[[], float], has_pod: Callable[[str], bool]) -> None:
        """`has_pod` tells whether it is known which pod a unit was granted to."""
        self._clock = clock
        self._pairing = Pairing(clock, has_pod)
        self._occupancy = Occupancy()

    def granted(self, resource: Resource, units: Sequence[Unit]) -> None:
        """Take in a grant."""
        self._occupancy.take(resource.name, (u.unit_id for u in units), self._clock())
        self._pairing.remember(resource, [u.unit_id for u in units], [u.place for u in units])

    def heard(self, pods: Sequence[PodDevices], resource_names: Iterable[str], asked_at: float) -> None:
        """Take in what kubelet's PodResources told when they were asked at a time of the clock."""
        self._occupancy.read(pods, frozenset(resource_names), asked_at)

    def prefer(
        self,
        offered: Offered,
        resources: Mapping[str, Resource],
        resource_name: str,
        available: Sequence[str],
        must_include: Sequence[str],
        size: int,
    ) -> tuple[str, ...]:
        """Say which of the available units a container should get. Never fails."""
        try:
            return self._prefer(offered, resources, resource_name, available, must_include, size)
        except Exception:
            log.exception("no preference could be worked out; taking the first units available")
            return first_units(available, must_include, size)

    def _prefer(
        self,
        offered: Offered,
        resources: Mapping[str, Resource],
        resource_name: str,
        available: Sequence[str],
        must_include: Sequence[str],
        size: int,
    ) -> tuple[str, ...]:
        self._occupancy.free(resource_name, set(available).difference(must_include))
        layout = offered.layouts.get(resource_name) or Layout(offered.terrain)
        resource = resources.get(resource_name)
        if resource is None or resource.kind == "rail":
            return choose(layout, available, must_include, size)
        near = self._pairing.near(resource, size)
        if is_gpu(resource):
            partners, load = self._free_nics(offered, resources)
        else:
            partners, load = self._free_gpus(offered, resources), {}
        return choose(layout, available, must_include, size, near, partners=partners, load=load)

    def _free_gpus(self, offered: Offered, resources: Mapping[str, Resource]) -> list[str]:
        ours = [r.name for r in resources.values() if is_gpu(r) and offered.units.get(r.name)]
        if ours:
            return [offered.layouts[name].gpu_name(u.unit_id) for name in ours for u in self._free(offered, name)]
        terrain = offered.terrain
        taken = gpus_of(self._occupancy.others, terrain.gpu)
        return [gpu for gpu in terrain.gpus if gpu not in taken]

    def _free_nics(self, offered: Offered, resources: Mapping[str, Resource]) -> tuple[list[str], Mapping[str, int]]:
        """List free NICs, and count what is in use of each port.

        Which of several resources the pod will ask for is not known: a port is as free as the one that has
        least left there, unless that leaves nothing.
        """
        free: dict[str, list[str]] = {}
        everything: list[str] = []
        load: Counter[str] = Counter()
        for resource in resources.values():
            if is_gpu(resource) or resource.kind == "rail" or not offered.units.get(resource.name):
                continue
            layout = offered.layouts[resource.name]
            ports: dict[str, list[str]] = {port: [] for port in layout.offered}
            for unit in self._free(offered, resource.name):
                ports[layout.adapter[unit.unit_id]].append(unit.place)
            for port, devices in ports.items():
                load[port] += layout.offered[port] - len(devices)
                everything += devices
                if port not in free or len(devices) < len(free[port]):
                    free[port] = devices
        nics = [device for devices in free.values() for device in devices]
        return nics or everything, load

    def _free(self, offered: Offered, resource_name: str) -> list[Unit]:
        in_use, layout = self._occupancy.in_use, offered.layouts[resource_name]
        return [
            unit
            for unit in offered.units[resource_name]
            if unit.health.healthy and unit.unit_id in layout.rank and not in_use(resource_name, unit.unit_id)
        ]
