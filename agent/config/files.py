"""The files that a configuration is made of, ours and those of device plugins that we stand in for, and following them.

Owns when they are read again and what becomes of a version: applied, refused (the former one stays), or the same in
other words. Some keys are heeded at start only; a version that changes them is applied but for these, and that is said
until the agent starts anew.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from agent.config.document import Flags, parse, read_file
from agent.config.section import keys_of
from agent.config.values import Config
from agent.errors import ConfigError
from agent.state import Latest

POLL_SECONDS = 2.0
"""kubelet swaps a ConfigMap's folder within a minute or two of the change: nobody waits for these two seconds."""
AGAIN_SECONDS = 30.0
"""A version that was refused is tried again after so long: what was wrong may have been the node."""
AT_START_ONLY = ("endpoints", "kubelet_dir", "state_dir", "run_dir", "cdi_dir", "netns_folders", "runtime_socket")
"""Fields of Config that are heeded at start only."""
WAITS = "restart the agent to put into effect what was changed of"
"""So begins what is said of a version that is in effect but for these."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sources:
    """Where a configuration comes from. At least one of the files is named."""

    own: Path | None = None
    """Any shape will do here, too."""
    sriov: Path | None = None
    """Of sriov-network-device-plugin; its pools come after our own resources."""
    shared: Path | None = None
    """Of k8s-rdma-shared-dev-plugin; its pools come last."""
    flags: Flags = field(default_factory=Flags)

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.own, self.sriov, self.shared) if path is not None)

    def __str__(self) -> str:
        return ", ".join(map(str, self.files))

    def load(self, read: Callable[[Path], bytes] = read_file) -> Config:
        """Read all files into one configuration. Raises ConfigError with all that is wrong in them."""
        found: list[Config] = []
        problems: list[str] = []
        for path in self.files:
            try:
                found.append(parse(read(path), str(path), self.flags))
            except ConfigError as error:
                problems += (
                    [f"{path}: {problem}" for problem in error.problems] if len(self.files) > 1 else error.problems
                )
        if problems:
            raise ConfigError(str(self), problems)
        return _joined(found, str(self))

    def digest(self) -> tuple[bytes, ...]:
        """Say what is in the files; empty for one that cannot be read."""
        return tuple(_digest(path) for path in self.files)


class Applier(Protocol):
    """Who puts new configurations into effect on this node, and tells what became of each version."""

    def check(self, config: Config) -> None:
        """Refuse one that cannot be used here: raises ConfigError. May block."""

    def waiting(self, config: Config) -> Sequence[str]:
        """Name the fields that have to wait for a restart, besides AT_START_ONLY."""

    async def apply(self, config: Config) -> None:
        """Wait until this one, which is newest, is in effect."""

    def complain(self, what: str | None) -> None:
        """Hear what is wrong; None when nothing is."""

    def count(self, outcome: str) -> None:
        """Hear the outcome of a version: applied, partly, unchanged or refused."""


class Reloader:
    """Follows the files until cancelled."""

    def __init__(
        self,
        sources: Sources,
        config: Latest[Config],
        applier: Applier,
        *,
        poll_seconds: float = POLL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`config` has the one in effect, which was just read, and gets each new one, on a thread that may block."""
        self._sources = sources
        self._config = config
        self._applier = applier
        self._poll = poll_seconds
        self._clock = clock
        self._again_at = math.inf
        self._digest: tuple[bytes, ...] | None = None

    async def run(self) -> None:
        """Look at the files every few seconds."""
        # The first look reads them: they may have changed since the configuration in effect was read.
        while True:
            await self.look()
            await asyncio.sleep(self._poll)

    async def look(self) -> None:
        """Look once, and apply what is new."""
        is_again = self._clock() >= self._again_at
        digest = await asyncio.to_thread(self._sources.digest)
        if digest != self._digest or is_again:
            outcome = await self._take()
            is_known = digest == self._digest and outcome == "refused"
            if not is_known and (self._digest is not None or outcome != "unchanged"):
                self._applier.count(outcome)
            self._again_at = self._clock() + AGAIN_SECONDS if outcome == "refused" else math.inf
        self._digest = digest

    async def _take(self) -> str:
        try:
            read = await asyncio.to_thread(self._sources.load)
            config, waiting = without_restart(self._config.value, read, self._applier.waiting(read))
            await asyncio.to_thread(self._applier.check, config)
        except ConfigError as error:
            text = "; ".join(error.problems)
            self._applier.complain(f"the new configuration is refused, and the former one stays in effect: {text}")
            return "refused"
        if config == self._config.value and not waiting:
            self._applier.complain(None)
            return "unchanged"
        await asyncio.to_thread(self._config.set, config)
        await self._applier.apply(config)
        for warning in read.warnings:
            log.warning("%s: %s", read.source, warning)
        if waiting:
            self._applier.complain(f"{WAITS} {', '.join(waiting)}")
            return "partly"
        self._applier.complain(None)
        log.info("the new configuration is in effect")
        return "applied"


def without_restart(old: Config, new: Config, also: Sequence[str] = ()) -> tuple[Config, tuple[str, ...]]:
    """Say what of a new configuration can be in effect at once, and which of its keys have to wait for a restart."""
    keys = {name: key for key, name in keys_of(Config).items()}
    waiting = [name for name in (*AT_START_ONLY, *also) if name in keys and getattr(old, name) != getattr(new, name)]
    kept = {name: getattr(old, name) for name in waiting}
    return replace(new, **kept), tuple(keys[name] for name in waiting)


def _joined(found: list[Config], source: str) -> Config:
    first = found[0]
    if len(found) == 1:
        return first
    resources = tuple(resource for config in found for resource in config.resources)
    problems = []
    for i, resource in enumerate(resources):
        if any(other.name == resource.name for other in resources[:i]):
            problems.append(f"{resource.name} is configured twice: one resource cannot come from two files")
    if problems:
        raise ConfigError(source, problems)
    warnings = tuple(f"{config.source}: {warning}" for config in found for warning in config.warnings)
    return replace(first, resources=resources, warnings=warnings, source=source)


def _digest(path: Path) -> bytes:
    try:
        return hashlib.blake2b(read_file(path), digest_size=16).digest()
    except ConfigError:
        return b""
