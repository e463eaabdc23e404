"""Which units a container should get, with what is known of its other resources and of the node.

GetPreferredAllocation asks about one resource. The GPU that was granted just before draws the NIC near,
and the NIC the GPU. What comes first is chosen so that near partners are free for what comes next: so many as
containers like it have had.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from agent.config import Resource
from agent.errors import Unavailable
from agent.kubelet.podresources import PodDevices, PodResources, held_units
from agent.ledger import Ledger
from agent.model.allocation import PodRef
from agent.model.device import Snapshot
from agent.offer.offer import Offer, Unit
from agent.placement import Distances, Layout, choose
from agent.state import Latest

PAIRING_SECONDS = 3.0
"""The next resource's turn comes within milliseconds, unless another plugin's is between and slow."""
ADMISSION_SECONDS = 2.0
"""PodResources need not show a pod yet that is being admitted: younger grants stand."""
MOMENT_SECONDS = 0.25
"""PodResources may show a pod already of which kubelet has not asked for all: a younger grant draws its partner."""
SHOWN_SECONDS = 0.1
"""After so long PodResources show what kubelet has granted."""
REMEMBERED = 64
"""Containers from which it is guessed what the next one will ask for."""

log = logging.getLogger(__name__)


class Preference:
    """What was granted and what is in use, and what to prefer in the light of that. For one thread."""

    def __init__(
        self, offer: Latest[Offer], clock: Callable[[], float], pod_of: Callable[[str], PodRef | None]
    ) -> None:
        """`pod_of` tells which pod a unit was granted to, if that is known."""
        self._offer = offer
        self._clock = clock
        self.ratios = Ratios()
        self._pairing = Pairing(clock, pod_of, self.ratios)
        self._occupancy = Occupancy(pod_of)

    def granted(self, resource: Resource, units: Sequence[Unit]) -> None:
        """Take in a grant."""
        self._occupancy.take(resource.name, (u.unit_id for u in units), self._clock())
        self._pairing.remember(resource, [u.unit_id for u in units], [u.place for u in units])

    def read(self, pods: Sequence[PodDevices], asked_at: float) -> None:
        """Take in what kubelet's PodResources said when they were asked at a time of the clock."""
        offer = self._offer.value
        self._occupancy.read(pods, frozenset(offer.units), asked_at)
        self.ratios.read(pods, offer.resources, offer.distances)

    def prefer(
        self, resource_name: str, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> tuple[str, ...]:
        """Say which of the available units a container should get. Never fails."""
        try:
            return self._prefer(self._offer.value, resource_name, available, must_include, size)
        except Exception:
            log.exception("no preference could be worked out; taking the first units available")
            return tuple(dict.fromkeys((*must_include, *available)))[: max(size, 0)]

    def _prefer(
        self, offer: Offer, resource_name: str, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> tuple[str, ...]:
        self._occupancy.free(resource_name, set(available).difference(must_include))
        layout = offer.layouts.get(resource_name) or Layout(offer.distances, {})
        resource = offer.resources.get(resource_name)
        if resource is None or resource.kind == "rail":
            return choose(layout, available, must_include, size)
        near, slots = self._pairing.near(resource, size)
        if is_gpu(resource):
            partners, load = self._free_nics(offer)
            # What a slot stands for is chosen when all is known: it may still be any that is free.
            partners += slots
            count = len(slots) or self.ratios.nics(size)
        else:
            partners, load = self._free_gpus(offer), {}
            count = self.ratios.gpus(resource.name, size) or _usual_gpus(layout, size, len(partners))
        return choose(layout, available, must_include, size, near, partners=partners, count=count, load=load)

    def _free_gpus(self, offer: Offer) -> list[str]:
        ours = [r.name for r in offer.resources.values() if is_gpu(r) and offer.units.get(r.name)]
        if ours:
            return [offer.layouts[name].gpu_name(u.unit_id) for name in ours for u in self._free(offer, name)]
        distances = offer.distances
        taken = distances.gpus_of(self._occupancy.others)
        return [gpu for gpu in distances.gpus if gpu not in taken]

    def _free_nics(self, offer: Offer) -> tuple[list[str], Mapping[str, int]]:
        """List free NICs, and count what is in use of each port.

        Which of several resources the pod will ask for is not known: a port is as free as the one that has
        least left there, unless that leaves nothing.
        """
        free: dict[str, list[str]] = {}
        everything: list[str] = []
        load: Counter[str] = Counter()
        for resource in offer.resources.values():
            if is_gpu(resource) or resource.kind == "rail" or not offer.units.get(resource.name):
                continue
            layout = offer.layouts[resource.name]
            ports: dict[str, list[str]] = {port: [] for port in layout.offered}
            for unit in self._free(offer, resource.name):
                ports[layout.adapter[unit.unit_id]].append(unit.place)
            for port, devices in ports.items():
                load[port] += layout.offered[port] - len(devices)
                everything += devices
                if port not in free or len(devices) < len(free[port]):
                    free[port] = devices
        nics = [device for devices in free.values() for device in devices]
        return nics or everything, load

    def _free(self, offer: Offer, resource_name: str) -> list[Unit]:
        layout = offer.layouts[resource_name]
        healthy = (u for u in offer.units[resource_name] if u.health.healthy and u.unit_id in layout.rank)
        return [unit for unit in healthy if not self._in_use(unit)]

    def _in_use(self, unit: Unit) -> bool:
        """Return whether a pod has a unit. Of slots the books know more than kubelet: devices are back with DEL."""
        since = self._occupancy.since(unit.resource_name, unit.unit_id)
        if unit.is_slot and not unit.device:
            return since is not None and since > self._clock() - ADMISSION_SECONDS
        return since is not None


class Occupancy:
    """Units in use, by what was heard last, as far as that can be known without asking. Times are of one clock.

    kubelet says what it hands out (Allocate) and what is free of the one resource that it asks about
    (GetPreferredAllocation), but never that a unit came back. What is free of the other resources is put
    together from the last of these words on each unit and from PodResources, read now and then. And it frees what a
    pod had all at once: one unit that came back tells of the others.
    """

    def __init__(self, pod_of: Callable[[str], PodRef | None]) -> None:
        """`pod_of` tells which pod a unit was granted to, if that is known."""
        self._pod_of = pod_of
        self._since: dict[tuple[str, str], float] = {}
        """Resource and unit in use → since when that is known."""
        self._pods: dict[tuple[str, str], tuple[str, str]] = {}
        """The same, also of other plugins' units → the pod's namespace and name, as PodResources said last."""
        self._others: frozenset[tuple[str, str]] = frozenset()

    def take(self, resource_name: str, unit_ids: Iterable[str], now: float) -> None:
        """Note that kubelet was given these units."""
        for unit in unit_ids:
            self._since[resource_name, unit] = now
            self._pods.pop((resource_name, unit), None)

    def free(self, resource_name: str, unit_ids: Iterable[str]) -> None:
        """Note that kubelet calls these units free, and what their pods had with them."""
        back = [
            (key, since) for u in unit_ids if (since := self._since.pop(key := (resource_name, u), None)) is not None
        ]
        ended = {pod: since for key, since in back if (pod := self._pod(key)) is not None}
        if not ended:
            return
        # A pod of the same name may have come since then: what it has is younger.
        for key, since in list(self._since.items()):
            if (pod := self._pod(key)) in ended and abs(since - ended[pod]) < ADMISSION_SECONDS:
                del self._since[key]
        self._others -= {key for key in self._others if self._pods[key] in ended}

    def _pod(self, key: tuple[str, str]) -> tuple[str, str] | None:
        pod = self._pod_of(key[1])
        return self._pods.get(key) or (None if pod is None else pod.names)

    def read(self, pods: Sequence[PodDevices], resource_names: Collection[str], asked_at: float) -> None:
        """Take in what kubelet's PodResources tell: ours (by resource name), and what other plugins gave."""
        held = {(each.resource_name, each.unit_id): each.pod.names for each in held_units(pods)}
        before = asked_at - ADMISSION_SECONDS
        for key, since in list(self._since.items()):
            if key not in held and since < before:
                del self._since[key]
        for key in held:
            if key[0] in resource_names:
                self._since.setdefault(key, asked_at)
        self._pods = {key: pod for key, pod in held.items() if self._since.get(key, asked_at) <= asked_at}
        self._others = frozenset(key for key in held if key[0] not in resource_names)

    def since(self, resource_name: str, unit_id: str) -> float | None:
        """Return since when a unit of ours is known to be in use; None if it is not."""
        return self._since.get((resource_name, unit_id))

    @property
    def others(self) -> Sequence[tuple[str, str]]:
        """List what other plugins' resources pods hold: resource name and unit."""
        return sorted(self._others)


@dataclass(frozen=True, slots=True)
class _Granted:
    resource: Resource
    units: tuple[str, ...]
    devices: tuple[str, ...]
    at: float


class Pairing:
    """The last grants of one container, as far as is known: kubelet never says for whom it asks.

    It admits one pod after the other, and asks for each resource of a container once, in random order. So
    grants in close succession are one container's until a resource comes up for the second time, or until
    a pod is known to have them: its admission is over then. A wrong guess costs only nearness.
    """

    def __init__(self, clock: Callable[[], float], pod_of: Callable[[str], PodRef | None], ratios: Ratios) -> None:
        """`pod_of` tells which pod a unit was granted to, if that is known; `ratios` gets the containers that are
        complete."""
        self._clock = clock
        self._pod_of = pod_of
        self._ratios = ratios
        self._run: tuple[_Granted, ...] = ()

    def remember(self, resource: Resource, units: Sequence[str], devices: Sequence[str]) -> None:
        """Take in a grant."""
        granted = _Granted(resource, tuple(units), tuple(devices), self._clock())
        self._run = (*self._turn(resource, len(units)), granted)

    def near(self, resource: Resource, size: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Name the devices that the next units of a resource should be near to: a NIC's GPU, a GPU's NIC.

        NICs without a GPU are near other NICs of the container. Apart from that, for GPUs: what its slots seem to be.
        """
        run = self._turn(resource, size)
        complement = [g for g in run if is_gpu(g.resource) != is_gpu(resource)] or run
        late = [g for g in complement if is_gpu(resource) and g.resource.has_slots]
        known = [g for g in complement if g not in late]
        return _devices(known), _devices(late)

    def _turn(self, resource: Resource, size: int) -> tuple[_Granted, ...]:
        """List the last grants that go with so many units of a resource that kubelet asks for now; learn of others."""
        run = self._container_of(resource, size)
        over = [g for g in self._run if g not in run]
        gpus = sum(len(g.units) for g in over if is_gpu(g.resource))
        for grant in over:
            if gpus and not is_gpu(grant.resource):
                self._ratios.note(grant.resource.name, len(grant.units), gpus)
        self._run = run
        return run

    def _container_of(self, resource: Resource, size: int) -> tuple[_Granted, ...]:
        now = self._clock()
        # The pod of one is known: it is admitted, with what came in the same moment.
        known = any(self._pod_of(unit) is not None for grant in self._run for unit in grant.units)
        run = tuple(g for g in self._run if g.at >= now - (MOMENT_SECONDS if known else PAIRING_SECONDS))
        same = [i for i, g in enumerate(run) if g.resource.name == resource.name]
        if not same:
            return run
        # It is another container's turn. Its other half may have come already, and been taken for the other half of
        # the one before, if that one has none: then the numbers fit better now.
        later = [g for g in run[same[-1] + 1 :] if is_gpu(g.resource) != is_gpu(resource)]
        before = len(run[same[-1]].units)
        fits = [g for g in later if self._fit(resource, size, g) and not self._fit(resource, before, g)]
        return run[same[-1] + 1 :] if fits else ()

    def _fit(self, resource: Resource, size: int, other: _Granted) -> bool:
        """Return whether containers have such numbers. Most ask for as many GPUs as NICs."""
        nics, gpus = (len(other.units), size) if is_gpu(resource) else (size, len(other.units))
        name = other.resource.name if is_gpu(resource) else resource.name
        return (self._ratios.gpus(name, nics) or nics) == gpus


class Ratios:
    """How many GPUs the last containers had with so many NICs. The next one is mostly like one of them.

    kubelet says neither when it asks for the first of the two.
    """

    def __init__(self) -> None:
        self._containers: deque[tuple[str, int, int]] = deque(maxlen=REMEMBERED)
        """Resource of the NICs, their number, that of the GPUs; the newest last."""
        self._guessed: deque[tuple[str, int, int]] = deque(maxlen=REMEMBERED)
        """The same of containers that PodResources have yet to list."""
        self._listed: frozenset[tuple[PodRef, str]] = frozenset()
        """Pod and name of the containers that PodResources listed last."""

    def note(self, resource_name: str, nics: int, gpus: int) -> None:
        """Take in what was granted in close succession: one container's, it seems. PodResources know better."""
        self._guessed.append((resource_name, nics, gpus))

    def read(self, pods: Sequence[PodDevices], resources: Mapping[str, Resource], distances: Distances) -> None:
        """Take in the containers that PodResources did not list before."""
        own = {name for name, resource in resources.items() if is_gpu(resource)}
        found = {(pod.pod, c.name): c for pod in pods for c in pod.containers}
        for key in (key for key in found if key not in self._listed):
            units = Counter[str]()
            for devices in found[key].devices:
                units[devices.resource_name] += len(devices.device_ids)
            others = [unit for unit in found[key].units if unit[0] in own or unit[0] not in resources]
            gpus = len(distances.gpus_of(others, own, found[key].numa_nodes))
            for name in (name for name in units if gpus and name in resources and name not in own):
                self._containers.append((name, units[name], gpus))
        self._listed = frozenset(found)
        self._guessed.clear()

    def gpus(self, resource_name: str, nics: int) -> int | None:
        """Return how many GPUs come with so many NICs of a resource; None if nothing is known that says it."""
        return _scaled(nics, [(n, gpus) for name, n, gpus in self._newest() if name == resource_name])

    def nics(self, gpus: int) -> int | None:
        """Return how many NICs come with so many GPUs; None if nothing is known that says it."""
        return _scaled(gpus, [(n, nics) for _, nics, n in self._newest()])

    def _newest(self) -> Iterator[tuple[str, int, int]]:
        yield from reversed(self._guessed)
        yield from reversed(self._containers)


def _devices(grants: Iterable[_Granted]) -> tuple[str, ...]:
    return tuple(device for grant in grants for device in grant.devices if device)


def _scaled(count: int, known: Sequence[tuple[int, int]]) -> int | None:
    """Return what goes with a number: what went with it last, else as much as with others in their ratio."""
    same = (b for a, b in known if a == count)
    return next(same, next((count * b // a for a, b in known if count * b % a == 0), None))


def _usual_gpus(layout: Layout, nics: int, free_gpus: int) -> int:
    """Guess how many GPUs so many NICs are for: as many; if there are not as many, with what each has on this node."""
    each = len(layout.offered) // max(1, len(layout.distances.gpus))
    return nics if nics <= free_gpus or each < 2 else -(-nics // each)


def is_gpu(resource: Resource) -> bool:
    """Return whether a resource's units are GPUs."""
    return resource.kind == "gpu"


# ------------------------------------------------------------------------------------------------------ what pods hold


@dataclass(frozen=True, slots=True)
class UsageTimes:
    """When kubelet is asked."""

    settle: float = 1.0
    """An admission's grants follow each other; the last one's pod is to be in the answer."""
    pause: float = 2.0
    """Between two questions."""
    look: float = 60.0
    """So old an answer may become: what other plugins give out, and take back, changes none of our books."""


DEFAULT_TIMES = UsageTimes()


class Usage:
    """Reads for `Preference` what pods hold, on a node with GPUs. `run` until cancelled.

    kubelet never says that a unit came back, nor what other plugins hand out. PodResources do, but only if
    asked, and nobody may ask while kubelet waits. So every answer that anybody had is taken in; and where nobody asks
    after the books have changed, kubelet is asked here, a moment later: one question for all pods that start together.
    """

    def __init__(
        self,
        kubelet: PodResources,
        preference: Preference,
        snapshot: Latest[Snapshot],
        ledger: Ledger,
        times: UsageTimes = DEFAULT_TIMES,
    ) -> None:
        self._kubelet = kubelet
        self._preference = preference
        self._snapshot = snapshot
        self._ledger = ledger
        self._times = times
        self._changed = asyncio.Event()
        self._wanted = -math.inf
        """An answer that is older is no good any more, by kubelet's clock."""

    async def run(self) -> None:
        """Take in what kubelet tells, and see to it that it is asked after each change and now and then."""
        loop = asyncio.get_running_loop()

        def note() -> None:
            with contextlib.suppress(RuntimeError):  # the ledger may outlive the loop
                loop.call_soon_threadsafe(self._note_change)

        self._ledger.subscribe(note)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._take_in(), name="usage")
            tasks.create_task(self._ask(), name="questions about usage")

    def _note_change(self) -> None:
        self._wanted = self._kubelet.clock() + SHOWN_SECONDS
        self._changed.set()

    async def _take_in(self) -> None:
        found = self._kubelet.newest.value
        while True:
            if found.asked_at > -math.inf and self._snapshot.value.all_gpus:
                self._preference.read(found.pods, found.asked_at)
            found = await self._kubelet.newest.other_than(found)

    async def _ask(self) -> None:
        """Ask for ever. A kubelet that does not answer is asked next time."""
        self._wanted = self._kubelet.clock()
        while True:
            self._changed.clear()
            try:
                if self._snapshot.value.all_gpus:
                    await self._kubelet.listing(self._wanted)
            except Unavailable as error:
                log.debug("what pods hold stays as it was known: %s", error)
            await asyncio.sleep(self._times.pause)
            try:
                async with asyncio.timeout(self._times.look):
                    await self._changed.wait()
            except TimeoutError:
                self._wanted = self._kubelet.clock() - self._times.look
            else:
                await asyncio.sleep(self._times.settle)
