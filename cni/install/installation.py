"""Put the CNI relay where the container runtime looks for plugins, and take it away again.

The runtime may start the relay at any moment, so the file there is replaced in one step; a running relay
keeps its own. On request the names of the plugins that nodefabric replaces become links to it. A marker
beside the relay says who installed it and what, so that two installations do not undo each other's work.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from agent.config.networks import OWN, REPLACED
from agent.errors import ConfigError, InstallFailed
from cni.install.folder import Folder, locked

PLUGIN_NAME = OWN
"""The `type` of a CNI configuration, and so the name of the executable."""
DEFAULT_INSTANCE = "nodefabric"
MAX_RELAY_BYTES = 16 << 20
MAX_PLUGIN_BYTES = 512 << 20
MARKER = ".nodefabric-installed"
LINKED = ".nodefabric-relay"
"""What the links point to: the relay once more. An installer that copies its plugin over a link writes through it
(`cp -f`), and must not spoil the program that all pods of a chained network are started with."""
BACKUP = ".nodefabric-backup"
REMEDY = "mount the runtime's plugin folder there, writable"


@dataclass(frozen=True, slots=True)
class Installation:
    """What is to be in the plugin folder."""

    relay: Path
    target: Path
    replace: tuple[str, ...] = ()
    """Names of plugins that become links to the relay."""
    instance: str = DEFAULT_INSTANCE
    force: bool = False
    """Take over another instance's installation, and set plugins of others aside."""


@dataclass(frozen=True, slots=True)
class _Marker:
    instance: str
    replaced: tuple[str, ...] = ()
    relay: str = ""
    """The digest of the relay; empty from versions that noted none."""


_MARKERS = TypeAdapter(_Marker)


def install(wanted: Installation, *, keeps: bool = False) -> tuple[str, ...]:
    """Put the relay and its links in place. Returns the names that changed.

    Who only `keeps` them leaves another relay alone that the same instance has installed, for as long as it is intact:
    the next pod of an update installs it while this one still runs.

    Raises ConfigError for a name that nodefabric does not replace or a folder that is not there, and InstallFailed;
    each name then is what it was before, or what it should become.
    """
    if unknown := [name for name in wanted.replace if name not in REPLACED]:
        raise ConfigError("--replace", [f"{name!r} is none of {', '.join(REPLACED)}" for name in unknown])
    content = _read_relay(wanted.relay)
    digest = hashlib.sha256(content).hexdigest()
    _check_folder(wanted.target)
    with locked(wanted.target, remedy=REMEDY) as folder:
        marker = _claim(folder, wanted.instance, force=wanted.force)
        if keeps and marker.relay not in ("", digest) and _digest_of(folder) == marker.relay:
            return ()
        foreign = [name for name in wanted.replace if _is_foreign(folder, name)]
        if foreign and not wanted.force:
            raise InstallFailed(
                f"{folder.path}: {', '.join(foreign)} is a plugin of somebody else's: leave it out of --replace, or"
                f" use --force to set it aside as NAME{BACKUP}"
            )
        changed = []
        replaced = tuple(sorted({*marker.replaced, *wanted.replace}))
        _write_marker(folder, _Marker(wanted.instance, replaced, digest))
        if not _is_installed(folder, PLUGIN_NAME, content):
            folder.put(PLUGIN_NAME, content, mode=0o755)
            changed.append(PLUGIN_NAME)
        if replaced and not _is_installed(folder, LINKED, content):
            if folder.read(LINKED, MAX_PLUGIN_BYTES) is not None:
                changed.append(LINKED)
            folder.put(LINKED, content, mode=0o755)
        for name in wanted.replace:
            if _is_link(folder, name):
                continue
            if name in foreign:
                folder.copy(name, name + BACKUP)
            folder.point(name, LINKED)
            changed.append(name)
        return tuple(changed)


def remove(target: Path, *, instance: str = DEFAULT_INSTANCE, force: bool = False) -> tuple[str, ...]:
    """Take the relay and its links away, and put back what they replaced. Returns the names that changed.

    Raises InstallFailed. Take the plugin out of the network configurations first: the runtime cannot stop
    pods whose plugin is gone.
    """
    if not target.exists():
        return ()
    with locked(target, remedy="it is still in place") as folder:
        marker = _claim(folder, instance, force=force)
        changed = []
        linked = [name for name in REPLACED if name not in marker.replaced and _is_link(folder, name)]
        for name in (*marker.replaced, *linked):  # or a lost marker would leave links to nothing
            has_backup = folder.read(name + BACKUP, MAX_PLUGIN_BYTES) is not None
            if _is_link(folder, name):
                if has_backup:
                    folder.move(name + BACKUP, name)
                else:
                    folder.remove(name)
                changed.append(name)
            elif has_backup:  # its own installer has put a newer one there
                folder.remove(name + BACKUP)
        for name in (PLUGIN_NAME, LINKED, MARKER):
            if folder.read(name, MAX_PLUGIN_BYTES) is not None:
                folder.remove(name)
                changed.append(name)
        return tuple(name for name in changed if name not in (LINKED, MARKER))


def see_owner(target: Path, *, instance: str, force: bool = False) -> None:
    """Raise InstallFailed if another instance installed what is in a plugin folder."""
    if target.exists():
        with locked(target, remedy=REMEDY) as folder:
            _claim(folder, instance, force=force)


def _check_folder(path: Path) -> None:
    """See that a folder is there. One that is missing is more often a wrong path than a new host."""
    try:
        if not path.is_dir():
            raise ConfigError(str(path), ["is no folder: name the one that the runtime uses with --target"])
    except OSError as error:
        raise InstallFailed(f"{path}: {error.strerror}: {REMEDY}") from error


def _read_relay(relay: Path) -> bytes:
    try:
        with relay.open("rb") as file:
            content = file.read(MAX_RELAY_BYTES + 1)
    except OSError as error:
        raise InstallFailed(
            f"{relay}: {error.strerror}: build the relay first (make shim), or name it with --relay"
        ) from error
    if not content.startswith(b"\x7fELF") or len(content) > MAX_RELAY_BYTES:
        raise InstallFailed(f"{relay} is not the relay: not an executable of at most {MAX_RELAY_BYTES >> 20} MiB")
    return content


def _digest_of(folder: Folder) -> str:
    found = folder.read(PLUGIN_NAME, MAX_PLUGIN_BYTES)
    return hashlib.sha256(found.content).hexdigest() if found is not None and found.content is not None else ""


def _is_installed(folder: Folder, name: str, content: bytes) -> bool:
    """Compare content, owner and mode. A link there is replaced by the file, never followed."""
    found = folder.read(name, MAX_PLUGIN_BYTES)
    return found is not None and (found.content, found.mode, found.uid) == (content, 0o755, os.geteuid())


def _is_link(folder: Folder, name: str) -> bool:
    """Return whether a name is a link of ours."""
    found = folder.read(name, MAX_PLUGIN_BYTES)
    return found is not None and found.link == LINKED


def _is_foreign(folder: Folder, name: str) -> bool:
    return folder.read(name, MAX_PLUGIN_BYTES) is not None and not _is_link(folder, name)


def _claim(folder: Folder, instance: str, *, force: bool) -> _Marker:
    """Read the marker. Raises InstallFailed if another instance installed what is there."""
    found = folder.read(MARKER, MAX_RELAY_BYTES)
    if found is None:
        return _Marker(instance)
    try:
        marker = _MARKERS.validate_json(found.content or b"")
    except ValidationError as error:
        if not force:
            raise InstallFailed(f"{folder.path / MARKER} cannot be understood: remove it, or use --force") from error
        return _Marker(instance)
    if marker.instance != instance and not force:
        raise InstallFailed(
            f"{folder.path}: installed by instance {marker.instance!r}, this one is {instance!r}: remove that one"
            " first, or use --force to take over"
        )
    return replace(marker, replaced=tuple(name for name in marker.replaced if name in REPLACED))


def _write_marker(folder: Folder, marker: _Marker) -> None:
    content = _MARKERS.dump_json(marker) + b"\n"
    found = folder.read(MARKER, MAX_RELAY_BYTES)
    if found is None or found.content != content:
        folder.put(MARKER, content)
