"""The composition root: opens the parts in order, runs them together, closes them in reverse.

Order matters: the endpoints come first, so that a node that cannot start says why; the books and
the reconciler come before the CNI socket and the device plugins, so that nothing is handed out
before what was left by an earlier run is known and cleaned. Addresses are given back after all of
that: an IPAM plugin may hang, or end the agent, and nobody would be served before the next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from agent import admin, gpu_pause, memory, page, probes, release
from agent.clients.kubelet import PodResources
from agent.config import Config, Topology
from agent.config.sources import Sources
from agent.endpoints import EndpointServer, Pages
from agent.errors import ConfigError
from agent.gpu_errors import GpuErrors
from agent.hardware.host import Host
from agent.hardware.port_counters import with_busy_vfs
from agent.health import HealthBook
from agent.heartbeat import Heartbeat
from agent.identity import agent_version, node_name
from agent.inventory import Inventory
from agent.lasting import lasting
from agent.metrics import Facts, Metrics
from agent.model.counters import Counters, VfCounters
from agent.model.device import Snapshot
from agent.model.unit import OfferedUnit
from agent.node_events import NodeEvents
from agent.obstacles import NO_POD_NEEDS
from agent.opening import keep_listening, learn_boot_id, listen, open_ledger
from agent.overview import Overview
from agent.parts import Parts, Surroundings
from agent.reload import Reloader
from agent.republication import Republication
from agent.startup import check
from agent.volumes import Volumes
from deviceplugin.plugins import DevicePlugins
from deviceplugin.resources import adapters_of

if TYPE_CHECKING:
    from agent.publication import ClusterApi, Publications
    from agent.topology.node_taint import NodeTaint

SERVED_SECONDS = 30.0
"""kubelet may be away, and what is to be given back must not wait for ever."""
CONDITIONS_POLL_SECONDS = 0.5
REGISTRATION_SECONDS = 2.0
"""How long all that pods do not need waits for kubelet."""
READY_POLL_SECONDS = 0.01
RESTART_SECONDS = 5.0
"""How long kubelet and the runtime may be away, and kubelet take to open its streams, before that is an error."""
MAX_OVERLAPS = 8
ENDPOINTS_RETRY_SECONDS = 2.0

log = logging.getLogger(__name__)
_NO_UNITS: Mapping[str, Sequence[OfferedUnit]] = MappingProxyType({})


class Agent:
    """All parts of one running agent."""

    def __init__(
        self,
        config: Config,
        host: Host,
        inventory: Inventory,
        taint: NodeTaint,
        *,
        open_api: Callable[[], ClusterApi] | None = None,
        sources: Sources | None = None,
        probe_socket: Path | None = None,
    ) -> None:
        """`inventory` is that of the host, and may have begun. `taint` is told when kubelet has the lists, and may hold
        up an end that was asked for. `open_api` opens the API server to publish to, and raises ConfigError if that is
        not possible; None if nothing goes there. `sources` are the files that the configuration was read from, to
        follow them; None if it stays as it is. At `probe_socket` kubelet's probes are answered; None if nobody probes.
        """
        self.config = config
        self._sources = sources
        self._probe_socket = probe_socket
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry)
        self._host = host
        self._open_api = open_api
        self._api: ClusterApi | None = None
        self._inventory = inventory
        inventory.rescan_seconds = config.rescan_seconds
        inventory.complain = lambda what: self.obstacles.set("kernel-events", what)
        self._taint = taint
        taint.settings = config.restart
        self._health = HealthBook(config.health)
        self._pod_resources = PodResources.of_kubelet(config.kubelet_dir)
        self._parts: Parts | None = None
        self._publishing: Republication | None = None
        self._overview = Overview(
            self._facts,
            lambda: self._parts.plugins.units if self._parts is not None else _NO_UNITS,
            lambda: self._parts.plugins.kinds if self._parts is not None else {},
            lambda: self._inventory.snapshot.generation,
            node=node_name(),
            version=agent_version(),
        )
        self.obstacles = self._overview.obstacles
        self._gpu_errors = GpuErrors(self._health, self.registry, self._overview.events)
        self._heartbeat = Heartbeat()
        sockets = (config.kubelet_dir / "device-plugins", config.kubelet_dir / "pod-resources", config.run_dir)
        self._volumes = Volumes((*sockets, config.state_dir, config.cdi_dir))
        self.port = 0
        """Port of the endpoints, once open."""

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set, then close everything in reverse order. Devices in pods stay there."""
        async with AsyncExitStack() as stack:
            pages = self._pages()
            stack.enter_context(probes.served(self._probe_socket, pages.health, pages.ready))
            opening = asyncio.create_task(self._open_endpoints(pages), name="endpoints")
            stack.push_async_callback(self._close_endpoints, opening)
            self.metrics.add_facts(self._facts, agent_version())
            self.metrics.add_adapters(self._counters, lambda: self.config.endpoints.exporter_names)
            stack.push_async_callback(self._pod_resources.close)
            self._gpu_watch = self._host.watch_gpus(self._gpu_errors.take)
            stack.callback(self._gpu_watch.close)
            boot_id = await learn_boot_id(self._inventory, self.obstacles, self._host.root, stop)
            ledger = await open_ledger(self.config, boot_id, self.obstacles, stop, stack)
            if ledger is None:
                return
            stack.push_async_callback(asyncio.to_thread, ledger.close)
            self._overview.follow(ledger)
            self._parts = parts = Parts(self._surroundings(), ledger)
            stack.push_async_callback(asyncio.to_thread, parts.attachments.close)
            await asyncio.to_thread(parts.attachments.leases.defer)
            await parts.reconciler.look_around()
            await asyncio.to_thread(parts.reconciler.heal_attachments)
            stack.enter_context(memory.set_aside())
            # Relays have kept DELs until now, and the next may ask for what one of those has given back.
            await listen(partial(parts.server.start, parts.replay), self.obstacles, stop)
            stack.push_async_callback(asyncio.to_thread, parts.server.close)
            self._listen_to_operator(parts, stack)
            self.obstacles.set("starting", None)
            await self._run_parts(stop, parts)

    def _surroundings(self) -> Surroundings:
        return Surroundings(
            lambda: self.config,
            self._host,
            self._inventory,
            self._pod_resources,
            self._health,
            self.metrics,
            self.obstacles,
            self._overview.events,
        )

    async def _run_parts(self, stop: asyncio.Event, parts: Parts) -> None:
        """Run the loops. One that ends unasked ends the agent, loudly."""

        seen = self._inventory.snapshot.generation

        async def hardware_changed() -> None:
            nonlocal seen
            seen = (await self._inventory.newer_than(seen)).generation

        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(parts.plugins.run(), name="device plugins")
            loops = [
                tasks.create_task(self._inventory.run(), name="inventory"),
                tasks.create_task(self._watch_conditions(parts), name="conditions"),
                tasks.create_task(
                    keep_listening(parts.server.stands, parts.server.listen_anew, self.obstacles), name="CNI socket"
                ),
                tasks.create_task(parts.keep_specs(), name="CDI specs"),
                tasks.create_task(self._heartbeat.run(), name="heartbeat"),
                tasks.create_task(memory.settle(), name="memory"),
                tasks.create_task(lasting(self._overview.run, "recent events"), name="recent events"),
            ]
            # Until then kubelet refuses every pod that asks for our devices, and all else takes time from that.
            await self._registered(parts.plugins, stop)
            served = partial(_served, parts.plugins)
            loops.append(tasks.create_task(parts.reconciler.run(hardware_changed, served=served), name="reconciler"))
            await self._connect()
            self._publishing = Republication(
                lambda topology: self._publications(topology, parts),
                self.config.topology,
                complain=lambda what: self.obstacles.set("publishing", what),
            )
            parts.ledger.subscribe(self._publishing.changed)
            loops.append(tasks.create_task(parts.name_owners(), name="owners of grants"))
            loops.append(tasks.create_task(self._publishing.run(), name="publications"))
            if self._api is not None:
                told = NodeEvents(
                    self._api, node_name(), lambda: parts.plugins.units, lambda: self.obstacles.found.get("config")
                )
                loops.append(tasks.create_task(lasting(told.run, "node events"), name="node events"))
            if (reloader := self._reloader(parts)) is not None:
                loops.append(tasks.create_task(reloader.run(), name="configuration"))
            await stop.wait()
            await self._taint.leave()
            log.info("stopping; devices in pods stay where they are")
            await parts.plugins.close()
            await serving
            for task in loops:
                task.cancel()

    async def _registered(self, plugins: DevicePlugins, stop: asyncio.Event) -> None:
        """Wait until kubelet has all lists; not for long, since it may be away."""
        until = asyncio.get_running_loop().time() + REGISTRATION_SECONDS
        while True:
            if plugins.ready or stop.is_set() or asyncio.get_running_loop().time() > until:
                return
            await asyncio.sleep(READY_POLL_SECONDS)

    async def _connect(self) -> None:
        """Open the API server. Pods need none: an agent that ended here would end again after each start."""
        if self._open_api is None:
            return
        try:
            self._api = await asyncio.to_thread(self._open_api)
        except ConfigError as error:
            problems = "; ".join(error.problems)
            self.obstacles.set(
                "publishing", f"nothing is published until the agent starts anew: {error.source}: {problems}"
            )

    def _reloader(self, parts: Parts) -> Reloader | None:
        async def apply(config: Config) -> None:
            await asyncio.to_thread(parts.holders.reconfigure, config.resources)
            self.config = config
            await asyncio.to_thread(parts.holders.look)  # what kubelet has noted of other resources counts now
            parts.granted.reconfigure(config)
            self._inventory.rescan_seconds = config.rescan_seconds
            self._health.settings = config.health
            self._taint.settings = config.restart
            if self._publishing is not None:
                self._publishing.reconfigure(config.topology)
            await parts.plugins.reconfigure(config)

        if self._sources is None:
            return None
        return Reloader(
            self._sources,
            self.config,
            check=lambda config: check(config, self._inventory.snapshot),
            apply=apply,
            complain=lambda what: self.obstacles.set("config", what),
            count=self.metrics.reloaded,
            # The account to publish with was chosen at the start.
            waits=lambda config: ("topology",) if self._api is None and config.topology.needs_api else (),
        )

    # ------------------------------------------------------------------ opening

    def _pages(self) -> Pages:
        return Pages(
            metrics=self.metrics.render,
            status=self._overview.served,
            health={"loop": self._heartbeat.stopped, "volumes": self._volumes.lost},
            ready={"agent": lambda: self.obstacles.first(besides=NO_POD_NEEDS)},
            known=self.obstacles.known,
            files=page.load(),
            everywhere=self.config.endpoints.status == "everywhere",
        )

    async def _open_endpoints(self, pages: Pages) -> EndpointServer:
        """Open the endpoints, however long another process has their port: pods need no endpoints."""
        wanted = self.config.endpoints
        while True:
            try:
                opened = EndpointServer.open(wanted.address, wanted.port, pages)
            except ConfigError as error:
                self.obstacles.set("endpoints", "; ".join(error.problems))
                await asyncio.sleep(ENDPOINTS_RETRY_SECONDS)
            else:
                self.obstacles.set("endpoints", None)
                self.port = opened.port
                return opened

    async def _close_endpoints(self, opening: asyncio.Task[EndpointServer]) -> None:
        opening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.to_thread((await opening).close)

    def _listen_to_operator(self, parts: Parts, stack: AsyncExitStack) -> None:
        """Open the operator's socket. Pods need none, so the agent does its work without it too."""
        answer = release.answering(parts.attachments, parts.reconciler, asyncio.get_running_loop(), parts.reconciled)
        answer = gpu_pause.answering(self._host, lambda: self._inventory.snapshot, answer)
        server = admin.AdminServer(self.config.admin_socket, answer)
        try:
            server.start()
        except ConfigError as error:
            self.obstacles.set("admin", "; ".join(error.problems))
        else:
            stack.push_async_callback(asyncio.to_thread, server.close)

    def _publications(self, topology: Topology, parts: Parts) -> Publications:
        from agent.publication import Publications  # not before kubelet has the lists, which needs none of it

        return Publications(
            topology,
            node_name(),
            self._host.root,
            self._inventory,
            self._pod_resources,
            lambda: parts.plugins.units if parts.plugins.allocator.offer.snapshot.generation else None,
            self.metrics,
            self._api,
            lambda what: self.obstacles.set("publishing", what),
            host_names=lambda: {row.device: row.undo.netdev for row in parts.ledger.attachments()},
            vf_counters=self._vf_counters,
        )

    # ---------------------------------------------------- what the parts ask for

    async def _watch_conditions(self, parts: Parts) -> None:
        """Keep up to date the obstacles about kubelet, and those that nobody tells of."""
        while True:
            missing = [s.resource_name for s in parts.plugins.status() if not s.registered]
            text = f"has no open stream for {', '.join(missing)}" if missing else None
            self.obstacles.expect("kubelet", text, RESTART_SECONDS)
            if not missing:
                self._taint.registered.set()
            self.obstacles.expect("podresources", self._pod_resources.problem, RESTART_SECONDS)
            if parts.runtime is not None:
                self.obstacles.expect("runtime", parts.runtime.problem, RESTART_SECONDS)
            self.obstacles.set("cdi", parts.cdi_problem)
            self.obstacles.set("gpu-events", "; ".join(self._gpu_watch.unheard) or None)
            overlaps = parts.plugins.overlaps
            self.metrics.overlapping(len(overlaps))
            self.obstacles.set("overlap", "; ".join(map(str, overlaps[:MAX_OVERLAPS])) or None)
            await asyncio.sleep(CONDITIONS_POLL_SECONDS)

    def _facts(self) -> Facts:
        snapshot, parts = self._inventory.snapshot, self._parts
        if parts is None:
            return Facts(snapshot, obstacles=tuple(self.obstacles.found))
        offer, ledger = parts.plugins.allocator.offer, parts.ledger
        return Facts(
            snapshot,
            offer.units,
            ledger.grants(),
            ledger.attachments(),
            ledger.quarantines(),
            self._inventory.scan_seconds * 1000,
            ledger.owed_leases(),
            parts.granted.containers,
            tuple(self.obstacles.found),
            exporter_names=self.config.endpoints.exporter_names,
            adapters=adapters_of(offer.units, offer.pools, snapshot),
        )

    def _counters(self) -> Counters:
        return self._host.counters(self._inventory.snapshot, self._held())

    def _vf_counters(self, snapshot: Snapshot) -> tuple[VfCounters, ...]:
        busy = with_busy_vfs(snapshot, self._held())
        return self._host.counters(busy, frozenset()).vfs if busy.devices else ()

    def _held(self) -> frozenset[str]:
        """List the devices that kubelet has granted, and those that CNI brought into pods by itself."""
        if self._parts is None:
            return frozenset()
        ledger = self._parts.ledger
        return frozenset(g.device for g in ledger.grants()) | frozenset(row.device for row in ledger.attachments())


async def _served(plugins: DevicePlugins) -> None:
    """Wait until kubelet has what is offered, but not for ever: then pods come and go whatever an IPAM plugin does."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SERVED_SECONDS):
            while True:
                if plugins.allocator.offer.snapshot.generation and all(s.registered for s in plugins.status()):
                    return
                await asyncio.sleep(CONDITIONS_POLL_SECONDS)
