"""The composition root: opens the parts in order, runs them together, closes them in reverse.

Order matters: the endpoints come first, so that a node that cannot start says why; the books and
the reconciler come before the CNI socket and the device plugins, so that nothing is handed out
before what was left by an earlier run is known and cleaned.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from prometheus_client import CollectorRegistry

from agent import admin, cdi, device_info, release, status
from agent.clients.cri import ContainerRuntime
from agent.clients.kubelet import PodDevices, PodResources
from agent.config import Config
from agent.endpoints import EndpointServer, Pages
from agent.errors import ConfigError, DeviceGone, LedgerError, Unavailable
from agent.hardware.host import Host
from agent.heartbeat import Heartbeat
from agent.inventory import Inventory
from agent.ledger import Ledger
from agent.ledger.lock import claim
from agent.metrics import Facts, Metrics
from agent.model.allocation import PodRef
from agent.model.unit import OfferedUnit
from agent.obstacles import Obstacles
from agent.reconcile import Claim, Reconciler
from agent.topology import resource
from agent.topology.kubelet_config import KubeletConfigFile
from agent.topology.publisher import Pace, Publisher, TopologyApi
from agent.topology.state import node_state
from cni import spool
from cni.attachment import Attachments, GrantedDevice
from cni.server import CniServer
from deviceplugin.plugins import DevicePlugins
from deviceplugin.resources import list_units

LEDGER_RETRY_SECONDS = 1.0
REGISTRATION_POLL_SECONDS = 0.5
ENDPOINTS_RETRY_SECONDS = 2.0
PODRESOURCES_SECONDS = 5.0

log = logging.getLogger(__name__)


def agent_version() -> str:
    """Return the installed version, or a word that says that this is a checkout."""
    try:
        return version("nodefabric")
    except PackageNotFoundError:
        return "checkout"


def node_name() -> str:
    """Return the Kubernetes node name: NODE_NAME (downward API), else the host name."""
    return os.environ.get("NODE_NAME") or socket.gethostname()


class Agent:
    """All parts of one running agent."""

    def __init__(self, config: Config, host: Host, *, api: TopologyApi | None = None) -> None:
        """`api` is the API server to publish the topology to; None publishes nothing."""
        self.config = config
        self.obstacles = Obstacles()
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry)
        self._host = host
        self._api = api
        self._inventory = Inventory(host, config.rescan_seconds)
        self._pod_resources = PodResources.of_kubelet(config.kubelet_dir)
        self._kubelet_config = KubeletConfigFile(config.topology.kubelet_config)
        self._kinds = {resource.name: resource.kind for resource in config.resources}
        self._ledger: Ledger | None = None
        self._plugins: DevicePlugins | None = None
        self._reconciler: Reconciler | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._heartbeat = Heartbeat()
        self._pods: frozenset[tuple[str, str]] = frozenset()
        self._spool = spool.Spool(config.spool_dir)
        self.port = 0
        """Port of the endpoints, once open."""

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set, then close everything in reverse order. Devices in pods stay there."""
        self._loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            opening = asyncio.create_task(self._open_endpoints(), name="endpoints")
            stack.push_async_callback(self._close_endpoints, opening)
            self.metrics.add_facts(self._facts, agent_version())
            stack.push_async_callback(self._pod_resources.close)
            boot_id = await self._learn_boot_id(stop)
            ledger = await self._open_ledger(boot_id, stop, stack)
            if ledger is None:
                return
            stack.push_async_callback(asyncio.to_thread, ledger.close)
            attachments = Attachments(
                self._host,
                ledger,
                lambda: self._inventory.snapshot,
                self._granted,
                netns_folders=self.config.netns_folders,
                network_of=self._network_of,
                observe_steps=self.metrics.observe_steps,
                foreign_folders=(self._host.root / "var/lib/cni", self._host.root / "var/run/cni"),
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
                cdi_kinds=cdi.installed_kinds,
                device_info=self._host.root / device_info.FOLDER.relative_to("/"),
            )
            reconciler = Reconciler(
                ledger,
                attachments,
                claims=self._claims,
                devices_of_units=lambda: _devices_of(plugins.units) if plugins.units else None,
                replay_spool=lambda: self._replay(server),
                count=self.metrics.reconciled,
                snapshot=lambda: self._inventory.snapshot,
                ours=lambda: self._our_vfs(ledger),
                pods=lambda: self._pods,
                sandboxes=ContainerRuntime(self.config.runtime_socket).sandboxes
                if self.config.runtime_socket
                else None,
                complain=lambda what: self.obstacles.set("ledger", what),
            )
            await reconciler.look_around()
            await asyncio.to_thread(reconciler.heal_attachments)
            self._reconciler = reconciler
            server.start()
            stack.push_async_callback(asyncio.to_thread, server.close)
            self._listen_to_operator(attachments, reconciler, stack)
            self.obstacles.set("starting", None)
            await self._run_parts(stop, ledger, plugins, reconciler)

    async def _run_parts(
        self, stop: asyncio.Event, ledger: Ledger, plugins: DevicePlugins, reconciler: Reconciler
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
            ]
            if self._api is not None:
                publisher = self._publisher(self._api)
                ledger.subscribe(publisher.changed)
                loops.append(tasks.create_task(publisher.run(), name="publisher"))
                loops.append(tasks.create_task(self._tell_of_hardware(publisher), name="publisher's inventory"))
            serving = tasks.create_task(plugins.run(), name="device plugins")
            await stop.wait()
            log.info("stopping; devices in pods stay where they are")
            await plugins.close()
            await serving
            for task in loops:
                task.cancel()

    # ------------------------------------------------------------------ opening

    async def _open_endpoints(self) -> EndpointServer:
        """Open the endpoints, however long another process has their port: pods need no endpoints."""
        checks = {"agent": self.obstacles.first}
        pages = Pages(
            metrics=self.metrics.render, status=self._status, health={"loop": self._heartbeat.stopped}, ready=checks
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

    async def _learn_boot_id(self, stop: asyncio.Event) -> str:
        """Scan until the boot ID can be read: without it every row would look like one of an earlier boot."""
        while not (boot_id := (await self._inventory.scan_now()).boot_id) and not stop.is_set():
            self.obstacles.set(
                "hardware", f"{self._host.root}/proc/sys/kernel/random/boot_id cannot be read: mount /proc"
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEDGER_RETRY_SECONDS):
                    await stop.wait()
        self.obstacles.set("hardware", None)
        return boot_id

    def _listen_to_operator(self, attachments: Attachments, reconciler: Reconciler, stack: AsyncExitStack) -> None:
        """Open the operator's socket. Pods need none, so the agent does its work without it too."""
        answer = release.answering(attachments, reconciler, asyncio.get_running_loop(), self.metrics.reconciled)
        server = admin.AdminServer(self.config.admin_socket, answer)
        try:
            server.start()
        except ConfigError as error:
            self.obstacles.set("admin", "; ".join(error.problems))
        else:
            stack.push_async_callback(asyncio.to_thread, server.close)

    async def _open_ledger(self, boot_id: str, stop: asyncio.Event, stack: AsyncExitStack) -> Ledger | None:
        """Open the books, however long that takes: an agent that restarts in a loop explains nothing."""
        claimed = False
        while not stop.is_set():
            try:
                if not claimed:
                    stack.callback(os.close, await asyncio.to_thread(claim, self.config.state_dir))
                    claimed = True
                self._ledger = await asyncio.to_thread(Ledger.open, self.config.ledger_path, boot_id)
            except LedgerError as error:
                self.obstacles.set("ledger", str(error))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LEDGER_RETRY_SECONDS):
                        await stop.wait()
            else:
                self.obstacles.set("ledger", None)
                return self._ledger
        return None

    def _publisher(self, api: TopologyApi) -> Publisher:
        topology = self.config.topology
        return Publisher(
            node_name(),
            self._topology_object,
            api,
            self.metrics,
            Pace(
                coalesce=topology.coalesce_seconds,
                heartbeat=topology.heartbeat_seconds,
                start_spread=topology.start_spread_seconds,
            ),
        )

    async def _tell_of_hardware(self, publisher: Publisher) -> None:
        generation = self._inventory.snapshot.generation
        while True:
            publisher.changed()
            generation = (await self._inventory.newer_than(generation)).generation

    # ---------------------------------------------------- what the parts ask for

    def _unable_to_attach(self) -> str | None:
        """Answer CNI's STATUS. The runtime calls the whole node's network not ready while this is not None.

        So a kubelet that has not taken up our resources does not count: no ADD needs that.
        """
        return self.obstacles.first(besides=("kubelet", "endpoints", "admin"))

    def _granted(self, pod: PodRef) -> Sequence[GrantedDevice]:
        """List the devices that kubelet gave to a pod and that have to do with its network. Runs on the call's thread.

        These are VFs, and each shared HCA, once, whose resource names a network.
        Once the grants agree with kubelet and none of them is such a device's, none is this pod's either, and
        kubelet need not be asked. Until then kubelet is the authority: the ledger may be a new one.
        """
        assert self._ledger is not None
        assert self._plugins is not None
        wanted = {r.name for r in self.config.resources if r.kind == "vf" or (r.kind == "hca" and r.network)}
        granted = self._ledger.granted_devices(wanted)
        if not wanted or (self._reconciler is not None and self._reconciler.settled and not granted):
            return ()
        found = self._ask_kubelet(pod)
        if found is None:
            return ()
        self._ledger.bind(found.all_device_ids, pod)
        mine = []
        for name in sorted(wanted):
            conf = self._network_of(name)
            shared = set[str]()
            for unit_id in sorted(found.device_ids(name)):
                offered = self._plugins.unit(unit_id)
                device = granted.get(unit_id) or (offered.device if offered is not None else None)
                if device is None:
                    raise DeviceGone(unit_id, f"among the units of {name}, though kubelet gave it to {pod}")
                if self._kinds[name] == "hca" and device in shared:
                    continue  # several shares of one HCA
                shared.add(device)
                mine.append(GrantedDevice(device, name, conf))
        return mine

    def _network_of(self, resource_name: str) -> Mapping[str, Any] | None:
        """Return the CNI configuration that a resource's VFs are set up with in a chained call."""
        wanted = next((r.network for r in self.config.resources if r.name == resource_name and r.network), None)
        network = self.config.network(wanted) if wanted is not None else None
        return {**network.netconf, "name": network.name} if network is not None else None

    def _ask_kubelet(self, pod: PodRef) -> PodDevices | None:
        assert self._loop is not None
        asked = asyncio.run_coroutine_threadsafe(self._pod_resources.get(pod), self._loop)
        try:
            return asked.result(PODRESOURCES_SECONDS)
        except concurrent.futures.TimeoutError as error:
            asked.cancel()
            raise Unavailable(f"kubelet did not say what {pod} holds within {PODRESOURCES_SECONDS:g} s") from error

    async def _claims(self) -> Sequence[Claim]:
        """List what kubelet says that pods hold of our resources."""
        pods = await self._pod_resources.list()
        self._pods = frozenset((found.pod.namespace, found.pod.name) for found in pods)
        return tuple(
            Claim(pod.pod, resource_name, unit)
            for pod in pods
            for resource_name in self._kinds
            for unit in pod.device_ids(resource_name)
        )

    async def _topology_object(self, node_uid: str | None) -> Mapping[str, Any] | None:
        """Build the NodeResourceTopology object of this moment. Raises Unavailable without kubelet."""
        settings = await asyncio.to_thread(self._kubelet_config.read)
        pods = await self._pod_resources.list()
        allocatable = await self._pod_resources.allocatable()
        units = self._plugins.units if self._plugins is not None else {}
        return resource.build(
            node_state(node_name(), node_uid, self._inventory.snapshot, units, settings, pods, allocatable)
        )

    def _our_vfs(self, ledger: Ledger) -> frozenset[str]:
        """List the VFs that resources offer, before the first offer too."""
        units = self._plugins.units if self._plugins is not None else {}
        if not units:
            names = {k.device: k.netdev for k in ledger.known_devices()}
            units = list_units(self.config.resources, self._inventory.snapshot, host_names=names)
        return frozenset(u.device for offered in units.values() for u in offered if u.kind == "vf")

    def _replay(self, server: CniServer) -> int:
        count = self._spool.replay(server.answer)
        self.metrics.spooled(count)
        return count

    async def _watch_registration(self, plugins: DevicePlugins) -> None:
        """Keep the obstacle about kubelet up to date."""
        while True:
            missing = [s.resource_name for s in plugins.status() if not s.registered]
            self.obstacles.set("kubelet", f"has no open stream for {', '.join(missing)}" if missing else None)
            await asyncio.sleep(REGISTRATION_POLL_SECONDS)

    def _facts(self) -> Facts:
        units = self._plugins.units if self._plugins is not None else {}
        if self._ledger is None:
            return Facts(self._inventory.snapshot, units)
        return Facts(
            self._inventory.snapshot,
            units,
            self._ledger.grants(),
            self._ledger.attachments(),
            self._ledger.quarantines(),
            self._inventory.scan_seconds * 1000,
            self._ledger.owed_leases(),
        )

    def _status(self) -> dict[str, Any]:
        return status.build(
            self._facts(), node=node_name(), version=agent_version(), kinds=self._kinds, obstacles=self.obstacles.found
        )

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
