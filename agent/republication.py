"""The publications of the moment's configuration: another configuration ends them, and others begin."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from agent.config import Topology


class Published(Protocol):
    """What `agent.publication.Publications` offers."""

    def changed(self) -> None:
        """Say that units or pods may have changed."""

    async def run(self) -> None:
        """Publish until cancelled."""


class Republication:
    """Publishes as the configuration says. `run` until cancelled; `changed` may be called from any thread."""

    def __init__(self, make: Callable[[Topology], Published], topology: Topology) -> None:
        """`make` makes the publications of a configuration; they are not run yet."""
        self._make = make
        self._topology = topology
        self._current = make(topology)
        self._another = asyncio.Event()

    def changed(self) -> None:
        """Say that units or pods may have changed."""
        self._current.changed()

    def reconfigure(self, topology: Topology) -> None:
        """Publish as another configuration says. What the former one put into objects is taken back by the next."""
        if topology != self._topology:
            self._topology = topology
            self._another.set()

    async def run(self) -> None:
        """Publish until cancelled. Publications that end unasked end this, with their error."""
        while True:
            running = asyncio.create_task(self._current.run(), name="publications")
            another = asyncio.create_task(self._another.wait(), name="another configuration")
            try:
                await asyncio.wait((running, another), return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    return running.result()
            finally:
                another.cancel()
                running.cancel()
                await asyncio.gather(running, another, return_exceptions=True)
            self._another.clear()
            self._current = self._make(self._topology)
