"""All device plugins of the node as one: follows inventory and ledger, posts the lists.

Owns the way from a new snapshot or a quarantine to every resource's list. Configuration is fixed
for the life of the object.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from agent.config import Config
from agent.device_info import GrantedFiles
from agent.errors import LedgerError
from agent.model.allocation import Attachment, Grant, Quarantine
from agent.model.device import Snapshot
from deviceplugin.allocation import Allocator, GrantBook, Offer
from deviceplugin.informed import InformingBook
from deviceplugin.registration import DEFAULT_PACE, SOCKET_PATTERN, Pace, RegistrationStatus, ResourceServer
from deviceplugin.resources import Unit, list_units
from deviceplugin.server import Observe, UnitBoard, unobserved

SETTLE_SECONDS = 0.05
"""Ledger changes come in bursts; the lists follow the last one."""

log = logging.getLogger(__name__)


class Inventory(Protocol):
    """The newest snapshot, and the wait for a newer one."""

    @property
    def snapshot(self) -> Snapshot:
        """The newest snapshot."""

    async def newer_than(self, generation: int) -> Snapshot:
        """Wait for a snapshot of a higher generation."""


class Books(GrantBook, Protocol):
    """The part of the ledger that device plugins need. All but `subscribe` block."""

    def quarantines(self) -> tuple[Quarantine, ...]:
        """List the withheld devices."""

    def attachments(self) -> tuple[Attachment, ...]:
        """List all devices in pods."""

    def grants(self) -> tuple[Grant, ...]:
        """List all grants."""

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call after each change, on some thread."""


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
        cdi_kinds: Callable[[], frozenset[str]] = frozenset,
        device_info: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        pace: Pace = DEFAULT_PACE,
    ) -> None:
        """Join the parts. `device_info` is where Multus reads what granted VFs are; None to tell nobody."""
        self.folder = config.kubelet_dir / "device-plugins"
        self._informing: InformingBook | None = None
        if device_info is not None:
            vfs = [r.name for r in config.resources if r.kind == "vf"]
            files = GrantedFiles(device_info)
            self._informing = InformingBook(ledger, files, vfs, self.unit, lambda: inventory.snapshot)
        self.allocator = Allocator(config.resources, self._informing or ledger, clock)
        self._resources = config.resources
        self._inventory = inventory
        self._ledger = ledger
        self._cdi_kinds = cdi_kinds
        self._boards = {resource.name: UnitBoard() for resource in config.resources}
        self._servers = [
            ResourceServer(r.name, self.folder, self._boards[r.name], self.allocator, observe, pace)
            for r in config.resources
        ]
        self._needs_host_names = any(r.kind == "vf" and r.select.netdevs for r in config.resources)
        self._books_changed = asyncio.Event()
        self._offered = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()

    @property
    def units(self) -> Mapping[str, tuple[Unit, ...]]:
        """Every resource's units as offered now."""
        return self.allocator.offer.units

    def unit(self, unit_id: str) -> Unit | None:
        """Find a unit of any resource by its ID."""
        return self.allocator.offer.by_id.get(unit_id)

    @property
    def ready(self) -> bool:
        """Tell whether kubelet holds an open stream for every resource."""
        return all(server.status.streams_open for server in self._servers)

    def status(self) -> tuple[ResourceStatus, ...]:
        """Tell how every resource stands, in the order of the configuration."""
        return tuple(
            ResourceStatus(
                resource_name=resource.name,
                kind=resource.kind,
                units=len(units := self.units.get(resource.name, ())),
                unhealthy=tuple(sorted(Counter(u.health.reason for u in units if not u.health.healthy).items())),
                registration=server.status,
            )
            for resource, server in zip(self._resources, self._servers, strict=True)
        )

    async def run(self) -> None:
        """Offer, serve and stay registered until closed."""
        self._ended.clear()
        loop = asyncio.get_running_loop()
        self._ledger.subscribe(lambda: _tell(loop, self._books_changed))
        try:
            await asyncio.to_thread(sweep, self.folder)
            async with asyncio.TaskGroup() as tasks:
                following = [tasks.create_task(self._follow(), name="device lists")]
                await self._offered.wait()
                serving = [
                    tasks.create_task(server.run(), name=f"device plugin {server.resource_name}")
                    for server in self._servers
                ]
                await asyncio.gather(*serving)
                for task in following:
                    task.cancel()
        finally:
            self.allocator.close()
            self._ended.set()

    async def close(self) -> None:
        """End streams and servers, and wait for that. Devices in pods stay as they are."""
        for server in self._servers:
            server.close()
        await self._ended.wait()

    async def _follow(self) -> None:
        """Post new lists whenever the snapshot or the books ask for them."""
        snapshot = self._inventory.snapshot
        kinds = await asyncio.to_thread(self._cdi_kinds)
        seen: tuple[Snapshot, frozenset[str], _Books] | None = None
        while True:
            self._books_changed.clear()
            books = await self._read_books(seen[2] if seen else _Books())
            if seen is None or seen[0] is not snapshot or seen[1:] != (kinds, books):
                self._post(await asyncio.to_thread(self._work_out, snapshot, kinds, books))
                seen = (snapshot, kinds, books)
            self._offered.set()
            await self._inform()
            newer = await self._next(snapshot)
            if newer is not snapshot:
                snapshot, kinds = newer, await asyncio.to_thread(self._cdi_kinds)

    async def _inform(self) -> None:
        if self._informing is not None:
            try:
                await asyncio.to_thread(self._informing.keep)
            except LedgerError as error:
                log.warning("device-info files stay as they are: %s", error)

    async def _next(self, snapshot: Snapshot) -> Snapshot:
        """Wait for a newer snapshot, or for a change in the books."""
        newer = asyncio.ensure_future(self._inventory.newer_than(snapshot.generation))
        books = asyncio.ensure_future(self._books_changed.wait())
        try:
            await asyncio.wait((newer, books), return_when=asyncio.FIRST_COMPLETED)
            if newer.done():
                return newer.result()
            await asyncio.sleep(SETTLE_SECONDS)
            return snapshot
        finally:
            newer.cancel()
            books.cancel()

    async def _read_books(self, last: _Books) -> _Books:
        try:
            return await asyncio.to_thread(self._books)
        except LedgerError as error:
            log.warning("the device lists keep the quarantines known so far: %s", error)
            return last

    def _books(self) -> _Books:
        quarantined = {q.device: q.reason for q in self._ledger.quarantines()}
        attached = self._ledger.attachments() if self._needs_host_names else ()
        return _Books(quarantined, {a.device: a.undo.netdev for a in attached})

    def _work_out(self, snapshot: Snapshot, kinds: frozenset[str], books: _Books) -> Offer:
        units = list_units(self._resources, snapshot, books.quarantined, books.host_names)
        return Offer(snapshot, units, kinds)

    def _post(self, offer: Offer) -> None:
        self.allocator.offer = offer
        for name, board in self._boards.items():
            board.post(offer.units[name])


@dataclass(frozen=True, slots=True)
class _Books:
    """What of the ledger bears on the lists."""

    quarantined: Mapping[str, str] = field(default_factory=dict)
    host_names: Mapping[str, str] = field(default_factory=dict)


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


def _tell(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    # The ledger may outlive the loop.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(event.set)
