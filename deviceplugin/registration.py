"""Keep one resource registered with kubelet, whatever becomes of kubelet and of the socket files.

Serving comes first, then Register: kubelet dials back inside the call. Registered means that
kubelet holds an open ListAndWatch stream; nothing else shows whether it still knows us. The server
is closed and opened again, under a new socket name, when

- kubelet.sock is another file (kubelet started again, and deleted every socket of the folder),
- our own socket file is gone,
- the stream ended, or kubelet opened none.

The old stream has always ended before Register is called again: kubelet up to 1.36 keeps one
client per resource, and when an older stream ends it closes the newer one
(https://github.com/kubernetes/kubernetes/issues/127803). New names keep it from mistaking one for the other.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import grpc.aio

from agent.errors import Unavailable
from agent.process.backoff import Backoff
from agent.process.sockets import Identity, identity, is_served
from agent.state import first
from deviceplugin.allocation import Allocator
from deviceplugin.server import Observe, ResourceService, Units
from proto.deviceplugin.v1beta1 import api_pb2, api_pb2_grpc

API_VERSION = "v1beta1"
SOCKET_PATTERN = "nodefabric-*.sock"
RETRY = Backoff(first=0.2, longest=10.0)
STABLE_SECONDS = 10.0
"""Serving for so long ends the counting of failures."""
MAX_SOCKET_PATH = 107
"""sun_path of sockaddr_un is 108 bytes, with a zero at the end (unix(7))."""

# A channel of gRPC shares its connection, and that connection's back-off, with others to the same
# address unless configured otherwise: a retry would then not even try.
CHANNEL_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Times:
    """How long to wait for what, in seconds."""

    poll: float = 0.3
    """Between two looks at the socket files."""
    retry: Backoff = RETRY
    register: float = 12.0
    """kubelet dials back for up to 10 s inside Register."""
    stream: float = 10.0
    """For kubelet to open its stream after Register."""


DEFAULT_TIMES = Times()


@dataclass(frozen=True, slots=True)
class RegistrationStatus:
    socket: str
    """File name of the socket it is served on; empty while there is none."""
    registered: bool
    """Whether kubelet holds an open stream."""
    problem: str
    """Why it is not registered; empty when it is."""


class ResourceServer:
    """One resource's server and its standing with kubelet. `run` until `close`."""

    def __init__(
        self,
        resource_name: str,
        folder: Path,
        allocator: Allocator,
        observe: Observe,
        times: Times = DEFAULT_TIMES,
    ) -> None:
        self.resource_name = resource_name
        self.kubelet_socket = folder / "kubelet.sock"
        self._folder = folder
        self.units = Units(())
        """The newest list, which kubelet gets."""
        self._allocator = allocator
        self._observe = observe
        self._times = times
        self._closing = asyncio.Event()
        self._service: ResourceService | None = None
        self._socket: Path | None = None
        self._problem = "not registered yet"

    @property
    def status(self) -> RegistrationStatus:
        """Return how things stand."""
        return RegistrationStatus(
            socket=self._socket.name if self._socket else "",
            registered=self._service is not None and self._service.open_streams > 0,
            problem=self._problem,
        )

    def close(self) -> None:
        """Make `run` end: the stream ends by itself, then the server stops."""
        self._closing.set()
        if self._service is not None:
            self._service.end_streams()

    async def run(self) -> None:
        """Serve and stay registered until closed. No trouble with kubelet or its folder ends it."""
        await keep_serving(self._serve_once, self._closing, self._note, self._pause, self._times.retry)

    async def _serve_once(self) -> None:
        """Listen, register, and stay until something asks for a new beginning."""
        service = ResourceService(self.resource_name, self.units, self._allocator, self._observe)
        socket = self._folder / socket_name(self.resource_name)
        server = await serve(socket, partial(api_pb2_grpc.add_DevicePluginServicer_to_server, service))
        self._service, self._socket = service, socket
        try:
            while not self._closing.is_set() and identity(socket) is not None:
                kubelet = identity(self.kubelet_socket)
                if kubelet is None:
                    self._note(f"{self.kubelet_socket} is missing: waiting for kubelet")
                    await self._pause(self._times.poll)
                    continue
                await self._register(socket.name)
                why = await self._stay(service, socket, kubelet)
                if why:
                    self._note(why)
                return
        finally:
            self._service = self._socket = None
            service.end_streams()
            await server.stop(0.4)  # what is still open then is cut

    async def _register(self, endpoint: str) -> None:
        """Call Register. Raises Unavailable when kubelet refuses or does not answer."""
        request = api_pb2.RegisterRequest(
            version=API_VERSION,
            endpoint=endpoint,
            resource_name=self.resource_name,
            options=api_pb2.DevicePluginOptions(get_preferred_allocation_available=True),
        )
        async with grpc.aio.insecure_channel(f"unix:{self.kubelet_socket}", options=CHANNEL_OPTIONS) as channel:
            stub = api_pb2_grpc.RegistrationStub(channel)
            call = asyncio.ensure_future(stub.Register(request, timeout=self._times.register))
            await first(asyncio.wait((call,)), self._closing.wait())
            if call.cancel():
                raise Unavailable("closed while registering")
            try:
                call.result()
            except grpc.aio.AioRpcError as error:
                raise Unavailable(
                    f"kubelet did not register {self.resource_name}: {error.code().name}: {error.details()}"
                ) from error

    async def _stay(self, service: ResourceService, socket: Path, kubelet: Identity) -> str:
        """Wait until this registration is over, and say why; empty when we are closing."""
        patience = asyncio.get_running_loop().time() + self._times.stream
        while not self._closing.is_set():
            service.stream_changed.clear()
            if service.open_streams:
                if self._problem:
                    log.info("registered with kubelet", extra={"resource": self.resource_name})
                    self._problem = ""
            elif service.has_had_stream:
                return "kubelet ended its stream: registering again"
            elif asyncio.get_running_loop().time() > patience:
                return f"kubelet opened no stream within {self._times.stream:g} s: registering again"
            if identity(self.kubelet_socket) not in (kubelet, None):
                return "kubelet has started again: registering again"
            if identity(socket) is None:
                return f"{socket} was removed: listening and registering again"
            await first(service.stream_changed.wait(), seconds=self._times.poll)
        return ""

    async def _pause(self, seconds: float) -> None:
        """Wait, but no longer than until closing or a new kubelet.sock."""
        before = identity(self.kubelet_socket)
        until = asyncio.get_running_loop().time() + seconds
        while (left := until - asyncio.get_running_loop().time()) > 0 and not self._closing.is_set():
            await first(self._closing.wait(), seconds=min(left, self._times.poll))
            if identity(self.kubelet_socket) != before:
                return

    def _note(self, problem: str) -> None:
        """Log a change of trouble once; the same again stays quiet."""
        if problem != self._problem and not self._closing.is_set():
            log.warning("%s", problem, extra={"resource": self.resource_name})
        self._problem = problem


def socket_name(resource_name: str) -> str:
    """Make a file name that no other instance of the plugin uses."""
    return f"nodefabric-{_safe(resource_name)}-{secrets.token_hex(4)}.sock"


def _safe(resource_name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", resource_name.lower())[-24:].strip("-")


async def keep_serving(
    serve_once: Callable[[], Awaitable[None]],
    closing: asyncio.Event,
    note: Callable[[str], None],
    pause: Callable[[float], Awaitable[object]],
    retry: Backoff,
) -> None:
    """Serve again whenever `serve_once` returns or raises Unavailable, until closing. Failures lengthen the pauses."""
    failures = 0
    while not closing.is_set():
        began = asyncio.get_running_loop().time()
        try:
            await serve_once()
        except Unavailable as error:
            note(str(error))
        if asyncio.get_running_loop().time() - began > STABLE_SECONDS:
            failures = 0
        failures += 1
        await pause(retry.after(failures))


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


def sweep(folder: Path, pattern: str) -> None:
    """Remove sockets of earlier processes, by a glob pattern: a killed one leaves its files behind.

    One that somebody listens on is left alone: during an update two processes may overlap. One that
    cannot be removed stays, since it does no harm.
    """
    for path in folder.glob(pattern):
        if not is_served(path):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s, which an earlier process left behind, stays: %s", path, error.strerror)
            else:
                log.info("removed %s, which an earlier process left behind", path)
