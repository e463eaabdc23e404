"""How doctor looks at folders and sockets: nothing is changed, and nothing raised."""

from __future__ import annotations

import os
import socket
from pathlib import Path

ANSWER_SECONDS = 3.0


def below(root: Path, path: Path) -> Path:
    """Return the place of a path below another root."""
    return root / path.relative_to("/")


def is_open(folder: Path) -> bool:
    """Tell whether a folder is there, and its names may be read."""
    return os.path.isdir(folder) and os.access(folder, os.R_OK | os.X_OK)


def is_read_only(folder: Path) -> bool:
    """Tell whether a folder is on a read-only mount; not so if there is none."""
    try:
        return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def unusable(folder: Path) -> str | None:
    """Tell what keeps files from being made in a folder; None if nothing does."""
    if not os.path.isdir(folder):
        return "is not there"
    if is_read_only(folder):
        return "is mounted read-only"
    return None if os.access(folder, os.W_OK | os.X_OK) else "may not be written to"


def listens(path: Path) -> str | None:
    """Tell what keeps a socket from being reached; None if somebody listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(ANSWER_SECONDS)
        try:
            probe.connect(str(path))
        except OSError as error:
            return error.strerror or str(error)
    return None
