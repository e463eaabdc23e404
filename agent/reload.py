"""Follows the files of the configuration, and has each new version applied.

Owns when files are read again and what becomes of a version: applied, refused (the former one stays), or the same in
other words. Some keys are heeded at start only; a version that changes them is applied but for these, and that is said
until the agent starts anew.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import fields, replace

from agent.config import Config
from agent.config.sources import Sources
from agent.errors import AgentError, ConfigError

POLL_SECONDS = 2.0
"""kubelet swaps a ConfigMap's folder within a minute or two of the change: nobody waits for these two seconds."""
AGAIN_SECONDS = 30.0
"""A version that was refused is tried again after so long: what was wrong may have been the node."""
AT_START_ONLY = (
    "endpoints",
    "kubelet_dir",
    "state_dir",
    "run_dir",
    "cdi_dir",
    "netns_folders",
    "runtime_socket",
)
"""Fields of Config that are heeded at start only."""
WAITS = "restart the agent to put into effect what was changed of"
"""So begins what is said of a version that is in effect but for these."""

log = logging.getLogger(__name__)


class Reloader:
    """Follows the files until cancelled."""

    def __init__(
        self,
        sources: Sources,
        config: Config,
        *,
        check: Callable[[Config], None],
        apply: Callable[[Config], Awaitable[None]],
        complain: Callable[[str | None], None],
        count: Callable[[str], None],
        waits: Callable[[Config], Sequence[str]] = lambda config: (),
        poll_seconds: float = POLL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`config` is in effect, and was just read.

        `check` raises ConfigError for one that cannot be used on this node, and may block; `apply` puts one into
        effect. `complain` is told what is wrong, and None when nothing is; `count` the outcome of each version:
        applied, partly, unchanged, refused or failed. `waits` names fields that have to wait besides AT_START_ONLY.
        """
        self._sources = sources
        self._config = config
        self._check = check
        self._apply = apply
        self._complain = complain
        self._count = count
        self._waits = waits
        self._poll = poll_seconds
        self._clock = clock
        self._again_at = math.inf
        self._stat = sources.stat()
        self._digest: tuple[bytes, ...] | None = None

    async def run(self) -> None:
        """Look at the files every few seconds."""
        # The first look reads them: they may have changed since the configuration in effect was read.
        while True:
            await self.look()
            await asyncio.sleep(self._poll)

    async def look(self) -> None:
        """Look once, and apply what is new."""
        stat = await asyncio.to_thread(self._sources.stat)
        is_again = self._clock() >= self._again_at
        if stat == self._stat and self._digest is not None and not is_again:
            return
        digest = await asyncio.to_thread(self._sources.digest)
        if digest != self._digest or is_again:
            outcome = await self._take()
            is_known = digest == self._digest and outcome == "refused"
            if not is_known and (self._digest is not None or outcome != "unchanged"):
                self._count(outcome)
            self._again_at = self._clock() + AGAIN_SECONDS if outcome == "refused" else math.inf
            if outcome == "failed":
                return  # and try again at the next look
        self._stat, self._digest = stat, digest

    async def _take(self) -> str:
        try:
            read = await asyncio.to_thread(self._sources.load)
            config, waiting = without_restart(self._config, read, self._waits(read))
            await asyncio.to_thread(self._check, config)
        except ConfigError as error:
            text = "; ".join(error.problems)
            self._complain(f"the new configuration is refused, and the former one stays in effect: {text}")
            return "refused"
        if config == self._config and not waiting:
            self._complain(None)
            return "unchanged"
        try:
            await self._apply(config)
        except AgentError as error:
            self._complain(f"the new configuration could not be put into effect: {error}")
            return "failed"
        self._config = config
        for warning in read.warnings:
            log.warning("%s: %s", read.source, warning)
        if waiting:
            self._complain(f"{WAITS} {', '.join(waiting)}")
            return "partly"
        self._complain(None)
        log.info("the new configuration is in effect")
        return "applied"


def without_restart(old: Config, new: Config, also: Sequence[str] = ()) -> tuple[Config, tuple[str, ...]]:
    """Say what of a new configuration can be in effect at once, and which of its keys have to wait for a restart."""
    names = {field.name for field in fields(Config)}
    waiting = [name for name in (*AT_START_ONLY, *also) if name in names and getattr(old, name) != getattr(new, name)]
    kept = {name: getattr(old, name) for name in waiting}
    return replace(new, **kept), tuple(_key(name) for name in waiting)


def _key(field_name: str) -> str:
    """Spell a field as the file does: kubelet_dir → kubeletDir."""
    if field_name == "netns_folders":
        return "netnsDirs"
    first, *rest = field_name.split("_")
    return first + "".join(word.title() for word in rest)
