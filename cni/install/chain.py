"""Our plugin in the cluster network's configuration: put there, kept there, taken out.

The configuration belongs to the cluster network's own installer, which may rewrite it whenever it likes.
Then our entry is put back, but later and later if that goes on: two programs that undo each other's work
for ever would make the runtime read its configuration for ever.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from agent.errors import InstallFailed
from agent.process.backoff import Backoff
from cni.install import conflist
from cni.install.conflist import ConflistInvalid, Plan
from cni.install.folder import Entry, Folder, Step, locked, unobserved
from cni.migrate import libcni_cache

MAX_BYTES = 1 << 20
MAX_REMEMBERED_BYTES = 16 << 20
REMEDY = "mount the runtime's network configuration there, writable"
POLL_SECONDS = 10.0
PAUSES = Backoff(first=1.0, longest=300.0)
PEACE_SECONDS = 600.0
"""After so long a time without a loss, the next one counts as the first again."""

log = logging.getLogger(__name__)


def chain(folder: Path, *, step: Step = unobserved) -> Plan:
    """Put our plugin into the network that the runtime takes. Returns what it did.

    Raises InstallFailed; the network that was there before then still is.
    """
    with locked(folder, remedy=REMEDY, step=step) as opened:
        entries, plan = _look(opened)
        if plan.write is not None:
            name, content = plan.write
            opened.put(name, content, like=entries[str(plan.network)], instead_of=entries.get(name))
        for name in plan.remove:
            opened.remove(name)
        return plan


def look(folder: Path) -> Plan:
    """Tell what chain would do. Raises InstallFailed."""
    with locked(folder, remedy=REMEDY) as opened:
        return _look(opened)[1]


def unchain(folder: Path, *, step: Step = unobserved) -> tuple[str, ...]:
    """Take our plugin out of every network here. Returns the files that changed.

    Raises InstallFailed if the plugin is still named somewhere, by an entry that somebody else wrote.
    """
    changed, left = [], []
    with locked(folder, remedy=REMEDY, step=step) as opened:
        for name in conflist.candidates(opened.names()):
            entry = opened.read(name, MAX_BYTES)
            if entry is None or entry.content is None:
                continue
            if conflist.wrapped_file(name, entry.content) is not None:
                opened.remove(name)
                changed.append(name)
                continue
            content = _without_us(name, entry.content)
            if content is not None:
                opened.put(name, content, like=entry, instead_of=entry)
                changed.append(name)
            if conflist.names_us(entry.content if content is None else content):
                left.append(name)
    if left:
        raise InstallFailed(
            f"{folder}: {', '.join(left)} still names the plugin, with settings of its author's: take it out there,"
            " or pods of that network cannot start or stop"
        )
    return tuple(changed)


def unchain_remembered(state: Path, *, step: Step = unobserved) -> tuple[str, ...]:
    """Take our plugin out of the networks that libcni remembers for running pods. Returns the files that changed.

    CRI-O ends a pod with the network that it began with (ocicni, loadNetworkFromCache), and cannot once the plugin is
    gone. `state` is /var/lib/cni. Raises InstallFailed.
    """
    folder = state / libcni_cache.FOLDERS[0]
    if not folder.is_dir():
        return ()
    take_out = partial(conflist.unchained, with_settings=True)  # of no use to anybody any more
    changed = []
    with locked(folder, remedy="pods that run cannot be ended without the plugin", step=step) as opened:
        for name in opened.names():
            entry = opened.read(name, MAX_REMEMBERED_BYTES)
            content = libcni_cache.without(entry.content, take_out) if entry and entry.content else None
            if content is not None:
                opened.put(name, content, like=entry, instead_of=entry)
                changed.append(name)
    return tuple(changed)


def _without_us(name: str, content: bytes) -> bytes | None:
    if not name.endswith(".conflist"):
        return None
    try:
        return conflist.unchained(content)
    except ConflistInvalid:
        return None


def _look(opened: Folder) -> tuple[dict[str, Entry], Plan]:
    entries: dict[str, Entry] = {}
    for name in conflist.candidates(opened.names()):
        entry = opened.read(name, MAX_BYTES)
        if entry is not None and not entry.is_folder:  # libcni passes folders over
            entries[name] = entry
    head = next((name for name, entry in entries.items() if entry.content is None), None)
    files = {name: entry.content for name, entry in entries.items() if entry.content is not None}
    try:
        plan = conflist.plan(files)
    except ConflistInvalid as error:
        raise InstallFailed(f"{opened.path / str(error)}") from error
    if head is not None and (plan.network is None or conflist.candidates([head, plan.network])[0] == head):
        raise InstallFailed(
            f"{opened.path / head} is no plain file, and the runtime takes it: put the file itself there"
        )
    return entries, plan


class Changes(Protocol):
    """Tells of changes in the folder."""

    def wait(self, seconds: float) -> None:
        """Return when something changed, and after so many seconds in any case."""


@dataclass
class Patience:
    """How long to leave the field to a program that takes our plugin out again. Pure but for its memory."""

    losses: int = 0
    last: float = field(default=-PEACE_SECONDS)

    def lost(self, now: float) -> float:
        """Count one loss, and return for how many seconds to wait."""
        self.losses = self.losses + 1 if now - self.last < PEACE_SECONDS else 1
        self.last = now
        return PAUSES.after(self.losses - 1)


class Keeper:
    """Keeps our plugin in the cluster network."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._patience = Patience()
        self._was_chained = False
        self._not_before = 0.0
        self._said: str | None = None

    def look_after(self) -> float:
        """Put our plugin back if it is missing and the time for it has come. Returns when to look again, in seconds."""
        try:
            return self._look_after()
        except InstallFailed as error:
            self._say(str(error), logging.ERROR)
            return POLL_SECONDS

    def _look_after(self) -> float:
        plan = look(self._folder)
        now = self._clock()
        if plan.network is None and not plan.remove:
            self._was_chained = False
            self._say(f"{self._folder} holds no network yet", logging.INFO)
            return POLL_SECONDS
        if plan.is_done:
            self._was_chained = True
            self._say(f"nodefabric is in the network of {self._folder / str(plan.network)}", logging.INFO)
            return POLL_SECONDS
        if self._was_chained:
            self._was_chained = False
            pause = self._patience.lost(now)
            self._not_before = now + pause
            if pause:
                self._say(
                    f"{self._folder / str(plan.network)}: another program has taken nodefabric out"
                    f" {self._patience.losses} times; it is put back in {pause:g} s",
                    logging.WARNING,
                )
        if now < self._not_before:
            return min(POLL_SECONDS, self._not_before - now)
        chain(self._folder)
        return 0.0

    def _say(self, text: str, level: int) -> None:
        """Log what is new only."""
        if text != self._said:
            log.log(level, "%s", text)
            self._said = text


def keep(folder: Path, changes: Changes, also: Callable[[], None]) -> None:
    """Keep our plugin in the cluster network for ever, and call `also` each time round."""
    keeper = Keeper(folder)
    while True:
        also()
        seconds = keeper.look_after()
        if seconds > 0:
            changes.wait(seconds)
