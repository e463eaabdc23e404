"""The composition root: opens the parts in order, runs them together, closes them in reverse.

Order matters: the endpoints come first, so that a node that cannot start says why; the books and
the reconciler come before the CNI socket and the device plugins, so that nothing is handed out
before what was left by an earlier run is known and cleaned.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from types import MappingProxyType

from prometheus_client import CollectorRegistry

from agent import admin, cdi, device_info, gpu_pause, memory, page, release
from agent.clients.cri import ContainerRuntime
from agent.clients.kubelet import PodResources
from agent.config import Config, Topology
from agent.config.sources import Sources
from agent.endpoints import EndpointServer, Pages
from agent.errors import ConfigError
from agent.gpu_errors import GpuErrors
from agent.granted import Granted
from agent.hardware import sysfs_rdma
from agent.hardware.host import Host
from agent.health import HealthBook
from agent.heartbeat import Heartbeat
from agent.identity import agent_version, node_name
from agent.inventory import Inventory
from agent.late.binder import Binder
from agent.ledger import Ledger
from agent.metrics import Facts, Metrics
from agent.model.counters import Counters
from agent.model.reasons import Reason
from agent.model.unit import OfferedUnit
from agent.node_events import NodeEvents
from agent.obstacles import NO_POD_NEEDS
from agent.opening import learn_boot_id, open_ledger
from agent.overview import Overview
from agent.publication import ClusterApi, Publications
from agent.reconcile import Reconciler
from agent.reload import Reloader
from agent.republication import Republication
from agent.startup import check
from cni import spool
from cni.attachment import Attachments
from cni.server import CniServer
from deviceplugin.assignment import assign
from deviceplugin.gpu_files import GpuFilesOf
from deviceplugin.plugins import DevicePlugins
from deviceplugin.resources import adapters_of, list_all, vfs_of

REGISTRATION_POLL_SECONDS = 0.5
MAX_OVERLAPS = 8
ENDPOINTS_RETRY_SECONDS = 2.0

log = logging.getLogger(__name__)
_NO_UNITS: Mapping[str, Sequence[OfferedUnit]] = MappingProxyType({})


class Agent:
    """All parts of one running agent."""

    def __init__(
        self, config: Config, host: Host, *, api: ClusterApi | None = None, sources: Sources | None = None
    ) -> None:
        """`api` is the API server to publish to; None if nothing goes there. `sources` are the files that the
        configuration was read from, to follow them; None if it stays as it is."""
        self.config = config
        self._sources = sources
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry)
        self._host = host
        self._api = api
        self._inventory = Inventory(
            host, config.rescan_seconds, silent_changes=partial(sysfs_rdma.silent_changes, host.root)
        )
        self._health = HealthBook(config.health)
        self._pod_resources = PodResources.of_kubelet(config.kubelet_dir)
        self._ledger: Ledger | None = None
        self._granted: Granted | None = None
        self._plugins: DevicePlugins | None = None
        self._publishing: Republication | None = None
        self._overview = Overview(
            self._facts,
            lambda: self._plugins.units if self._plugins is not None else _NO_UNITS,
            lambda: self._plugins.kinds if self._plugins is not None else {},
            lambda: self._inventory.snapshot.generation,
            node=node_name(),
            version=agent_version(),
        )
        self.obstacles = self._overview.obstacles
        self._gpu_errors = GpuErrors(self._health, self.registry, self._overview.events)
        self._heartbeat = Heartbeat()
        self._spool = spool.Spool(config.spool_dir)
        self.port = 0
        """Port of the endpoints, once open."""

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set, then close everything in reverse order. Devices in pods stay there."""
        async with AsyncExitStack() as stack:
            opening = asyncio.create_task(self._open_endpoints(), name="endpoints")
            stack.push_async_callback(self._close_endpoints, opening)
            self.metrics.add_facts(self._facts, agent_version())
            self.metrics.add_adapters(self._counters, lambda: self.config.endpoints.exporter_names)
            stack.push_async_callback(self._pod_resources.close)
            stack.callback(self._host.watch_gpus(self._gpu_errors.take).close)
            boot_id = await learn_boot_id(self._inventory, self.obstacles, self._host.root, stop)
            self._ledger = ledger = await open_ledger(self.config, boot_id, self.obstacles, stop, stack)
            if ledger is None:
                return
            stack.push_async_callback(asyncio.to_thread, ledger.close)
            self._overview.follow(ledger)
            self._granted = granted = Granted(
                self.config,
                ledger,
                self._pod_resources,
                asyncio.get_running_loop(),
                unit=lambda unit_id: plugins.unit(unit_id),
                is_settled=lambda: reconciler.settled,
            )
            slots = Binder(
                self.config.kubelet_dir,
                ledger,
                cdi.SlotSpecs(self.config.cdi_dir),
                resources=lambda: self.config.resources,
                stock=lambda: plugins.allocator.offer,
                ask_kubelet=granted.ask_kubelet,
                network_of=granted.network_of,
                is_settled=lambda: reconciler.settled,
            )
            attachments = Attachments(
                self._host,
                ledger,
                lambda: self._inventory.snapshot,
                granted.devices,
                netns_folders=self.config.netns_folders,
                network_of=granted.network_of,
                observe_steps=self.metrics.observe_steps,
                foreign_folders=(self._host.root / "var/lib/cni", self._host.root / "var/run/cni"),
                slots=slots,
            )
            stack.push_async_callback(asyncio.to_thread, attachments.close)
            server = CniServer(
                self.config.cni_socket, attachments, obstacle=self._unable_to_attach, observe=self._observe_cni
            )
            self._plugins = plugins = DevicePlugins(
                self.config,
                self._inventory,
                ledger,
                observe=self._observe_rpc,
                gpu_files=GpuFilesOf(self._host.root).read,
                device_info=self._host.root / device_info.FOLDER.relative_to("/"),
                health=self._health,
                pods=self._pod_resources.list,
                granting=slots.forget,
            )
            reconciler = Reconciler(
                ledger,
                attachments,
                claims=granted.claims,
                devices_of_units=lambda: _devices_of(plugins.units) if plugins.units else None,
                replay_spool=lambda: self._replay(server),
                count=self._reconciled,
                snapshot=lambda: self._inventory.snapshot,
                ours=lambda: self._our_vfs(ledger),
                pods=lambda: granted.pods,
                sandboxes=ContainerRuntime(self.config.runtime_socket).sandboxes
                if self.config.runtime_socket
                else None,
                complain=self._tell_of_books,
                slots=slots,
            )
            await reconciler.look_around()
            await asyncio.to_thread(reconciler.heal_attachments)
            server.start()
            stack.push_async_callback(asyncio.to_thread, server.close)
            self._listen_to_operator(attachments, reconciler, stack)
            self.obstacles.set("starting", None)
            await self._run_parts(stop, ledger, plugins, reconciler, self._reloader(granted, plugins))

    async def _run_parts(
        self,
        stop: asyncio.Event,
        ledger: Ledger,
        plugins: DevicePlugins,
        reconciler: Reconciler,
        reloader: Reloader | None,
    ) -> None:
        """Run the loops. One that ends unasked ends the agent, loudly."""

        seen = self._inventory.snapshot.generation

        async def hardware_changed() -> None:
            nonlocal seen
            seen = (await self._inventory.newer_than(seen)).generation

        async with asyncio.TaskGroup() as tasks:
            loops = [
                tasks.create_task(self._inventory.run(), name="inventory"),
                tasks.create_task(reconciler.run(hardware_changed), name="reconciler"),
                tasks.create_task(self._watch_registration(plugins), name="registration"),
                tasks.create_task(self._heartbeat.run(), name="heartbeat"),
                tasks.create_task(memory.settle(), name="memory"),
                tasks.create_task(self._overview.run(), name="recent events"),
            ]
            self._publishing = Republication(
                lambda topology: self._publications(topology, plugins), self.config.topology
            )
            ledger.subscribe(self._publishing.changed)
            loops.append(tasks.create_task(self._publishing.run(), name="publications"))
            if self._api is not None:
                told = NodeEvents(
                    self._api, node_name(), lambda: plugins.units, lambda: self.obstacles.found.get("config")
                )
                loops.append(tasks.create_task(told.run(), name="node events"))
            if reloader is not None:
                loops.append(tasks.create_task(reloader.run(), name="configuration"))
            serving = tasks.create_task(plugins.run(), name="device plugins")
            await stop.wait()
            log.info("stopping; devices in pods stay where they are")
            await plugins.close()
            await serving
            for task in loops:
                task.cancel()

    def _reloader(self, granted: Granted, plugins: DevicePlugins) -> Reloader | None:
        async def apply(config: Config) -> None:
            self.config = config
            granted.reconfigure(config)
            self._inventory.rescan_seconds = config.rescan_seconds
            self._health.settings = config.health
            if self._publishing is not None:
                self._publishing.reconfigure(config.topology)
            await plugins.reconfigure(config)

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

    async def _open_endpoints(self) -> EndpointServer:
        """Open the endpoints, however long another process has their port: pods need no endpoints."""
        checks = {"agent": lambda: self.obstacles.first(besides=NO_POD_NEEDS)}
        pages = Pages(
            metrics=self.metrics.render,
            status=self._overview.served,
            health={"loop": self._heartbeat.stopped},
            ready=checks,
            files=page.load(),
        )
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

    def _listen_to_operator(self, attachments: Attachments, reconciler: Reconciler, stack: AsyncExitStack) -> None:
        """Open the operator's socket. Pods need none, so the agent does its work without it too."""
        answer = release.answering(attachments, reconciler, asyncio.get_running_loop(), self._reconciled)
        answer = gpu_pause.answering(self._host, lambda: self._inventory.snapshot, answer)
        server = admin.AdminServer(self.config.admin_socket, answer)
        try:
            server.start()
        except ConfigError as error:
            self.obstacles.set("admin", "; ".join(error.problems))
        else:
            stack.push_async_callback(asyncio.to_thread, server.close)

    def _publications(self, topology: Topology, plugins: DevicePlugins) -> Publications:
        return Publications(
            topology,
            node_name(),
            self._host.root,
            self._inventory,
            self._pod_resources,
            lambda: plugins.units,
            self.metrics,
            self._api,
            lambda what: self.obstacles.set("publishing", what),
        )

    # ---------------------------------------------------- what the parts ask for

    def _unable_to_attach(self) -> str | None:
        """Answer CNI's STATUS. The runtime calls the whole node's network not ready while this is not None.

        So a kubelet that has not taken up our resources does not count: no ADD needs that.
        """
        return self.obstacles.first(besides=("kubelet", "endpoints", "admin", *NO_POD_NEEDS))

    def _tell_of_books(self, what: str | None) -> None:
        self.obstacles.set("ledger", what)
        self._health.withhold(Reason.BOOKS_UNWRITABLE if what is not None else None)

    def _our_vfs(self, ledger: Ledger) -> frozenset[str]:
        """List the VFs that resources offer, before the first offer too."""
        snapshot = self._inventory.snapshot
        offer = self._plugins.allocator.offer if self._plugins is not None else None
        if offer is not None and offer.units:
            return vfs_of(offer.units, offer.pools, snapshot)
        names = {k.device: k.netdev for k in ledger.known_devices()}
        listed = list_all(self.config.resources, assign(self.config.resources, snapshot, names), snapshot)
        return vfs_of(listed.units, listed.pools, snapshot)

    def _replay(self, server: CniServer) -> int:
        count = self._spool.replay(server.answer)
        self.metrics.spooled(count)
        return count

    async def _watch_registration(self, plugins: DevicePlugins) -> None:
        """Keep the obstacle about kubelet up to date."""
        while True:
            missing = [s.resource_name for s in plugins.status() if not s.registered]
            self.obstacles.set("kubelet", f"has no open stream for {', '.join(missing)}" if missing else None)
            overlaps = plugins.overlaps
            self.metrics.overlapping(len(overlaps))
            self.obstacles.set("overlap", "; ".join(map(str, overlaps[:MAX_OVERLAPS])) or None)
            await asyncio.sleep(REGISTRATION_POLL_SECONDS)

    def _facts(self) -> Facts:
        offer = self._plugins.allocator.offer if self._plugins is not None else None
        units = offer.units if offer is not None else {}
        snapshot = self._inventory.snapshot
        if self._ledger is None:
            return Facts(snapshot, units)
        return Facts(
            snapshot,
            units,
            self._ledger.grants(),
            self._ledger.attachments(),
            self._ledger.quarantines(),
            self._inventory.scan_seconds * 1000,
            self._ledger.owed_leases(),
            self._granted.containers if self._granted is not None else {},
            tuple(self.obstacles.found),
            exporter_names=self.config.endpoints.exporter_names,
            adapters=adapters_of(units, offer.pools, snapshot) if offer is not None else frozenset(),
        )

    def _counters(self) -> Counters:
        held = {grant.device for grant in self._ledger.grants()} if self._ledger is not None else set()
        return self._host.counters(self._inventory.snapshot, held)

    def _reconciled(self, action: str, reason: str) -> None:
        self.metrics.reconciled(action, reason)
        self._overview.events.reconciled(action, reason)

    @contextmanager
    def _observe_cni(self, command: str) -> Iterator[None]:
        with self.metrics.observe_cni(command):
            yield

    @contextmanager
    def _observe_rpc(self, operation: str) -> Iterator[None]:
        with self.metrics.observe(operation):
            yield


def _devices_of(units: Mapping[str, Sequence[OfferedUnit]]) -> dict[str, str]:
    return {unit.unit_id: unit.device for offered in units.values() for unit in offered}
