"""Put the CNI relay where the container runtime looks for plugins, and take it away again.

The runtime may start the relay at any moment, so the file there is replaced in one step: a
temporary file in the same folder, on the disk before it is renamed. A running relay keeps its own.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from agent.errors import InstallFailed

PLUGIN_NAME = "nodefabric"
"""The `type` of a CNI configuration, and so the name of the executable."""
MAX_RELAY_BYTES = 16 << 20
_TEMPORARY = ".nodefabric-install-"


def install(relay: Path, target: Path) -> bool:
    """Put the relay into the folder `target`, under the plugin's name. Returns False if it is there already.

    Raises InstallFailed; what was there before then still is.
    """
    content = _read_relay(relay)
    installed = target / PLUGIN_NAME
    try:
        target.mkdir(mode=0o755, parents=True, exist_ok=True)
        _remove_leftovers(target)
        if _is_installed(installed, content):
            return False
        _replace(installed, content)
    except OSError as error:
        raise InstallFailed(
            f"{installed}: {error.strerror}: mount the runtime's plugin folder there, writable"
        ) from error
    return True


def remove(target: Path) -> bool:
    """Take the relay away from the folder `target`. Returns False if it is not there. Raises InstallFailed.

    Take it out of the CNI configuration first: the runtime cannot stop pods whose plugin is gone.
    """
    installed = target / PLUGIN_NAME
    try:
        _remove_leftovers(target)
        installed.unlink()
        _sync_folder(target)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise InstallFailed(f"{installed}: {error.strerror}: it is still in place") from error
    return True


def _read_relay(relay: Path) -> bytes:
    try:
        with relay.open("rb") as file:
            content = file.read(MAX_RELAY_BYTES + 1)
    except OSError as error:
        raise InstallFailed(f"{relay}: {error.strerror}: build the relay first, or name it with --relay") from error
    if not content.startswith(b"\x7fELF") or len(content) > MAX_RELAY_BYTES:
        raise InstallFailed(f"{relay} is not the relay: not an executable of at most {MAX_RELAY_BYTES >> 20} MiB")
    return content


def _is_installed(installed: Path, content: bytes) -> bool:
    """Compare content, owner and mode, without following a link: a link there is replaced by the file."""
    try:
        fd = os.open(installed, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        same_file = found.st_size == len(content) and found.st_mode & 0o7777 == 0o755
        return same_file and found.st_uid == os.geteuid() and file.read() == content


def _replace(installed: Path, content: bytes) -> None:
    fd, name = tempfile.mkstemp(prefix=_TEMPORARY, dir=installed.parent)
    try:
        with open(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(fd, 0o755)
            os.fsync(fd)
        os.rename(name, installed)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
    _sync_folder(installed.parent)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove_leftovers(target: Path) -> None:
    """Remove what an installation that was killed left behind."""
    for leftover in target.glob(f"{_TEMPORARY}*"):
        leftover.unlink(missing_ok=True)
