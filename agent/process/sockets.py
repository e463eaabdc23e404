"""Sockets of this machine: the agent's in the file system (made in one step, never taken from an agent that serves,
told apart), and HTTP to its own addresses.
"""

from __future__ import annotations

import contextlib
import os
import socket
import urllib.request
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import cast

from agent.errors import ConfigError, Unavailable

PROBE_SECONDS = 1.0


def listen(listener: socket.socket, path: Path, backlog: int, mode: int = 0o600) -> tuple[int, int]:
    """Have a Unix stream socket listen at a path, for its owner alone. Returns what `identity` says of it then.

    Raises ConfigError if another process serves it there, or if it cannot be made; the socket is closed then.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.ExitStack() as failed:
        failed.callback(listener.close)
        if _is_served(path):
            raise ConfigError(str(path), ["another agent serves this socket: stop it, or set runDir"])
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh.unlink(missing_ok=True)
            failed.callback(fresh.unlink, missing_ok=True)
            listener.bind(str(fresh))
            os.chmod(fresh, mode)
            listener.listen(backlog)
            found = fresh.stat()
            os.rename(fresh, path)  # so that a caller finds either the old socket or a served one
        except OSError as error:
            raise ConfigError(str(path), [f"cannot be made: {error.strerror or error}"]) from error
        failed.pop_all()
    return found.st_dev, found.st_ino


def identity(path: Path) -> tuple[int, int] | None:
    """Tell which file stands at a path, by file system and inode; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.settimeout(PROBE_SECONDS)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # it has more callers than it has taken yet (unix(7), EAGAIN)
            return True
        except OSError:
            return False
        return True


def get(url: str, seconds: float) -> HTTPResponse:
    """Ask an address of this machine, whatever proxy the environment names for others.

    The environment of a node's shell often names one, and no_proxy seldom this machine. Raises HTTPError for an
    answer that is an error, OSError if nobody answers, Unavailable if what answers does not speak HTTP.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        return cast(HTTPResponse, opener.open(url, timeout=seconds))
    except HTTPException as error:
        raise Unavailable(f"what answers at {url} does not speak HTTP") from error
