"""The door over real sockets, with claims that do as a test tells them, and kubelet's side of the calls."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import grpc
import grpc.aio

from agent.model.allocation import ClaimRef, Hold
from agent.model.health import HEALTHY, Health, unhealthy
from agent.offer.offer import Unit
from agent.process.backoff import Backoff
from agent.state import Latest
from deviceplugin.dra.devices import DraDevice
from deviceplugin.dra.preparer import Preparer
from deviceplugin.dra.registration import Door, Driver, Times
from deviceplugin.dra.services import Catalog, ClaimService
from deviceplugin.server import unobserved
from tests.awaiting import until
from tests.node import claimed

DRIVER = "nodefabric.io"
POOL = "node-1"
QUICK = Times(poll=0.02, retry=Backoff(0.02, 0.1), last_words=10.0, grace=0.2)


def device(name: str, *health: Health) -> DraDevice:
    units = (Unit(f"{name}-{i}", "rdma/vf", "vf", f"0000:18:00.{i}", h, 0) for i, h in enumerate(health))
    return DraDevice(name, "rdma/vf", {}, units=tuple(units))


def catalog(*devices: DraDevice) -> Catalog:
    return Latest(devices)


def ill(reason: str) -> Health:
    return unhealthy(reason)


VF = device("vf-0000-18-00-1", HEALTHY)


class FakeClaims:
    """Claims whose work is a function of the test."""

    def __init__(self, prepare: Callable[[ClaimRef], Sequence[Hold]] | None = None) -> None:
        self.calls: list[tuple[str, str]] = []
        """(What, claim's UID), in the order in which the work ended."""
        self.working = 0
        self.most_working = 0
        self._prepare = prepare or prepared
        self._guard = threading.Lock()

    def prepare(self, ref: ClaimRef) -> Sequence[Hold]:
        with self._noted("prepare", ref):
            return self._prepare(ref)

    def unprepare(self, ref: ClaimRef) -> None:
        with self._noted("unprepare", ref):
            pass

    @contextlib.contextmanager
    def _noted(self, what: str, ref: ClaimRef) -> Iterator[None]:
        with self._guard:
            self.working += 1
            self.most_working = max(self.most_working, self.working)
        try:
            yield
        finally:
            with self._guard:
                self.working -= 1
                self.calls.append((what, ref.uid))


def prepared(ref: ClaimRef) -> Sequence[Hold]:
    return (claimed("nic", POOL, "vf-0000-18-00-1", "rdma/vf", "vf", "0000:18:00.1", f"{ref.uid}-0"),)


def service(claims: FakeClaims, budget: float = 40.0) -> ClaimService:
    return ClaimService(DRIVER, cast(Preparer, claims), unobserved, lambda *_: None, budget=budget)


def sockets(folder: Path, *parts: str) -> list[Path]:
    return sorted(folder.joinpath(*parts).glob("*.sock"))


@contextlib.asynccontextmanager
async def opened(folder: Path, claims: FakeClaims | None = None, devices: Catalog | None = None) -> AsyncIterator[Door]:
    """A door that is served, and closed at the end."""
    door = Door(Driver(DRIVER, POOL, folder), service(claims or FakeClaims()), devices or catalog(VF), QUICK)
    running = asyncio.ensure_future(door.run())
    try:
        await until(lambda: sockets(folder, "plugins_registry") or running.done())
        yield door
    finally:
        door.close()
        await running


def channel(socket: Path) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"unix:{socket}", options=(("grpc.use_local_subchannel_pool", 1),))
