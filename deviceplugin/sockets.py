"""Unix sockets in kubelet's folders that we serve gRPC on: opened, told apart, never longer than a path may be."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio

from agent.errors import Unavailable

MAX_SOCKET_PATH = 107
"""sun_path of sockaddr_un is 108 bytes, with a zero at the end (unix(7))."""

# A channel of gRPC shares its connection, and that connection's back-off, with others to the same
# address unless told otherwise: a retry would then not even try.
CHANNEL_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))


async def serve(
    socket: Path, add: Callable[[grpc.aio.Server], None], options: tuple[tuple[str, int], ...] = CHANNEL_OPTIONS
) -> grpc.aio.Server:
    """Serve what `add` puts into a server, on a socket for root alone. Raises Unavailable with what is in the way."""
    folder = socket.parent
    if len(os.fsencode(socket)) > MAX_SOCKET_PATH:
        raise Unavailable(
            f"{socket} is longer than a socket's path may be ({MAX_SOCKET_PATH}): set a shorter kubeletDir"
        )
    if identity(folder) is None:
        raise Unavailable(f"{folder} is missing: waiting for kubelet, or is kubeletDir wrong?")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise Unavailable(f"{folder} may not be written to: mount it writable and run as root")
    server = grpc.aio.server(options=options)
    add(server)
    try:
        _bind(server, socket)
    except (RuntimeError, OSError) as error:
        await server.stop(None)
        raise Unavailable(f"cannot listen on a socket in {folder}: {error}") from error
    await server.start()
    return server


def _bind(server: grpc.aio.Server, socket: Path) -> None:
    server.add_insecure_port(f"unix:{socket}")
    socket.chmod(0o600)


def identity(path: Path) -> tuple[int, int, int] | None:
    """Tell one file from its successor of the same name. tmpfs reuses inodes at once, hence ctime."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns
