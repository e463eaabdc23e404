"""kubelet's plugin watcher: finds registration sockets, asks who they are, says what became of it.

A socket that was made anew under a name that is known is deregistered first, and registered at the next look. One that
fails is tried again, ever more seldom; under a new name it starts anew. Source: Kubernetes 1.36,
pkg/kubelet/pluginmanager (pluginwatcher, operationexecutor).
"""

from __future__ import annotations

import asyncio
import logging
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from hack.sim.dra.drivers import CHANNEL_OPTIONS, Drivers, RegistrationRefused
from proto.pluginregistration.v1 import api_pb2, api_pb2_grpc

INFO_SECONDS = 1.0
NOTIFY_SECONDS = 5.0
FIRST_RETRY = 0.5
LAST_RETRY = 122.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Found:
    """A registration socket."""

    file: tuple[int, int, int]
    driver: str = ""
    """Empty until it is registered."""
    endpoint: str = ""
    retry: float = FIRST_RETRY
    not_before: float = 0.0


class Watcher:
    """Watches one folder, and keeps the drivers registered whose sockets stand in it."""

    def __init__(self, folder: Path, drivers: Drivers, look: float, notified: Callable[[str], None]) -> None:
        """`look` is in seconds. `notified` hears which driver was told that it is registered."""
        self._folder = folder
        self._drivers = drivers
        self._look = look
        self._notified = notified
        self._known: dict[Path, _Found] = {}

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await self._once()
            await asyncio.sleep(self._look)

    async def _once(self) -> None:
        there = _sockets(self._folder)
        for path, known in list(self._known.items()):
            if there.get(path) != known.file:
                del self._known[path]
                there.pop(path, None)
                if known.driver:
                    log.info("plugin %s is gone", path.name)
                    await self._drivers.remove(known.driver, known.endpoint)
        now = asyncio.get_running_loop().time()
        for path, file in there.items():
            found = self._known.setdefault(path, _Found(file))
            if not found.driver and now >= found.not_before:
                await self._register(path, found)
                found.not_before = now + found.retry
                found.retry = min(found.retry * 2, LAST_RETRY)

    async def _register(self, path: Path, found: _Found) -> None:
        async with grpc.aio.insecure_channel(f"unix:{path}", options=CHANNEL_OPTIONS) as channel:
            stub: api_pb2_grpc.RegistrationAsyncStub = api_pb2_grpc.RegistrationStub(channel)
            try:
                info = await stub.GetInfo(api_pb2.InfoRequest(), timeout=INFO_SECONDS)
                error = self._add(info)
                outcome = api_pb2.RegistrationStatus(plugin_registered=not error, error=error)
                if not error:
                    found.driver, found.endpoint = info.name, info.endpoint
                await stub.NotifyRegistrationStatus(outcome, timeout=NOTIFY_SECONDS)
            except grpc.aio.AioRpcError as failure:
                log.warning("plugin %s: %s %s", path.name, failure.code().name, failure.details())
                return
        if error:
            log.warning("plugin %s: %s", path.name, error)
        else:
            log.info("registered DRA driver %s at %s", info.name, info.endpoint)
            self._notified(info.name)

    def _add(self, info: api_pb2.PluginInfo) -> str:
        """Register who introduced itself; returns why not."""
        if info.type != "DRAPlugin":
            return f"no handler registered for plugin type: {info.type} at socket {info.endpoint}"
        try:
            self._drivers.add(info.name, info.endpoint, list(info.supported_versions))
        except RegistrationRefused as error:
            return str(error)
        return ""


def _sockets(folder: Path) -> dict[Path, tuple[int, int, int]]:
    found = {}
    for path in sorted(folder.iterdir()):
        try:
            file = path.lstat()
        except FileNotFoundError:
            continue
        if stat.S_ISSOCK(file.st_mode) and not path.name.startswith("."):
            found[path] = file.st_dev, file.st_ino, file.st_ctime_ns
    return found
