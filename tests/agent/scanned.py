"""A host whose hardware is what a test says, for an inventory to follow."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from agent.hardware.host import Host
from agent.inventory import Inventory
from agent.model.change import Change, OnEvent
from agent.model.device import Snapshot

DEADLINE = 30.0


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

    def scan(self) -> Snapshot:
        self.scans += 1
        found = self.now
        self.begun.set()
        assert self.gate.wait(DEADLINE)
        if self.error is not None:
            raise self.error
        return found

    def rescan(self, old: Snapshot, change: Change) -> Snapshot:
        """See of `now` only what was named: a boot ID, in place of all that is real."""
        self.looks.append(change)
        if self.look_error is not None:
            raise self.look_error
        return replace(old, boot_id=self.now.boot_id) if change.functions else old

    def watch(self, on_event: OnEvent) -> FakeWatch:
        if self.watch_error is not None:
            raise self.watch_error
        self.on_event = on_event
        return self.watched

    def tell(self, change: Change) -> None:
        """Have the kernel name a change."""
        assert self.on_event is not None
        self.on_event("an event", change)


def inventory_of(host: FakeHost, rescan_seconds: float = 3600, **more: Any) -> Inventory:
    return Inventory(cast(Host, host), rescan_seconds, **more)


async def learns(inventory: Inventory, boot_id: str, than: int = 1) -> None:
    """Wait for a snapshot newer than a generation, which must show this boot ID."""
    async with asyncio.timeout(DEADLINE):
        snapshot = inventory.snapshot.value
        while snapshot.generation <= than:
            snapshot = await inventory.snapshot.other_than(snapshot)
    assert snapshot.boot_id == boot_id
