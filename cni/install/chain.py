"""Our plugin in the cluster network's configuration: put there, kept there, taken out.

libcni lists *.conf, *.conflist and *.json by name, and the runtime takes the first as the cluster network. In a
*.conflist our entry is put behind the last plugin, and taken out again; its keys and their order stay. A *.conf names
one plugin and cannot be chained: a conflist of our own goes before it, "10-a-nodefabric.conflist" before "10-a.conf",
that holds what it says.

The configuration belongs to the cluster network's own installer, which may rewrite it whenever it likes.
Then our entry is put back, but later and later if that goes on: two programs that undo each other's work
for ever would make the runtime read its configuration for ever.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agent.config.networks import OWN
from agent.errors import InstallFailed, RequestInvalid
from agent.model.fields import MAX_BYTES, decode
from agent.process.backoff import Backoff
from cni.install.folder import LOOK_SECONDS, Entry, Folder, locked, version_of
from cni.migrate import sriov_state
from cni.netconf import SUPPORTED_VERSIONS

EXTENSIONS = (".conf", ".conflist", ".json")
ENTRY = {"type": OWN}
WRAPPER_SUFFIX = f"-{OWN}.conflist"
_WRAPS = f"{OWN}-wraps"
"""A key that no runtime knows: it tells our wrapper from a file that only has such a name."""
MAX_REMEMBERED_BYTES = 16 << 20
REMEDY = "mount the runtime's network configuration there, writable"
POLL_SECONDS = 10.0
PAUSES = Backoff(first=1.0, longest=300.0)
PEACE_SECONDS = 600.0
"""After so long a time in which nothing was put back, the next loss counts as the first again."""

log = logging.getLogger(__name__)


class ConflistInvalid(ValueError):
    """A configuration is not one that a runtime can use, or that our plugin can join. Says what is wrong."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do in the folder so that our plugin is in the network that the runtime takes."""

    network: str | None
    """The file the runtime takes, or None if there is none."""
    write: tuple[str, bytes] | None = None
    remove: tuple[str, ...] = ()

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        return self.network is not None and self.write is None and not self.remove


def chain(folder: Path) -> Plan:
    """Put our plugin into the network that the runtime takes. Returns what it did.

    Raises InstallFailed; the network that was there before then still is.
    """
    with locked(folder, remedy=REMEDY) as opened:
        entries, plan = _look(opened)
        if plan.write is not None:
            name, content = plan.write
            opened.put(name, content, like=entries[str(plan.network)], instead_of=entries.get(name))
        for name in plan.remove:
            opened.remove(name)
        return plan


def look(folder: Path) -> Plan:
    """Return what `chain` would do. Raises InstallFailed."""
    with locked(folder, remedy=REMEDY) as opened:
        return _look(opened)[1]


def unchain(folder: Path) -> tuple[str, ...]:
    """Take our plugin out of every network here. Returns the files that changed.

    Raises InstallFailed if the plugin is still named somewhere, by an entry that somebody else wrote.
    """
    changed, left = [], []
    with locked(folder, remedy=REMEDY) as opened:
        for name in candidates(opened.names()):
            entry = opened.read(name, MAX_BYTES)
            if entry is None or entry.content is None:
                continue
            if wrapped_file(name, entry.content) is not None:
                opened.remove(name)
                changed.append(name)
                continue
            content = unchained(entry.content) if name.endswith(".conflist") else None
            if content is not None:
                opened.put(name, content, like=entry, instead_of=entry)
                changed.append(name)
            if names_us(entry.content if content is None else content):
                left.append(name)
    if left:
        raise InstallFailed(
            f"{folder}: {', '.join(left)} still names the plugin, as its author wrote it: take it out there, or"
            " remove the file, or pods of that network cannot start or stop"
        )
    return tuple(changed)


def unchain_remembered(state: Path) -> tuple[str, ...]:
    """Take our plugin out of the networks that libcni remembers for running pods. Returns the files that changed.

    CRI-O ends a pod with the network that it began with (ocicni, loadNetworkFromCache), and cannot once the plugin is
    gone. `state` is /var/lib/cni. Raises InstallFailed.
    """
    folder = state / sriov_state.CACHE_FOLDERS[0]
    if not folder.is_dir():
        return ()
    take_out = partial(unchained, with_settings=True)  # of no use to anybody any more
    changed = []
    with locked(folder, remedy="pods that run cannot be ended without the plugin") as opened:
        for name in opened.names():
            entry = opened.read(name, MAX_REMEMBERED_BYTES)
            content = sriov_state.cache_without(entry.content, take_out) if entry and entry.content else None
            if content is not None:
                opened.put(name, content, like=entry, instead_of=entry)
                changed.append(name)
    return tuple(changed)


def _look(opened: Folder) -> tuple[dict[str, Entry], Plan]:
    entries: dict[str, Entry] = {}
    for name in candidates(opened.names()):
        entry = opened.read(name, MAX_BYTES)
        if entry is not None and not entry.is_folder:  # libcni passes folders over
            entries[name] = entry
    head = next((name for name, entry in entries.items() if entry.content is None), None)
    files = {name: entry.content for name, entry in entries.items() if entry.content is not None}
    try:
        plan = plan_for(files)
    except ConflistInvalid as error:
        raise InstallFailed(f"{opened.path / str(error)}") from error
    if head is not None and (plan.network is None or candidates([head, plan.network])[0] == head):
        raise InstallFailed(
            f"{opened.path / head} is no plain file, and the runtime takes it: put the file itself there"
        )
    return entries, plan


class Keeper:
    """Keeps our plugin in the cluster network."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._writes, self._last_write = 0, 0.0
        self._said: str | None = None

    def look_after(self) -> float:
        """Put our plugin back if it is missing and the time for it has come. Returns when to look again, in seconds."""
        try:
            return self._look_after()
        except InstallFailed as error:
            self._say(str(error), logging.ERROR)
            return POLL_SECONDS

    def _look_after(self) -> float:
        plan, now = look(self._folder), self._clock()
        network, pause = self._folder / str(plan.network), PAUSES.after(self._writes - 1)
        if plan.network is None and not plan.remove:
            self._say(f"{self._folder} holds no network yet", logging.INFO)
        elif plan.is_done:
            self._say(f"nodefabric is in the network of {network}", logging.INFO)
        elif (left := self._last_write + pause - now) > 0:
            lost = f"{network}: another program has taken nodefabric out {self._writes} times"
            self._say(f"{lost}; it is put back in {pause:g} s", logging.WARNING)
            return min(POLL_SECONDS, left)
        else:
            chain(self._folder)
            self._writes = self._writes + 1 if now - self._last_write < PEACE_SECONDS else 1
            self._last_write = now
            return 0.0
        return POLL_SECONDS

    def _say(self, text: str, level: int) -> None:
        """Log what is new only."""
        if text != self._said:
            log.log(level, "%s", text)
            self._said = text


def keep(folder: Path, also: Callable[[], None]) -> None:
    """Keep our plugin in the cluster network for ever, and call `also` each time round."""
    keeper = Keeper(folder)
    while True:
        also()
        before = versions(folder)
        deadline = time.monotonic() + keeper.look_after()
        time.sleep(LOOK_SECONDS)  # an attempt that fails may change the folder, and would be made without end
        while time.monotonic() < deadline and versions(folder) == before:
            time.sleep(LOOK_SECONDS)


def versions(folder: Path) -> list[tuple[int, ...]]:
    """Return what differs once anything in a folder has changed."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        names = []
    return [version_of(folder / name) for name in (".", *names)]


def candidates(names: list[str]) -> list[str]:
    """List what libcni reads, in its order: by bytes, as Go compares strings."""
    return sorted((n for n in names if n[n.rfind(".") :] in EXTENSIONS and "." in n), key=os.fsencode)


def plan_for(files: Mapping[str, bytes]) -> Plan:
    """Say what it takes to have our plugin in the cluster network. Raises ConflistInvalid, naming the file."""
    wrappers = [name for name in files if wrapped_file(name, files[name]) is not None]
    others = candidates([name for name in files if name not in wrappers])
    if not others:
        return Plan(None, remove=tuple(wrappers))
    head = others[0]
    try:
        if head.endswith(".conflist"):
            name, content = head, chained(files[head])
        else:
            name, content = head.rpartition(".")[0] + WRAPPER_SUFFIX, wrapped(head, files[head])
    except ConflistInvalid as error:
        raise ConflistInvalid(f"{head}: {error}") from error
    write = (name, content) if content is not None and files.get(name) != content else None
    return Plan(head, write, tuple(w for w in wrappers if w != name or head.endswith(".conflist")))


def chained(content: bytes) -> bytes | None:
    """Put our entry behind the last plugin of a conflist; None if our plugin is in it already."""
    document = _conflist(_object(content))
    _check_version(document)
    if any(plugin["type"] == OWN for plugin in document["plugins"]):
        return None
    return _written({**document, "plugins": [*document["plugins"], ENTRY]})


def unchained(content: bytes, *, with_settings: bool = False) -> bytes | None:
    """Take our entries out of a conflist; None if there is none, or nothing else, or it is none.

    An entry with settings is its author's, and stays but for `with_settings`. Of a key that is there twice the last
    counts, as for libcni: a version before this one has joined such files, too.
    """
    try:
        document = _conflist(_said(content))
    except ConflistInvalid:
        return None
    plugins = document["plugins"]
    kept = [p for p in plugins if p != ENTRY and not (with_settings and p["type"] == OWN)]
    return _written({**document, "plugins": kept}) if len(kept) not in (0, len(plugins)) else None


def names_us(content: bytes) -> bool:
    """Return whether a configuration names our plugin anywhere a runtime would run it."""
    document = _said(content)
    plugins = document.get("plugins")
    listed = [p for p in plugins if isinstance(p, dict)] if isinstance(plugins, list) else []
    return any(plugin.get("type") == OWN for plugin in (document, *listed))


def wrapped(name: str, content: bytes) -> bytes:
    """Make the conflist that stands before the single configuration `name`."""
    document = _object(content)
    for key in ("type", "name"):
        if not isinstance(document.get(key), str) or not document[key]:
            raise ConflistInvalid(f"it has no '{key}': the runtime cannot use it")
    _check_version(document)
    head = {"cniVersion": document["cniVersion"], "name": document["name"], _WRAPS: name}
    return _written({**head, "plugins": [document, ENTRY]})


def wrapped_file(name: str, content: bytes) -> str | None:
    """Return which file a wrapper of ours stands before, or None if it is none of ours."""
    wraps = _said(content).get(_WRAPS) if name.endswith(WRAPPER_SUFFIX) else None
    return wraps if isinstance(wraps, str) else None


def _check_version(document: Mapping[str, Any]) -> None:
    """libcni takes a configuration without a version for 0.1.0."""
    version = document.get("cniVersion", "0.1.0")
    if version not in SUPPORTED_VERSIONS:
        raise ConflistInvalid(
            f"its cniVersion is {version!r}; every plugin of a chain is asked in that version, and nodefabric speaks"
            f" {', '.join(SUPPORTED_VERSIONS)}: change it there"
        )


def _conflist(document: Mapping[str, Any]) -> Mapping[str, Any]:
    plugins = document.get("plugins")
    if not isinstance(plugins, list) or not plugins:
        raise ConflistInvalid("it has no list 'plugins' with any in it")
    for number, plugin in enumerate(plugins):
        if not isinstance(plugin, dict) or not isinstance(plugin.get("type"), str):
            raise ConflistInvalid(f"plugins[{number}] has no 'type'")
    return document


def _object(content: bytes) -> dict[str, Any]:
    try:
        document = decode(content, "it")
    except RequestInvalid as error:
        raise ConflistInvalid(f"{error}; is it being written?") from error
    if not isinstance(document, dict):
        raise ConflistInvalid("it is no JSON object")
    return document


def _said(content: bytes) -> Mapping[str, Any]:
    """Return what a file says to a runtime; nothing for one that no runtime understands."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _written(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=2).encode() + b"\n"
