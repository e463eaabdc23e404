"""What must be right before the agent starts: the configuration, on this node.

A configuration that cannot be used is said at once and waited out: an agent that restarts in a loop
explains nothing, and is no quicker to notice the repair.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from pathlib import Path

from prometheus_client import CollectorRegistry

from agent import probes
from agent.config import Config, Endpoints, load_legible
from agent.config.sources import Sources
from agent.endpoints import EndpointServer, Pages
from agent.errors import AgentError, ConfigError, HardwareError, RequestInvalid
from agent.granted import document_for
from agent.metrics import Metrics
from agent.model.device import Snapshot
from agent.status.cached import served
from cni import netconf
from deviceplugin.assignment import check_overlaps
from deviceplugin.resources import list_units

RETRY_SECONDS = 2.0

log = logging.getLogger(__name__)


def check(config: Config, snapshot: Snapshot) -> None:
    """Check what the configuration alone cannot tell. Raises ConfigError with all problems found."""
    problems = network_problems(config, snapshot)
    try:
        check_overlaps(config.resources, snapshot, config.source)
    except ConfigError as error:
        problems.extend(error.problems)
    if problems:
        raise ConfigError(config.source, problems)


def network_problems(config: Config, snapshot: Snapshot) -> list[str]:
    """List what is wrong with the networks, on this node."""
    problems = []
    for i, network in enumerate(config.networks):
        try:
            parsed = netconf.from_document(dict(network.netconf))
        except RequestInvalid as error:
            problems.append(f"networks[{i}]: {error}")
            continue
        problems += _problems_of_users(config, i)
        for key, names in (("deviceID", parsed.device), ("pf", parsed.pf)):
            if names:
                problems.append(f"networks[{i}].{key}: is chosen for each pod, so leave it out")
        alone = [key for key, value in (("mac", parsed.mac), ("guid", parsed.guid)) if value is not None]
        if alone and (vfs := _count_vfs(config, network.name, snapshot)) > 1:
            problems += [f"networks[{i}].{key}: {vfs} VFs would get the same one, so leave it out" for key in alone]
    return problems


def _count_vfs(config: Config, network: str, snapshot: Snapshot) -> int:
    offered = list_units(config.resources, snapshot)
    return sum(len(offered[resource.name]) for resource in config.resources if resource.network == network)


def _problems_of_users(config: Config, number: int) -> list[str]:
    """List what is wrong with a network for the devices of some resource alone."""
    network = config.networks[number]
    problems = []
    for resource in config.resources:
        if resource.network == network.name:
            try:
                netconf.from_document(document_for(resource, network))
            except RequestInvalid as error:
                problems.append(f"networks[{number}], for {resource.name}: {error}")
    return problems


Meanwhile = Callable[[Config, Sequence[str]], AbstractAsyncContextManager[None]]
"""Makes what is done, for as long as it is entered, with what can be read of a wrong configuration. Takes that, and a
list of what is wrong, which changes."""


def _nothing(config: Config, wrong: Sequence[str]) -> AbstractAsyncContextManager[None]:
    return nullcontext()


async def await_config(
    sources: Sources,
    scan: Callable[[], Awaitable[Snapshot]],
    stop: asyncio.Event,
    probe_socket: Path | None = None,
    meanwhile: Meanwhile = _nothing,
) -> Config | None:
    """Read the configuration, waiting for its repair if it is wrong. None if asked to stop meanwhile.

    Meanwhile /healthz is fine and /readyz says what is wrong, where the configuration has them as far as it can be
    read, and to probes at their socket: kubelet would end an agent whose probes find nobody. `meanwhile` is tried until
    it can be entered.
    """
    said: tuple[str, ...] = ()
    wrong: list[str] = []
    excuse: str | None = ""
    async with AsyncExitStack() as stack:
        while not stop.is_set():
            try:
                config = await _load(sources, scan)
            except ConfigError as error:
                if error.problems != said:
                    for problem in error.problems:
                        log.error("%s: %s", error.source, problem)
                    log.error("waiting for %s to be repaired", sources)
                    wrong[:] = error.problems
                    if not said:
                        legible = await asyncio.to_thread(_legible, sources)
                        _explain(stack, wrong, legible.endpoints, probe_socket)
                    said = error.problems
                if excuse is not None:
                    excuse = await _enter(stack, meanwhile, await asyncio.to_thread(_legible, sources), wrong, excuse)
            else:
                for warning in config.warnings:
                    log.warning("%s: %s", config.source, warning)
                return config
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_SECONDS):
                    await stop.wait()
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


async def _enter(
    stack: AsyncExitStack, meanwhile: Meanwhile, config: Config, wrong: Sequence[str], excuse: str
) -> str | None:
    """Begin what is done meanwhile. Say why that is not possible, once; None if it is."""
    try:
        await stack.enter_async_context(meanwhile(config, wrong))
    except (AgentError, OSError) as error:
        if str(error) != excuse:
            log.warning("pods wait until the configuration is repaired: %s", error)
        return str(error)
    return None


def _explain(stack: AsyncExitStack, wrong: Sequence[str], endpoints: Endpoints, probe_socket: Path | None) -> None:
    metrics = Metrics(CollectorRegistry())
    metrics.reloaded("refused")
    pages = Pages(
        metrics=metrics.render,
        status=lambda: served({"ready": False, "obstacles": {"config": "; ".join(wrong)}}),
        ready={"config": lambda: "; ".join(wrong)},
        everywhere=endpoints.status == "everywhere",
    )
    stack.enter_context(probes.served(probe_socket, pages.health, pages.ready))
    try:
        stack.callback(EndpointServer.open(endpoints.address, endpoints.port, pages).close)
    except ConfigError as error:
        log.warning("the endpoints cannot say so: %s", error)
