"""kubelet's second door, as a whole: a DRA driver that is served, registered, and stays both.

Two sockets: one for claims and health in a folder of the driver's own, then one in kubelet's folder of plugins by which
it finds the first. Both have names that were never used before: kubelet refuses a path that it knows, and is slow
where one was used again. When either file is gone, both are made anew. kubelet's restart needs nothing of us: it finds
the sockets again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc.aio

from agent.errors import Unavailable
from agent.process.backoff import Backoff
from agent.process.sockets import identity
from agent.state import Latest, first
from deviceplugin.dra.services import Catalog, ClaimService, HealthService
from deviceplugin.registration import CHANNEL_OPTIONS, RETRY, keep_serving, serve, sweep
from deviceplugin.server import Context
from proto.pluginregistration.v1 import api_pb2, api_pb2_grpc

MOST_REQUEST = 1 << 20
"""Bytes of one request: some thousand claims."""
MOST_ANSWER = 4 << 20
"""Bytes that kubelet takes."""
SERVER_OPTIONS = (
    *CHANNEL_OPTIONS,
    ("grpc.max_receive_message_length", MOST_REQUEST),
    ("grpc.max_send_message_length", MOST_ANSWER),
)
INSTANCE = "[0-9a-f]" * 8
"""A glob pattern: what tells the sockets of one process from another's."""
TYPE = "DRAPlugin"
VERSIONS = ("v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
"""Short names of the services. The first that kubelet knows serves claims; it skips those that it does not know."""

log = logging.getLogger(__name__)


_NOT_SERVED = "not served yet"


@dataclass(frozen=True, slots=True)
class Driver:
    """Who we are to kubelet, and where."""

    name: str
    """A DNS subdomain of at most 63 characters."""
    pool: str
    """Name of the node."""
    kubelet_dir: Path
    """/var/lib/kubelet; the same path for kubelet as for us."""

    @property
    def folder(self) -> Path:
        """Where the driver is served."""
        return self.kubelet_dir / "plugins" / self.name

    @property
    def registry(self) -> Path:
        """Where kubelet looks for plugins."""
        return self.kubelet_dir / "plugins_registry"


@dataclass(frozen=True, slots=True)
class Times:
    """How long to wait for what, in seconds."""

    poll: float = 0.3
    """Between two looks at the socket files."""
    retry: Backoff = RETRY
    last_words: float = 0.4
    """For kubelet to take the end of the health stream."""
    grace: float = 0.4
    """For calls that are under way at the end, of which one takes some ten milliseconds unless it waits for others."""


DEFAULT_TIMES = Times()


class Door:
    """The driver's server, registered with kubelet. `run` until `close`."""

    def __init__(
        self,
        driver: Driver,
        calls: ClaimService,
        catalog: Catalog,
        times: Times = DEFAULT_TIMES,
    ) -> None:
        self._problem = Latest(_NOT_SERVED)
        self._driver = driver
        self._calls = calls
        self._catalog = catalog
        self._times = times
        self._closing = asyncio.Event()

    async def begun(self) -> None:
        """Wait until it is served, something keeps it from that, or it is closed."""
        await first(self._problem.other_than(_NOT_SERVED), self._closing.wait())

    @property
    def problem(self) -> str:
        """Why it is not registered with kubelet; empty when it is."""
        return self._problem.value

    def close(self) -> None:
        """Make `run` end: health ends as UNKNOWN, kubelet is told nothing more, calls under way get a moment."""
        self._closing.set()

    async def run(self) -> None:
        """Serve and be found by kubelet until closed. No trouble with its folders ends it."""
        await keep_serving(self._serve_once, self._closing, self._note, self._pause, self._times.retry)

    async def _serve_once(self) -> None:
        """Serve, be found, and stay until a socket is gone or we close."""
        instance = secrets.token_hex(4)
        socket = self._driver.folder / f"dra-{instance}.sock"
        registration = self._driver.registry / f"{self._driver.name}-{instance}-reg.sock"
        await asyncio.to_thread(self._prepare_folders)
        health = HealthService(self._driver.pool, self._catalog)

        def add(server: grpc.aio.Server) -> None:
            self._calls.add_to(server)
            health.add_to(server)

        async with AsyncExitStack() as opened:
            server = await serve(socket, add, SERVER_OPTIONS)
            opened.push_async_callback(_stop, server, socket, self._times.grace)
            registrar = Registrar(self._driver.name, str(socket), self._problem)
            self._problem.set(f"kubelet has not found the driver in {self._driver.registry} yet")
            found_by = await serve(
                registration, partial(api_pb2_grpc.add_RegistrationServicer_to_server, registrar), SERVER_OPTIONS
            )
            opened.push_async_callback(_stop, found_by, registration, 0.0)
            opened.push_async_callback(health.end, self._times.last_words)
            self._note(await self._stay(socket, registration))

    async def _stay(self, *sockets: Path) -> str:
        """Wait until one of the files is not the same any more, and say so, or until we close."""
        made = {socket: identity(socket) for socket in sockets}
        while not self._closing.is_set():
            gone = next((socket for socket in sockets if identity(socket) != made[socket]), None)
            if gone is not None:
                return f"{gone} was removed: serving again"
            await first(self._closing.wait(), seconds=self._times.poll)
        return "the agent is stopping"

    async def _pause(self, seconds: float) -> None:
        await first(self._closing.wait(), seconds=seconds)

    def _prepare_folders(self) -> None:
        """Make our own folder, and remove sockets that an earlier process of the driver has left."""
        folder = self._driver.folder
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            folder.chmod(0o700)
        except OSError as error:
            raise Unavailable(
                f"{folder} cannot be made ({error.strerror}): waiting for kubelet, or is kubeletDir wrong?"
            ) from error
        sweep(folder, f"dra-{INSTANCE}.sock")
        sweep(self._driver.registry, f"{self._driver.name}-{INSTANCE}-reg.sock")

    def _note(self, problem: str) -> None:
        """Note what keeps the driver from being registered; the same again stays quiet."""
        if problem != self.problem and not self._closing.is_set():
            log.warning("%s", problem)
        self._problem.set(problem)


class Registrar(api_pb2_grpc.RegistrationServicer):
    """Introduces the driver to kubelet, and notes what kubelet says."""

    def __init__(self, driver: str, endpoint: str, problem: Latest[str]) -> None:
        """The endpoint is the absolute path of the socket that serves the driver: for kubelet the same as for us."""
        self._driver = driver
        self._endpoint = endpoint
        self._problem = problem

    async def GetInfo(self, request: api_pb2.InfoRequest, context: Context) -> api_pb2.PluginInfo:
        return api_pb2.PluginInfo(
            type=TYPE, name=self._driver, endpoint=self._endpoint, supported_versions=list(VERSIONS)
        )

    async def NotifyRegistrationStatus(
        self, request: api_pb2.RegistrationStatus, context: Context
    ) -> api_pb2.RegistrationStatusResponse:
        if request.plugin_registered:
            log.info("registered with kubelet as DRA driver %s", self._driver)
            self._problem.set("")
        else:
            problem = f"kubelet did not register the DRA driver {self._driver}: {request.error or 'it told no reason'}"
            log.warning("%s", problem)
            self._problem.set(problem)
        return api_pb2.RegistrationStatusResponse()


async def _stop(server: grpc.aio.Server, socket: Path, grace: float) -> None:
    await asyncio.to_thread(socket.unlink, missing_ok=True)
    await server.stop(grace)
