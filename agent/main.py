"""The composition root: one list of parts, opened in order, run together, closed in reverse.

Order matters: the endpoints come first, so that a node that cannot start says why; the books and
the reconciler come before the CNI socket and the device plugins, so that nothing is handed out
before what was left by an earlier run is known and cleaned. Addresses are given back after all of
that: an IPAM plugin may hang, or end the agent, and nobody would be served before the next start.

In an update the next agent waits at the books until this one has closed them. kubelet refuses pods from the end of the
device plugins' streams until the next agent has registered: so as little as possible lies between kubelet's doors and
the books, and all that needs no books comes before them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from agent.config import Config
from agent.config.files import Sources
from agent.errors import ConfigError
from agent.hardware.host import Host, Watch
from agent.health_history import HealthHistory
from agent.inventory import Inventory
from agent.kubelet.podresources import PodResources
from agent.ledger import Ledger
from agent.model.device import Snapshot
from agent.offer.offer import Offer
from agent.offer.units import plain_offer
from agent.operator import admin, gpu_pause, release
from agent.process import interpreter, lifecycle
from agent.process.conditions import NO_POD_NEEDS, Conditions
from agent.process.identity import agent_version, node_name
from agent.process.lifecycle import Part, entered
from agent.process.reload import Reloader
from agent.process.standby import has_successor
from agent.process.startup import check, keep_listening, learn_boot_id, listen, open_endpoints, open_ledger
from agent.process.supervision import Heartbeat, Volumes, nobody_watches, supervised
from agent.report import page
from agent.report.endpoints import Pages
from agent.report.events import Events
from agent.report.metrics import Metrics
from agent.report.overview import NodeFacts, Overview
from agent.report.report import GpuErrors, Report
from agent.state import Latest
from agent.wiring import Parts
from cni.call import Node

if TYPE_CHECKING:
    from agent.cluster.apiserver import ApiServer
    from agent.cluster.node_taint import NodeTaint

SERVED_SECONDS = 30.0
"""kubelet may be away, and what is to be given back must not wait for ever."""
CONDITIONS_POLL_SECONDS = 0.5
REGISTRATION_SECONDS = 2.0
"""How long all that pods do not need waits for kubelet."""
READY_POLL_SECONDS = 0.01
RESTART_SECONDS = 5.0
"""How long kubelet and the runtime may be away, and kubelet take to open its streams, before that is an error."""
MAX_OVERLAPS = 8

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """How the agent was started, besides its configuration."""

    open_api: Callable[[], ApiServer] | None = None
    """Opens the API server to publish to; None if nothing goes there. Raises ConfigError if that is not possible."""
    open_claims: Callable[[], ApiServer] | None = None
    """Opens it to read claims, many at once; None if there are none to be read. Raises ConfigError as well."""
    sources: Sources | None = None
    """The files that the configuration was read from, to follow them; None if it stays as it is."""
    probe_socket: Path | None = None
    """Where kubelet's probes are answered; None if nobody probes."""
    watchdog: Callable[[float | None], None] = nobody_watches
    """Ends the process whose loop stands still: see `Heartbeat`."""


class Agent:
    """All parts of one running agent."""

    def __init__(self, config: Config, host: Host, inventory: Inventory, taint: NodeTaint, start: Start) -> None:
        """`inventory` is that of the host, and may have begun. `taint` hears when kubelet has the lists, and may hold
        up an end that was asked for.
        """
        self._config = Latest(config)
        """The configuration in effect."""
        self._start = start
        self._host = host
        self._inventory = inventory
        self._taint = taint
        events = Events()
        metrics = Metrics(CollectorRegistry())
        self._report = Report(metrics, Conditions(events.condition), events, HealthHistory(config.health))
        self._conditions = self._report.conditions
        self._heed()
        self._config.subscribe(self._heed)
        inventory.complain = partial(self._conditions.set, "kernel-events")
        self._kubelet = PodResources.of_kubelet(config.kubelet_dir)
        self._offer = Latest(Offer())
        """What device plugins offer to kubelet."""
        self._ledger: Latest[Ledger | None] = Latest(None)
        """The books, once they are open."""
        self._api: ApiServer | None = None
        """Once it is open."""
        self._heartbeat = Heartbeat(watchdog=start.watchdog)
        self._is_at_work = False
        """Whether threads that work on devices went on when what they belong to was closed."""

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set, then close everything in reverse order. Devices in pods stay there."""
        await lifecycle.run(self._parts(stop), stop, self._leave)

    def _parts(self, stop: asyncio.Event) -> Iterator[Part]:
        """List the parts. Each is made when those before it are open, and runs from the moment that it is open."""
        config, conditions, metrics = self._config.value, self._conditions, self._report.metrics
        facts = NodeFacts(self._config, self._inventory, self._offer, self._ledger, self._kubelet, self._report)
        overview = Overview(facts, node=node_name(), version=agent_version())
        pages = self._pages(overview)
        endpoints = AsyncExitStack()
        yield entered("probes", admin.answering_probes(self._start.probe_socket, pages.health, pages.ready))
        opening = partial(open_endpoints, config.endpoints, pages, conditions, endpoints)
        yield Part("endpoints", run=opening, close=endpoints.aclose)
        metrics.add_facts(facts.read, agent_version())
        metrics.add_adapters(partial(facts.counters, self._host), self._config)
        yield Part("PodResources", close=self._kubelet.close)
        gpus = self._host.watch_gpus(GpuErrors(self._report.health, metrics.registry, self._report.events).take)
        yield Part("GPU events", close=partial(asyncio.to_thread, gpus.close))
        yield Part("inventory", run=self._inventory.run)

        books = AsyncExitStack()
        yield Part("books", partial(self._open_books, books, stop), close=partial(self._close_books, books))
        ledger = self._ledger.value
        assert ledger is not None, "no part is asked for once the agent is to stop"
        overview.follow(ledger)
        node = Node(self._host, ledger, self._inventory.snapshot, self._report, metrics.observe_steps)
        made = Parts(self._config, node, self._offer, self._kubelet, self._report)
        attachments, reconciler, server = made.attachments, made.reconciler, made.server
        yield Part("relay's file of pods", close=partial(asyncio.to_thread, made.holders.close))
        defer = partial(asyncio.to_thread, attachments.leases.defer)
        yield Part("attachments", defer, close=partial(self._end, attachments.close))
        yield Part("clean-up", reconciler.begin)
        yield Part("CDI specs", made.specs.look, made.specs.run)
        yield entered("memory", interpreter.set_aside(), interpreter.set_aside_later)
        conditions.set("starting", None)
        yield Part("heartbeat", run=self._heartbeat.run)
        yield Part("device plugins", run=made.plugins.run, close=made.plugins.close)
        # It loads what it needs when it is needed.
        from deviceplugin.dra.driver import Dra, OnNode

        asker, specs, reader = made.asker, made.cdi_specs, made.claim_reader
        claims = OnNode(node_name(), self._config, self._offer, ledger, asker, attachments, specs, reader, made.leaves)
        dra, claims_due = Dra(claims, self._start.open_claims, self._report), asyncio.Event()
        yield Part("claims", run=partial(dra.run, claims_due), close=dra.close)
        yield Part("devices on their way back", close=partial(self._end, attachments.close))
        # Relays have kept DELs until now, and the next may ask for what one of those has given back.
        answering = partial(listen, partial(server.start, reconciler.carry_out_dels), conditions, stop)
        standing = partial(keep_listening, server.stands, server.listen_again, conditions)
        yield Part("CNI socket", answering, standing, partial(self._end, server.close))
        operators = AsyncExitStack()
        yield Part("operator's socket", partial(self._listen_to_operator, made, operators), close=operators.aclose)
        yield Part("usage", run=made.usage.run)
        yield Part("conditions", run=partial(self._watch_conditions, made, gpus))
        yield Part("recent events", run=partial(supervised, overview.run, "recent events"))

        # Until then kubelet refuses every pod that asks for our devices, and all else takes time from that.
        yield Part("registration", partial(self._registered, made, stop))
        yield Part("reconciler", run=partial(reconciler.run, served=partial(self._served, made)))
        claims_due.set()
        yield Part("claims' sockets", dra.served)
        yield Part("API server", self._connect)
        # kubelet needs none of what follows: what is loaded for it waits, too.
        from agent.cluster.node_events import NodeEvents
        from agent.cluster.publications import Republication
        from agent.cluster.topology import node_view

        seen = node_view.Node(node_name(), self._host, node.scans, self._offer, self._kubelet, ledger, made.leaves)
        publishing = Republication(self._config, seen, self._api, metrics, conditions)
        ledger.subscribe(publishing.changed)
        yield Part("owners of grants", run=made.owners.run)
        told_of = partial(conditions.set, "publishing")
        yield Part("publications", run=partial(supervised, publishing.run, "publications", told_of))
        if self._api is not None:
            told = NodeEvents(self._api, node_name(), self._offer, conditions)
            yield Part("node events", run=partial(supervised, told.run, "node events"))
        if self._start.sources is not None:
            apply, publishes = partial(_apply, made), self._api is not None

            def fits(config: Config) -> None:
                check(config, self._inventory.snapshot.value)

            changes = Reloader(self._start.sources, self._config, self._report, fits, apply, publishes=publishes)
            yield Part("configuration", run=changes.run)

    def _heed(self) -> None:
        """Go by another configuration, as far as nobody has to wait for it."""
        config = self._config.value
        self._inventory.rescan_seconds = config.rescan_seconds
        self._inventory.heed(config.placement)
        self._report.health.settings.set(config.health)
        self._taint.settings = config.restart

    # ------------------------------------------------------------------ opening

    def _pages(self, overview: Overview) -> Pages:
        config = self._config.value
        sockets = (config.kubelet_dir / "device-plugins", config.kubelet_dir / "pod-resources", config.run_dir)
        volumes = Volumes((*sockets, config.state_dir, config.cdi_dir))
        return Pages(
            metrics=self._report.metrics.render,
            status=overview.served,
            health={"loop": self._heartbeat.stopped, "volumes": volumes.lost},
            ready={"agent": partial(self._conditions.first, besides=NO_POD_NEEDS)},
            known=self._conditions.known,
            files=page.load(),
            everywhere=config.endpoints.status == "everywhere",
        )

    async def _open_books(self, closing: AsyncExitStack, stop: asyncio.Event) -> None:
        """Open the ledger, unless asked to stop before that is possible."""
        boot_id = await learn_boot_id(self._inventory, self._conditions, self._host.root, stop)
        prepare = partial(asyncio.to_thread, _prepare, self._config.value, self._inventory.snapshot.value)
        ledger = await open_ledger(self._config.value, boot_id, self._conditions, stop, closing, prepare)
        if ledger is not None:
            self._ledger.set(ledger)

    async def _close_books(self, claim: AsyncExitStack) -> None:
        """Close the books, and leave them to the next agent: not before the last device is let go of.

        Where threads still work on one the claim goes with the process, which ends soon. So the next agent never heals
        what this one is about to do.
        """
        if (ledger := self._ledger.value) is not None:
            await asyncio.to_thread(ledger.close)
        if self._is_at_work:
            log.info("the books stay this agent's until it has ended: calls are still worked on")
        else:
            await claim.aclose()

    async def _end(self, close: Callable[[], bool]) -> None:
        """Close what works on devices, and note whether something of it goes on."""
        self._is_at_work |= not await asyncio.to_thread(close)

    async def _listen_to_operator(self, made: Parts, closing: AsyncExitStack) -> None:
        """Open the operator's socket. Pods need none, so the agent does its work without it too."""
        loop = asyncio.get_running_loop()
        answers = {
            release.COMMAND: release.answering(made.attachments, made.reconciler, loop, self._report.reconciled),
            gpu_pause.COMMAND: gpu_pause.answering(self._host.pause_gpus, self._inventory.snapshot),
        }
        server = admin.AdminServer(self._config.value.admin_socket, answers)
        try:
            server.start()
        except ConfigError as error:
            self._conditions.set("admin", "; ".join(error.problems))
        else:
            closing.push_async_callback(asyncio.to_thread, server.close, 0)

    async def _registered(self, made: Parts, stop: asyncio.Event) -> None:
        """Wait until kubelet has all lists; not for long, since it may be away."""
        await _until(lambda: made.plugins.ready or stop.is_set(), REGISTRATION_SECONDS, READY_POLL_SECONDS)

    async def _connect(self) -> None:
        """Open the API server. Pods need none: an agent that ended here would end again after each start."""
        if self._start.open_api is None:
            return
        try:
            self._api = await asyncio.to_thread(self._start.open_api)
        except ConfigError as error:
            problems = "; ".join(error.problems)
            self._conditions.set(
                "publishing", f"nothing is published until the agent starts again: {error.source}: {problems}"
            )

    # ------------------------------------------------------------------ running

    async def _leave(self) -> None:
        """Have no pod placed on the node meanwhile, unless the next agent waits: then there is hardly a meanwhile."""
        if not has_successor(self._config.value.state_dir):
            await self._taint.leave()

    async def _served(self, made: Parts) -> None:
        """Wait until kubelet has what is offered, but not for ever. Then pods come and go whatever an IPAM plugin does.

        So pending addresses are given back from then on."""

        def is_served() -> bool:
            return bool(self._offer.value.snapshot.generation) and made.plugins.ready

        await _until(is_served, SERVED_SECONDS, CONDITIONS_POLL_SECONDS)

    async def _watch_conditions(self, made: Parts, gpus: Watch) -> None:
        """Keep up to date the conditions about kubelet, and those that no part reports."""
        conditions = self._conditions
        while True:
            missing = [name for name, status in made.plugins.status().items() if not status.registered]
            text = f"has no open stream for {', '.join(missing)}" if missing else None
            conditions.expect("kubelet", text, RESTART_SECONDS)
            if not missing:
                self._taint.registered.set()
            conditions.expect("podresources", self._kubelet.problem, RESTART_SECONDS)
            if made.runtime is not None:
                conditions.expect("runtime", made.runtime.problem, RESTART_SECONDS)
            conditions.set("reconciler", made.reconciler.overdue(time.monotonic()))
            conditions.set("cdi", made.specs.problem)
            conditions.set("gpu-events", "; ".join(gpus.unheard) or None)
            overlaps = made.plugins.overlaps
            self._report.metrics.overlapping(len(overlaps))
            conditions.set("overlap", "; ".join(map(str, overlaps[:MAX_OVERLAPS])) or None)
            await asyncio.sleep(CONDITIONS_POLL_SECONDS)


async def _until(is_so: Callable[[], bool], seconds: float, poll_seconds: float) -> None:
    """Wait for something, at most so long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                if is_so():
                    return
                await asyncio.sleep(poll_seconds)


async def _apply(made: Parts) -> None:
    """Wait until the newest configuration is in effect."""
    await asyncio.to_thread(made.holders.look)  # what kubelet has noted of other resources counts now
    await made.plugins.reconfigured()


def _prepare(config: Config, snapshot: Snapshot) -> None:
    """Do ahead what is due once the books are open: an agent that waits for them has the time now.

    The offer is made again then, of what the books say besides. One that cannot be made is no reason to end the other
    agent, so this one fails before it is ready.
    """
    plain_offer(config.resources, snapshot, named_rails=config.topology.rails)
    import agent.cluster.apiserver
    import agent.cluster.node_events
    import agent.cluster.publications
    import agent.cluster.topology.node_view
    import deviceplugin.dra.driver

    if config.needs_api:
        agent.cluster.apiserver.load()
    if config.offers_dra:
        import agent.cluster.claim_objects
        import agent.cluster.slices
        import deviceplugin.dra.offering
        import deviceplugin.dra.preparer
        import deviceplugin.dra.registration  # noqa: F401
