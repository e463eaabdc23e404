"""What the agent waits for at its start: a configuration that is right on this node, boot ID, ledger and socket.

What is wrong is said at once and waited out: an agent that restarts in a loop explains nothing, and is no quicker to
notice the repair.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TypeVar

from prometheus_client import CollectorRegistry

from agent.config import Config, Endpoints, load_legible
from agent.config.files import Sources
from agent.errors import AgentError, ConfigError, HardwareError, LedgerInUse
from agent.inventory import Inventory
from agent.ledger import Ledger
from agent.model.device import Snapshot
from agent.model.vf_identity import Rail
from agent.offer.explanation import template_problems
from agent.offer.selection import overlap_problems
from agent.offer.units import plain_offer
from agent.operator import admin
from agent.process import relay_file
from agent.process.conditions import Conditions
from agent.process.standby import claim_books
from agent.report.endpoints import EndpointServer, Pages
from agent.report.metrics import Metrics
from agent.report.status import served
from agent.state import first

CONFIG_SECONDS = 2.0
RETRY_SECONDS = 1.0
ENDPOINTS_RETRY_SECONDS = 0.5
ENDPOINTS_SECONDS = 5.0
"""How long another process may have their port before that is said: the agent that ended last closes it last."""

log = logging.getLogger(__name__)
T = TypeVar("T")


def check(config: Config, snapshot: Snapshot) -> None:
    """Check what the configuration alone cannot tell. Raises ConfigError with all problems found."""
    problems = [*network_problems(config, snapshot), *overlap_problems(config.resources, snapshot)]
    if problems:
        raise ConfigError(config.source, problems)


def network_problems(config: Config, snapshot: Snapshot, known_rails: Sequence[Rail] = ()) -> list[str]:
    """List what is wrong with the networks, on this node. `known_rails` are its rails as they were numbered last."""
    problems = []
    offer = plain_offer(config.resources, snapshot, named_rails=config.topology.rails, known_rails=known_rails)
    for i, network in enumerate(config.networks):
        setup = network.setup
        alone = [key for key, value in (("mac", setup.settings.mac), ("guid", setup.guid)) if value is not None]
        names = [resource.name for resource in config.resources if network.name in resource.networks.values()]
        if alone and (vfs := sum(len(offer.offered[name]) for name in names)) > 1:
            problems += [f"networks[{i}].{key}: {vfs} VFs would get the same one, so leave it out" for key in alone]
    return [*problems, *template_problems(config, offer)]


async def await_config(
    sources: Sources,
    scan: Callable[[], Awaitable[Snapshot]],
    stop: asyncio.Event,
    probe_socket: Path | None = None,
) -> Config | None:
    """Read the configuration, waiting for its repair if it is wrong. None if asked to stop meanwhile.

    Meanwhile /healthz is fine and /readyz says what is wrong, where the configuration has them as far as it can be
    read, and to probes at their socket: kubelet would end an agent whose probes find nobody. Relays get their file of
    pods, so that those without a device start and end.
    """
    conditions = Conditions()
    conditions.found.clear()  # of those nothing has begun
    is_written = False
    async with AsyncExitStack() as stack:
        while not stop.is_set():
            try:
                config = await _load(sources, scan)
            except ConfigError as error:
                legible = await asyncio.to_thread(_legible, sources)
                if not conditions.found:
                    _explain(stack, conditions, legible.endpoints, probe_socket)
                conditions.set("config", f"must be repaired: {error}")
                if not is_written:
                    excuse = await asyncio.to_thread(_write_relay_file, legible)
                    conditions.set("pods", excuse)
                    is_written = excuse is None
            else:
                for warning in config.warnings:
                    log.warning("%s: %s", config.source, warning)
                return config
            await first(stop.wait(), seconds=CONFIG_SECONDS)
    return None


async def _load(sources: Sources, scan: Callable[[], Awaitable[Snapshot]]) -> Config:
    config = await asyncio.to_thread(sources.load)
    try:
        found = await scan()
    except HardwareError as error:
        raise ConfigError(config.source, [f"cannot be compared with the node: {error}"]) from error
    await asyncio.to_thread(check, config, found)
    return config


def _legible(sources: Sources) -> Config:
    """Read what can be read of a wrong configuration; the rest is as if it were not said."""
    if sources.own is None:
        return Config()
    try:
        return load_legible(sources.own)[0]
    except ConfigError:
        return Config()


def _write_relay_file(config: Config) -> str | None:
    """Let pods without a device start and end. Return why that is not possible; None if it is."""
    try:
        relay_file.write(config)
    except LedgerInUse as error:  # in an update: that agent serves on
        return f"another agent serves them: {error}"
    except (AgentError, OSError) as error:
        return f"wait until the configuration is repaired: {error}"
    return None


def _explain(stack: AsyncExitStack, conditions: Conditions, endpoints: Endpoints, probe_socket: Path | None) -> None:
    metrics = Metrics(CollectorRegistry())
    metrics.reloaded("refused")
    pages = Pages(
        metrics=metrics.render,
        status=lambda: served({"ready": False, "obstacles": conditions.found}),
        ready={"agent": conditions.first},
        everywhere=endpoints.status == "everywhere",
    )
    stack.enter_context(admin.answering_probes(probe_socket, pages.health, pages.ready))
    try:
        stack.callback(EndpointServer.open(endpoints.address, endpoints.port, pages).close)
    except ConfigError as error:
        log.warning("the endpoints cannot say so: %s", error)


async def learn_boot_id(inventory: Inventory, conditions: Conditions, root: Path, stop: asyncio.Event) -> str:
    """Scan until the boot ID can be read: without it every row would look like one of an earlier boot."""

    async def scan() -> str:
        if not (boot_id := (await inventory.scan_now()).boot_id):
            raise HardwareError(f"{root}/proc/sys/kernel/random/boot_id cannot be read: mount /proc")
        return boot_id

    return inventory.snapshot.value.boot_id or await _tried(scan, "hardware", conditions, stop) or ""


async def open_ledger(
    config: Config,
    boot_id: str,
    conditions: Conditions,
    stop: asyncio.Event,
    stack: AsyncExitStack,
    prepare: Callable[[], Awaitable[object]],
) -> Ledger | None:
    """Open the books, which no other agent may have open. None if asked to stop meanwhile.

    The claim to them ends with `stack`; closing them is the caller's business. `prepare` as in `claim_books`.
    """
    claimed = await claim_books(config.state_dir, conditions, stop, prepare)
    if claimed is None:
        return None
    stack.enter_context(claimed)
    return await _tried(
        partial(asyncio.to_thread, Ledger.open, config.ledger_path, boot_id), "ledger", conditions, stop
    )


async def listen(start: Callable[[], None], conditions: Conditions, stop: asyncio.Event) -> None:
    """Have the socket for pods opened: `start` raises ConfigError while that is not possible, on a full /run say."""
    await _tried(partial(asyncio.to_thread, start), "cni", conditions, stop)


async def keep_listening(stands: Callable[[], bool], again: Callable[[], None], conditions: Conditions) -> None:
    """Open the socket for pods again whenever it does not stand any more: no relay would ever find it."""
    while True:
        if not stands():
            conditions.set("cni", "somebody has removed the socket: it is made again")
            await listen(again, conditions, asyncio.Event())
        await asyncio.sleep(RETRY_SECONDS)


async def _tried(
    attempt: Callable[[], Awaitable[T]], condition: str, conditions: Conditions, stop: asyncio.Event
) -> T | None:
    """Try again until no error of ours keeps it, which is a condition meanwhile. None if asked to stop."""
    while not stop.is_set():
        try:
            found = await attempt()
        except AgentError as error:
            conditions.set(condition, str(error))
            await first(stop.wait(), seconds=RETRY_SECONDS)
        else:
            conditions.set(condition, None)
            return found
    return None


async def open_endpoints(settings: Endpoints, pages: Pages, conditions: Conditions, closing: AsyncExitStack) -> None:
    """Open the endpoints, however long another process has their port: pods need none. `closing` closes them."""
    while True:
        try:
            server = EndpointServer.open(settings.address, settings.port, pages)
        except ConfigError as error:
            # The agent that has the books has the port, too.
            problem = None if conditions.stands_by else "; ".join(error.problems)
            conditions.expect("endpoints", problem, ENDPOINTS_SECONDS)
            await asyncio.sleep(ENDPOINTS_RETRY_SECONDS)
        else:
            closing.push_async_callback(asyncio.to_thread, server.close)
            conditions.set("endpoints", None)
            return
