"""All device plugins of the node as one: follows inventory and ledger, posts the lists.

Owns the way from a new snapshot, a quarantine or another configuration to every resource's list.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from agent.config import Config, Resource
from agent.edits.build import GpuFiles
from agent.errors import LedgerError, Unavailable
from agent.health_history import HealthHistory
from agent.ledger import Ledger
from agent.model.device import Snapshot
from agent.model.vf_identity import Rail
from agent.offer.offer import Offer
from agent.offer.offers import Offers, read
from agent.offer.rails import NamedRails
from agent.offer.selection import Overlap, asks_for_names, errors
from agent.offer.units import Reading, with_profiles
from agent.state import Latest, first
from deviceplugin.allocation import Allocator
from deviceplugin.grant_records import GrantRecords
from deviceplugin.registration import DEFAULT_TIMES, SOCKET_PATTERN, RegistrationStatus, ResourceServer, Times, sweep
from deviceplugin.server import Observe, post, unobserved

SETTLE_SECONDS = 0.05
"""Ledger changes come in bursts; the lists follow the last one."""
FILES_SECONDS = 5.0
"""Between two looks at what GPUs are passed by: their toolkit may write its CDI spec long after the driver came."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ground:
    """What offers are made of, besides the configuration."""

    snapshot: Latest[Snapshot]
    ledger: Ledger
    health: HealthHistory
    """Tells what of the facts counts."""
    gpu_files: Callable[[], GpuFiles] = GpuFiles
    """Looks for what the host has to pass GPUs by. Blocks."""
    files_seconds: float = FILES_SECONDS
    """Between two looks at files that others write."""


class DevicePlugins:
    """Serves every resource of the configuration. `run` until `close`."""

    def __init__(
        self,
        config: Latest[Config],
        ground: Ground,
        allocator: Allocator,
        records: GrantRecords,
        observe: Observe = unobserved,
        times: Times = DEFAULT_TIMES,
    ) -> None:
        """Serve what `allocator` grants; its offer gets each new one."""
        self.folder = config.value.kubelet_dir / "device-plugins"
        self.allocator = allocator
        self._records = records
        self._config = config
        self._ground = ground
        self._posted: Latest[Config | None] = Latest(None)
        """The configuration whose lists are posted."""
        self._resources = config.value.resources
        """All of the configuration, and those that `mig: mixed` makes."""
        self._offer = allocator.offer
        self._observe = observe
        self._times = times
        self._servers: dict[str, ResourceServer] = {}
        self._serving: dict[str, asyncio.Task[None]] = {}
        self._books_changed = asyncio.Event()
        self._health_changed = asyncio.Event()
        self._closing = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()
        self._set_up(config.value.resources)

    @property
    def overlaps(self) -> tuple[Overlap, ...]:
        """Devices that two resources of our own configuration select; the first of them has each."""
        return errors(self._resources, self._offer.value.overlaps)

    @property
    def ready(self) -> bool:
        """Return whether kubelet holds an open stream for every resource."""
        return all(status.registered for status in self.status().values())

    def status(self) -> Mapping[str, RegistrationStatus]:
        """Return how every resource that kubelet is offered stands with it, in the order of the configuration."""
        return {resource.name: self._servers[resource.name].status for resource in self._served}

    @property
    def _served(self) -> tuple[Resource, ...]:
        """The resources that kubelet is offered; others are for claims."""
        return tuple(resource for resource in self._resources if resource.offer != "dra")

    async def run(self) -> None:
        """Offer, serve and stay registered until closed."""
        self._ended.clear()
        loop = asyncio.get_running_loop()
        self._ground.ledger.subscribe(partial(_tell, loop, self._books_changed.set))
        self._ground.health.subscribe(partial(_tell, loop, self._health_changed.set))
        try:
            await asyncio.to_thread(sweep, self.folder, SOCKET_PATTERN)
            async with asyncio.TaskGroup() as tasks:
                following = tasks.create_task(self._follow(tasks), name="device lists")
                await self._closing.wait()
                for server in self._servers.values():
                    server.close()
                following.cancel()
        finally:
            self.allocator.close()
            self._ended.set()

    async def reconfigured(self) -> None:
        """Wait until the lists of the newest configuration are posted, or until closed.

        The server of a resource that is no more ends, and kubelet counts its units as unhealthy, then forgets them.
        What pods hold of it stays in their hands and in the books. A device in use is offered under no other name
        until it is free.
        """
        while (posted := self._posted.value) is not self._config.value and not self._closing.is_set():
            await first(self._posted.other_than(posted), self._closing.wait())

    async def close(self) -> None:
        """End streams and servers, and wait for that. Devices in pods stay as they are."""
        self._closing.set()
        await self._ended.wait()

    def _set_up(self, resources: tuple[Resource, ...]) -> None:
        """Take a configuration's resources. Their servers start with their first lists."""
        if resources == self._resources and self._servers:
            return
        self._resources = resources
        for resource in self._served:
            if resource.name not in self._servers:
                self._servers[resource.name] = ResourceServer(
                    resource.name, self.folder, self.allocator, self._observe, self._times
                )
        self._records.go_by(self._served)

    def _serve(self, tasks: asyncio.TaskGroup) -> None:
        """Start the servers that do not run yet, and end those of resources that are no more."""
        wanted = {resource.name for resource in self._served}
        for name in self._servers.keys() - wanted:
            self._servers.pop(name).close()
        for name, server in self._servers.items():
            if name not in self._serving and not self._closing.is_set():
                self._serving[name] = tasks.create_task(self._run_server(name, server), name=f"device plugin {name}")

    async def _run_server(self, name: str, server: ResourceServer) -> None:
        await server.run()
        del self._serving[name]
        self._books_changed.set()  # another of this name may be waiting for its turn

    async def _follow(self, tasks: asyncio.TaskGroup) -> None:
        """Post new lists whenever the snapshot, the books or the configuration ask for them."""
        snapshot, looked_at = self._ground.snapshot.value, time.monotonic()
        self.allocator.gpu_files = await asyncio.to_thread(self._ground.gpu_files)
        offers = Offers(self._ground.health, time.monotonic, await asyncio.to_thread(self._known_rails))
        books = Reading()
        while True:
            self._books_changed.clear()
            self._health_changed.clear()
            config = self._config.value
            self._set_up(with_profiles(config.resources, snapshot, self._resources))
            resources = self._resources
            books = await self._read_books(resources, books)
            named = config.topology.rails
            offer = await asyncio.to_thread(self._make, offers, resources, snapshot, books, named)
            if config is not self._config.value:
                continue
            self._post(resources, offer)
            self._serve(tasks)
            self._posted.set(config)
            await self._keep_files()
            files_due = self._seconds_to_files(snapshot, looked_at)
            newer = await self._next(config, snapshot, offers.seconds_to_look(), files_due)
            if newer is not snapshot or self._seconds_to_files(snapshot, looked_at) == 0:
                looked_at = time.monotonic()
                self.allocator.gpu_files = await asyncio.to_thread(self._ground.gpu_files)
                snapshot = newer

    def _seconds_to_files(self, snapshot: Snapshot, looked_at: float) -> float | None:
        """Return in how many seconds a look at the GPUs' files is due; None if nobody is granted GPUs here."""
        if not snapshot.gpus or all(resource.kind not in ("gpu", "rail") for resource in self._resources):
            return None
        return max(0.0, looked_at + self._ground.files_seconds - time.monotonic())

    def _make(
        self,
        offers: Offers,
        resources: tuple[Resource, ...],
        snapshot: Snapshot,
        books: Reading,
        named_rails: NamedRails,
    ) -> Offer:
        """Make an offer and its CDI specs: kubelet may ask as soon as it has the list.

        Rails that have other numbers are remembered before anybody hears of them. What says the same as the last offer
        is that offer.
        """
        offer, last = offers.make(resources, snapshot, books, named_rails), self._offer.value
        if snapshot is last.snapshot and offer == last:
            offer = last
        self._remember(offer.rails)
        self._renew_specs(offer, resources)
        return offer

    def _known_rails(self) -> tuple[Rail, ...]:
        try:
            return self._ground.ledger.rails()
        except LedgerError as error:
            log.warning("rails are numbered again: %s", error)
            return ()

    def _remember(self, rails: tuple[Rail, ...]) -> None:
        try:
            if rails != self._ground.ledger.rails():
                self._ground.ledger.keep_rails(rails)
        except LedgerError as error:
            log.warning("the numbers of rails would not outlive the agent: %s", error)

    def _renew_specs(self, offer: Offer, resources: tuple[Resource, ...]) -> None:
        """Have the CDI specs of pools and granted units follow their devices, before kubelet hears of the change."""
        try:
            self._records.renew(offer, resources)
        except (LedgerError, Unavailable) as error:
            log.error("CDI specs may be out of date: %s", error)

    async def _keep_files(self) -> None:
        try:
            await asyncio.to_thread(self._records.keep)
        except (LedgerError, Unavailable) as error:
            log.warning("files of granted units stay as they are: %s", error)

    async def _next(self, config: Config, snapshot: Snapshot, *dues: float | None) -> Snapshot:
        """Wait for a newer snapshot or configuration, a change in the books or in health, or the first of `dues`.

        These are seconds. Returns the newest snapshot.
        """
        woken_by = await first(
            self._ground.snapshot.other_than(snapshot),
            self._books_changed.wait(),
            self._config.other_than(config),
            self._health_changed.wait(),
            seconds=min((due for due in dues if due is not None), default=None),
        )
        if woken_by == 1:
            await asyncio.sleep(SETTLE_SECONDS)
        return self._ground.snapshot.value

    async def _read_books(self, resources: tuple[Resource, ...], last: Reading) -> Reading:
        try:
            return await asyncio.to_thread(read, self._ground.ledger, with_names=any(map(asks_for_names, resources)))
        except LedgerError as error:
            log.warning("the device lists keep the quarantines known so far: %s", error)
            return last

    def _post(self, resources: tuple[Resource, ...], offer: Offer) -> None:
        for overlap in errors(resources, offer.overlaps):
            if overlap not in self._offer.value.overlaps:
                log.warning("%s", overlap)
        self._offer.set(offer)
        for resource in self._served:
            post(self._servers[resource.name].units, offer.units[resource.name])


def _tell(loop: asyncio.AbstractEventLoop, note: Callable[[], None]) -> None:
    # The ledger may outlive the loop.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(note)
