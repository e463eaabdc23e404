"""A host whose hardware is what a test says, for an inventory to follow."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ParamSpec

from agent.hardware.host import Link, Rdma, RdmaLink, VfControl, Watch
from agent.hardware.netlink.links import Netlink
from agent.inventory import Inventory
from agent.model.change import Change, OnEvent
from agent.model.counters import Counters
from agent.model.device import Snapshot
from agent.model.device_health import GpuEvent

DEADLINE = 30.0
P = ParamSpec("P")


def looped(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test in an event loop."""

    @functools.wraps(test)
    def run(*args: P.args, **options: P.kwargs) -> None:
        asyncio.run(test(*args, **options))

    return run


class FakeWatch:
    def __init__(self) -> None:
        self.closed = False
        self.unheard: Sequence[str] = ()

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeHost:
    """Hardware that is whatever `now` says."""

    now: Snapshot = field(default_factory=lambda: Snapshot(boot_id="a"))
    error: Exception | None = None
    look_error: Exception | None = None
    watch_error: Exception | None = None
    scans: int = 0
    gate: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)
    on_event: OnEvent | None = None
    looks: list[Change] = field(default_factory=list)
    watched: FakeWatch = field(default_factory=FakeWatch)

    def __post_init__(self) -> None:
        self.gate.set()

    @property
    def root(self) -> Path:
        raise AssertionError("not used")

    @property
    def links(self) -> Netlink:
        raise AssertionError("not used")

    @property
    def vf_control(self) -> VfControl:
        raise AssertionError("not used")

    @property
    def rdma(self) -> Rdma:
        raise AssertionError("not used")

    def scan(self) -> Snapshot:
        self.scans += 1
        found = self.now
        self.begun.set()
        assert self.gate.wait(DEADLINE)
        if self.error is not None:
            raise self.error
        return found

    def counters(self, snapshot: Snapshot, held: Set[str]) -> Counters:
        raise AssertionError("not used")

    def rescan(self, old: Snapshot, change: Change) -> Snapshot:
        """See of `now` only what was named: a boot ID, in place of all that is real."""
        self.looks.append(change)
        if self.look_error is not None:
            raise self.look_error
        return replace(old, boot_id=self.now.boot_id) if change.functions else old

    def find_netdev(self, device: str) -> Link | None:
        raise AssertionError("not used")

    def unbind(self, device: str) -> None:
        raise AssertionError("not used")

    def bind(self, device: str, driver: str) -> None:
        raise AssertionError("not used")

    def find_rdma(self, device: str) -> RdmaLink | None:
        raise AssertionError("not used")

    def lifelines(self) -> Mapping[str, str]:
        raise AssertionError("not used")

    def watch(self, on_event: OnEvent) -> Watch:
        if self.watch_error is not None:
            raise self.watch_error
        self.on_event = on_event
        return self.watched

    def pause_gpus(self, seconds: float, addresses: Sequence[str]) -> bool:
        raise AssertionError("not used")

    def watch_gpus(self, on_event: Callable[[GpuEvent], None]) -> Watch:
        raise AssertionError("not used")

    def close(self) -> None:
        pass


async def until_generation(inventory: Inventory, generation: int) -> Snapshot:
    """Wait for a snapshot of this generation or a later one."""
    snapshot = inventory.snapshot.value
    while snapshot.generation < generation:
        snapshot = await inventory.snapshot.other_than(snapshot)
    return snapshot


async def running(inventory: Inventory) -> asyncio.Task[None]:
    task = asyncio.create_task(inventory.run())
    async with asyncio.timeout(DEADLINE):
        await until_generation(inventory, 1)
    return task


async def learns(inventory: Inventory, boot_id: str, than: int = 1) -> None:
    """Wait for a snapshot newer than a generation, which must show this boot ID."""
    async with asyncio.timeout(DEADLINE):
        assert (await until_generation(inventory, than + 1)).boot_id == boot_id


async def stopped(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
