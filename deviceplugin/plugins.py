"""All device plugins of the node as one: follows inventory and ledger, posts the lists.

Owns the way from a new snapshot, a quarantine or another configuration to every resource's list.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agent.clients.kubelet import PodDevices
from agent.config import Config, HealthSettings, Resource
from agent.device_info import GrantedFiles
from agent.errors import LedgerError
from agent.health import HealthBook
from agent.model.device import Snapshot
from deviceplugin import usage
from deviceplugin.allocation import Allocator, GrantBook, Offer
from deviceplugin.assignment import Overlap, errors
from deviceplugin.books import Books as Books
from deviceplugin.books import Reading, SlotBook, read
from deviceplugin.compat_cdi import PoolSpecs, pool_specs
from deviceplugin.gpu_response import GpuFiles
from deviceplugin.gpu_units import with_profiles
from deviceplugin.informed import InformingBook
from deviceplugin.offers import Offers
from deviceplugin.registration import DEFAULT_PACE, SOCKET_PATTERN, Pace, RegistrationStatus, ResourceServer
from deviceplugin.selectors import asks_for_names
from deviceplugin.server import Observe, UnitBoard, unobserved
from deviceplugin.unit import Unit

SETTLE_SECONDS = 0.05
"""Ledger changes come in bursts; the lists follow the last one."""
FILES_SECONDS = 5.0
"""Between two looks at what GPUs are passed by: their toolkit may write its CDI spec long after the driver came.
And at our own specs, which another program may remove, or a full disk refuse."""

log = logging.getLogger(__name__)


class Inventory(Protocol):
    """The newest snapshot, and the wait for a newer one."""

    @property
    def snapshot(self) -> Snapshot:
        """The newest snapshot."""

    async def newer_than(self, generation: int) -> Snapshot:
        """Wait for a snapshot of a higher generation."""


@dataclass(frozen=True, slots=True)
class ResourceStatus:
    """One resource, for readiness, status page and metrics."""

    resource_name: str
    kind: str
    units: int
    unhealthy: tuple[tuple[str, int], ...]
    """Reason → number of units, by reason."""
    registration: RegistrationStatus

    @property
    def registered(self) -> bool:
        """Tell whether kubelet holds an open stream."""
        return self.registration.streams_open > 0


class DevicePlugins:
    """Serves every resource of the configuration. `run` until `close`."""

    def __init__(
        self,
        config: Config,
        inventory: Inventory,
        ledger: Books,
        *,
        observe: Observe = unobserved,
        gpu_files: Callable[[], GpuFiles] = GpuFiles,
        device_info: Path | None = None,
        health: HealthBook | None = None,
        granting: Callable[[Collection[str]], object] | None = None,
        pods: Callable[[], Awaitable[Sequence[PodDevices]]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        pace: Pace = DEFAULT_PACE,
        files_seconds: float = FILES_SECONDS,
    ) -> None:
        """Join the parts. `device_info` is where Multus reads what granted VFs are; None to tell nobody.

        `health` tells what of the facts counts; without it all do, at once.
        `granting` is told of slots that are about to be granted, and may block briefly: whoever had them is gone.
        `pods` asks kubelet what pods hold; without it only kubelet's calls tell what is in use.
        """
        self.folder = config.kubelet_dir / "device-plugins"
        self._pool_specs = PoolSpecs(config.cdi_dir)
        self._informing = (
            None
            if device_info is None
            else InformingBook(ledger, GrantedFiles(device_info), self.unit, lambda: inventory.snapshot)
        )
        book: GrantBook = self._informing or ledger
        self.allocator = Allocator(
            (),
            SlotBook(book, granting) if granting is not None else book,
            clock,
            has_pod=lambda unit_id: ledger.pod_of(unit_id) is not None,
        )
        self._pods = pods
        self._clock = clock
        self._usage_changed = asyncio.Event()
        self._configured = self._resources = config.resources
        self._inventory = inventory
        self._health = health or HealthBook(HealthSettings(0, 0, 0), clock)
        self._ledger = ledger
        self._gpu_files = gpu_files
        self._files_seconds = files_seconds
        self._observe = observe
        self._pace = pace
        self._servers: dict[str, ResourceServer] = {}
        self._serving: dict[str, asyncio.Task[None]] = {}
        self._boards: dict[str, UnitBoard] = {}
        self._books_changed = asyncio.Event()
        self._health_changed = asyncio.Event()
        self._offered = asyncio.Event()
        """The newest configuration's lists are posted."""
        self._closing = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()
        self._set_up(config.resources)

    @property
    def units(self) -> Mapping[str, tuple[Unit, ...]]:
        """Every resource's units as offered now."""
        return self.allocator.offer.units

    @property
    def kinds(self) -> Mapping[str, str]:
        """Name of each resource → its kind."""
        return {resource.name: resource.kind for resource in self._resources}

    def unit(self, unit_id: str) -> Unit | None:
        """Find a unit of any resource by its ID."""
        return self.allocator.offer.by_id.get(unit_id)

    @property
    def overlaps(self) -> tuple[Overlap, ...]:
        """Devices that two resources of our own configuration select; the first of them has each."""
        return errors(self._resources, self.allocator.offer.overlaps)

    @property
    def ready(self) -> bool:
        """Tell whether kubelet holds an open stream for every resource."""
        return all(self._servers[resource.name].status.streams_open for resource in self._resources)

    def status(self) -> tuple[ResourceStatus, ...]:
        """Tell how every resource stands, in the order of the configuration."""
        return tuple(
            ResourceStatus(
                resource_name=resource.name,
                kind=resource.kind,
                units=len(units := self.units.get(resource.name, ())),
                unhealthy=tuple(sorted(Counter(u.health.reason for u in units if not u.health.healthy).items())),
                registration=self._servers[resource.name].status,
            )
            for resource in self._resources
        )

    async def run(self) -> None:
        """Offer, serve and stay registered until closed."""
        self._ended.clear()
        loop = asyncio.get_running_loop()
        self._ledger.subscribe(lambda: _tell(loop, self._note_change))
        self._health.subscribe(lambda: _tell(loop, self._health_changed.set))
        try:
            await asyncio.to_thread(sweep, self.folder)
            async with asyncio.TaskGroup() as tasks:
                following = [tasks.create_task(self._follow(tasks), name="device lists")]
                if self._pods is not None:
                    reading = usage.follow(
                        self._usage_changed,
                        self._pods,
                        self.allocator.heard,
                        self._clock,
                        needed=lambda: bool(self._inventory.snapshot.gpus),
                    )
                    following.append(tasks.create_task(reading, name="usage"))
                await self._closing.wait()
                for server in self._servers.values():
                    server.close()
                for task in following:
                    task.cancel()
        finally:
            self.allocator.close()
            self._ended.set()

    async def reconfigure(self, config: Config) -> None:
        """Offer what another configuration says. Returns when its lists are posted.

        The server of a resource that is no more ends, and kubelet counts its units as unhealthy, then forgets them.
        What pods hold of it stays in their hands and in the books. A device in use is offered under no other name
        until it is free.
        """
        self._offered.clear()
        self._configured = config.resources
        self._set_up(config.resources)
        self._books_changed.set()
        closing = asyncio.ensure_future(self._closing.wait())
        offered = asyncio.ensure_future(self._offered.wait())
        try:
            await asyncio.wait((closing, offered), return_when=asyncio.FIRST_COMPLETED)
        finally:
            closing.cancel()
            offered.cancel()

    @property
    def specs_problem(self) -> str | None:
        """Tell why the CDI specs of pools are not as they should be."""
        return self._pool_specs.problem

    def look_again(self) -> None:
        """Say that somebody may have removed CDI specs of pools. Belongs to the loop's thread."""
        if self._pool_specs.is_watched:
            self._books_changed.set()

    async def close(self) -> None:
        """End streams and servers, and wait for that. Devices in pods stay as they are."""
        self._closing.set()
        await self._ended.wait()

    def _note_change(self) -> None:
        self._books_changed.set()
        self._usage_changed.set()

    def _set_up(self, resources: tuple[Resource, ...]) -> None:
        """Take a configuration's resources. Their servers start with their first lists."""
        if resources == self._resources and self._servers:
            return
        self._resources = resources
        for resource in resources:
            if resource.name not in self._servers:
                board = self._boards[resource.name] = UnitBoard()
                self._servers[resource.name] = ResourceServer(
                    resource.name, self.folder, board, self.allocator, self._observe, self._pace
                )
        if self._informing is not None:
            # What a slot stands for is told by its attachment, once that is known.
            early = (r for r in resources if r.kind in ("vf", "nic") and r.binding == "early")
            self._informing.resource_names = frozenset(r.name for r in early)

    def _serve(self, tasks: asyncio.TaskGroup) -> None:
        """Start the servers that do not run yet, and end those of resources that are no more."""
        wanted = {resource.name for resource in self._resources}
        for name in self._servers.keys() - wanted:
            self._servers.pop(name).close()
            self._boards.pop(name)
        for name, server in self._servers.items():
            if name not in self._serving and not self._closing.is_set():
                self._serving[name] = tasks.create_task(self._run_server(name, server), name=f"device plugin {name}")

    async def _run_server(self, name: str, server: ResourceServer) -> None:
        await server.run()
        del self._serving[name]
        self._books_changed.set()  # another of this name may be waiting for its turn

    async def _follow(self, tasks: asyncio.TaskGroup) -> None:
        """Post new lists whenever the snapshot, the books or the configuration ask for them."""
        snapshot, looked_at = self._inventory.snapshot, self._clock()
        files = await asyncio.to_thread(self._gpu_files)
        offers, books = Offers(self._health, self._clock), Reading()
        while True:
            self._books_changed.clear()
            self._health_changed.clear()
            self._set_up(with_profiles(self._configured, snapshot, self._resources))
            resources = self._resources
            books = await self._read_books(resources, books)
            offer = await asyncio.to_thread(self._make, offers, resources, snapshot, files, books)
            if resources is not self._resources:
                offers.withdraw()
                continue
            if offer is not None:
                self._post(resources, offer)
            self._serve(tasks)
            self._offered.set()
            await self._inform()
            specs = self._files_seconds if self._pool_specs.is_watched else None
            files_due = self._seconds_to_files(snapshot, looked_at)
            newer = await self._next(snapshot, offers.seconds_to_look(), files_due, specs)
            if newer is not snapshot or self._seconds_to_files(snapshot, looked_at) == 0:
                looked_at = self._clock()
                snapshot, files = newer, await asyncio.to_thread(self._gpu_files)

    def _seconds_to_files(self, snapshot: Snapshot, looked_at: float) -> float | None:
        """Tell in how many seconds a look at the GPUs' files is due; None if nobody is granted GPUs here."""
        if not snapshot.gpus or all(resource.kind not in ("gpu", "rail") for resource in self._resources):
            return None
        return max(0.0, looked_at + self._files_seconds - self._clock())

    def _make(
        self, offers: Offers, resources: tuple[Resource, ...], snapshot: Snapshot, files: GpuFiles, books: Reading
    ) -> Offer | None:
        """Make an offer if one is due, and its CDI specs: kubelet may ask as soon as it has the list."""
        offer = offers.make(resources, snapshot, files, books)
        if offer is not None:
            self._pool_specs.keep(pool_specs(resources, offer.units, snapshot))
        else:
            self._pool_specs.mend()
        return offer

    async def _inform(self) -> None:
        if self._informing is not None:
            try:
                await asyncio.to_thread(self._informing.keep)
            except LedgerError as error:
                log.warning("device-info files stay as they are: %s", error)

    async def _next(self, snapshot: Snapshot, *dues: float | None) -> Snapshot:
        """Wait for a newer snapshot, for a change in the books or in health, or for the first of `dues` (seconds)."""
        seconds = min((due for due in dues if due is not None), default=None)
        newer = asyncio.ensure_future(self._inventory.newer_than(snapshot.generation))
        books = asyncio.ensure_future(self._books_changed.wait())
        health = asyncio.ensure_future(self._health_changed.wait())
        try:
            await asyncio.wait((newer, books, health), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if newer.done():
                return newer.result()
            if books.done():
                await asyncio.sleep(SETTLE_SECONDS)
            return snapshot
        finally:
            newer.cancel()
            books.cancel()
            health.cancel()

    async def _read_books(self, resources: tuple[Resource, ...], last: Reading) -> Reading:
        try:
            return await asyncio.to_thread(
                read,
                self._ledger,
                with_names=any(map(asks_for_names, resources)),
                with_slots=any(resource.binding == "late" for resource in resources),
            )
        except LedgerError as error:
            log.warning("the device lists keep the quarantines known so far: %s", error)
            return last

    def _post(self, resources: tuple[Resource, ...], offer: Offer) -> None:
        for overlap in errors(resources, offer.overlaps):
            if overlap not in self.allocator.offer.overlaps:
                log.warning("%s", overlap)
        self.allocator.resources = {resource.name: resource for resource in resources}
        self.allocator.offer = offer
        for resource in resources:
            self._boards[resource.name].post(offer.units[resource.name])


def sweep(folder: Path) -> None:
    """Remove sockets of earlier processes: a killed one leaves its files behind.

    One that somebody listens on is left alone: during an update two processes may overlap. One that
    cannot be removed stays, since it does no harm.
    """
    for path in folder.glob(SOCKET_PATTERN):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)  # a process that has stopped accepts nobody, and would hold up the start
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                _remove(path)
            except OSError:
                continue


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s, which an earlier process left behind, stays: %s", path, error.strerror)
    else:
        log.info("removed %s, which an earlier process left behind", path)


def _tell(loop: asyncio.AbstractEventLoop, note: Callable[[], None]) -> None:
    # The ledger may outlive the loop.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(note)
