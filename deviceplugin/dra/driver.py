"""The DRA driver, and what keeps its objects at the API server, as one part of the agent.

Nothing is opened, and hardly anything loaded, before the configuration offers a resource to claims. When it offers none
any more the driver goes on until the last claim is unprepared: kubelet asks nobody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter as Tally
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from agent.errors import ConfigError, Unavailable
from agent.process.supervision import supervised
from agent.report.facts import DriverState
from agent.state import Latest, first

if TYPE_CHECKING:
    from agent.cluster.apiserver import ApiServer
    from agent.config import Config
    from agent.edits.specs import Specs
    from agent.hardware.lldp import Neighbour
    from agent.kubelet.podresources import AsksKubelet
    from agent.ledger import Ledger
    from agent.offer.offer import Offer
    from agent.report.report import Report
    from cni.attachment import Attachments
    from cni.pod_devices import ClaimReader
    from deviceplugin.dra.devices import DraDevice
    from deviceplugin.dra.offering import Offering
    from deviceplugin.dra.registration import Door

CONDITION = "dra"
POLL_SECONDS = 0.5
PATIENCE_SECONDS = 5.0
"""How long kubelet may take to find the driver before that is an error."""
RECALL_SECONDS = 1.0
"""For the API server to say what the slices were: kubelet waits for the driver."""
OPEN_SECONDS = 20.0
"""How long a claim waits at the agent's start until it can be read. kubelet gives a call up after 45."""
GOODBYE_SECONDS = 2.0
"""For kubelet to hear that nobody knows the devices' health from now on."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OnNode:
    """What the driver works with on this node."""

    name: str
    config: Latest[Config]
    offer: Latest[Offer]
    ledger: Ledger
    kubelet: AsksKubelet
    attachments: Attachments
    specs: Specs
    reader: Latest[ClaimReader | None]
    """Set for as long as claims can be read."""
    leaves: Latest[Mapping[str, Neighbour]]
    """The switch port at the end of each adapter's link."""


class Published:
    """How the driver's objects at the API server are."""

    def __init__(self) -> None:
        self.dropped = Latest(frozenset[str]())
        """Features that the cluster leaves out."""
        self.slices: Latest[int | None] = Latest(None)
        """How many slices it has as they should be."""


class Dra:
    """Serves claims while there is reason to. `run` until `close`."""

    def __init__(self, node: OnNode, open_api: Callable[[], ApiServer] | None, report: Report) -> None:
        """`open_api` opens a client for many requests at once; None if the agent has no API server."""
        self._node = node
        self._open_api = open_api
        self._report = report
        self._no_api = ""
        """Why claims cannot be read; empty if they can."""
        self._closing = asyncio.Event()
        self._served = asyncio.Event()
        self._ended = asyncio.Event()

    async def run(self, due: asyncio.Event) -> None:
        """Serve whenever any resource is offered to claims, or a claim is left, from the moment that this is due."""
        try:
            await first(due.wait(), self._closing.wait())
            while not self._closing.is_set():
                config = self._node.config.value
                if self._is_needed(config):
                    await self._serve(config)
                else:
                    self._served.set()
                    await first(self._node.config.other_than(config), self._closing.wait())
        finally:
            self._ended.set()

    async def served(self) -> None:
        """Wait until kubelet can find the driver, if it is to; not for long, since kubelet's folders may be missing."""
        await first(self._served.wait(), self._ended.wait(), seconds=PATIENCE_SECONDS)

    async def close(self) -> None:
        """Make `run` end, and wait for that."""
        self._closing.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), GOODBYE_SECONDS)

    def _is_needed(self, config: Config) -> bool:
        return config.offers_dra or bool(self._node.ledger.claims())

    async def _serve(self, config: Config) -> None:
        """Serve under one name, until another is configured, nobody needs it, or we close."""
        published = Published()
        opened: Future[ApiServer | None] = Future()
        door, offering = self._made(config.dra.driver, opened, published)
        serving = asyncio.create_task(door.run(), name="DRA driver")
        following = asyncio.create_task(offering.run(), name="DRA offer")
        with contextlib.ExitStack() as closing:
            opening = asyncio.create_task(self._open(door, closing), name="API of claims")
            closing.callback(opening.cancel)
            beside = asyncio.create_task(
                self._run_beside(config, offering, opening, opened, published), name="beside claims"
            )
            try:
                while not (self._closing.is_set() or serving.done() or self._is_another(config)):
                    if beside.done():
                        beside.result()
                    problem = self._no_api or door.problem or None
                    self._report.conditions.expect(CONDITION, problem, PATIENCE_SECONDS)
                    self._report_state(config.dra.driver, door.problem, offering, published)
                    await first(self._closing.wait(), seconds=POLL_SECONDS)
            finally:
                door.close()
                await asyncio.wait((serving,))
                following.cancel()
                beside.cancel()
                await asyncio.wait((following, beside))
                self._report.conditions.set(CONDITION, None)
                self._report.driver.set(None)
            if self._is_another(config) and (api := await opening) is not None:
                await self._take_back(api, config.dra.driver)
        serving.result()

    async def _open(self, door: Door, closing: contextlib.ExitStack) -> ApiServer | None:
        """Open the API server once the driver is served: what that loads takes longer, and kubelet looks meanwhile."""
        await door.begun()
        self._served.set()
        api = await asyncio.to_thread(self._connected)
        if api is not None:
            closing.callback(api.close)
        return api

    async def _run_beside(
        self,
        config: Config,
        offering: Offering,
        opening: asyncio.Task[ApiServer | None],
        opened: Future[ApiServer | None],
        published: Published,
    ) -> None:
        """Keep at the API server what is to be told of the driver's devices and claims."""
        name, node = config.dra.driver, self._node
        api = await asyncio.shield(opening)
        if api is not None and config.topology.labels.need_lldp:
            await self._recall_leaves(api, name)
        opened.set_result(api)
        if api is None:
            return
        from agent.cluster.claim_objects import ClaimObjects, ClaimStatus
        from agent.cluster.slices import Pool, SliceCells, SlicePublisher

        cells = SliceCells(offering.slices, published.dropped, published.slices)
        slices, status = SlicePublisher(api, Pool(name, node.name), cells, self._report), ClaimStatus(api, self._report)

        async def publish() -> None:
            await offering.heeds(node.leaves.version)
            await slices.run()

        async def write() -> None:
            await status.follow(node.ledger, name, node.offer)
            await status.run()

        node.reader.set(ClaimObjects(lambda: api, node.name))
        runs = (publish, "ResourceSlices"), (write, "status of claims")
        tasks = [asyncio.create_task(supervised(run, what), name=what) for run, what in runs]
        try:
            await asyncio.wait(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            status.end()
            node.reader.set(None)

    def _report_state(self, name: str, problem: str, offering: Offering, published: Published) -> None:
        """Report the state of the driver, if it changed."""
        healths = _healths(offering.catalog.value)
        state = DriverState(name, problem, published.slices.value, published.dropped.value, healths)
        if state != self._report.driver.value:
            self._report.driver.set(state)

    async def _take_back(self, api: ApiServer, driver: str) -> None:
        """Delete the slices of a driver that is no more. Should that fail, kubelet does it half a minute later."""
        from agent.cluster.apiserver import on_own_thread
        from agent.cluster.slices import Pool, remove_all

        try:
            await on_own_thread(partial(remove_all, api, Pool(driver, self._node.name)))
        except Unavailable as error:
            log.warning("slices of %s are left to kubelet: %s", driver, error)

    def _is_another(self, config: Config) -> bool:
        now = self._node.config.value
        return now.dra.driver != config.dra.driver or not self._is_needed(now)

    async def _recall_leaves(self, api: ApiServer, driver: str) -> None:
        """Know the switches that the slices tell of already: to be sure of one takes minutes of listening.

        Meanwhile no selector is to miss the attribute: Kubernetes would place none of its pods.
        """
        from agent.cluster.apiserver import on_own_thread
        from agent.cluster.claim_objects import ClaimObjects
        from deviceplugin.dra.attributes import leaves_in

        try:
            async with asyncio.timeout(RECALL_SECONDS):
                found = await on_own_thread(partial(ClaimObjects(lambda: api, self._node.name).slices, driver))
            leaves = leaves_in(found)
        except (Unavailable, TimeoutError) as error:
            log.info("slices tell of no switch until it is heard: %s", error)
        else:
            self._node.leaves.set({**leaves, **self._node.leaves.value})

    def _connected(self) -> ApiServer | None:
        """Open the API server; None without one. Claims in the books can be unprepared all the same."""
        self._no_api = ""
        try:
            if self._open_api is not None:
                return self._open_api()
        except ConfigError as error:
            self._no_api = f"no claim is prepared until the agent starts again: {error}"
        else:
            self._no_api = "no claim is prepared: the agent was started without an API server"
        return None

    def _opened(self, opened: Future[ApiServer | None]) -> ApiServer:
        """Wait for the API server to be open, on a thread of the caller's own."""
        try:
            api = opened.result(OPEN_SECONDS)
        except TimeoutError as error:
            raise Unavailable(f"the API server could not be opened for {OPEN_SECONDS:g} s") from error
        if api is None:
            raise Unavailable(self._no_api)
        return api

    def _made(self, name: str, opened: Future[ApiServer | None], published: Published) -> tuple[Door, Offering]:
        from agent.cluster.claim_objects import ClaimObjects
        from deviceplugin.dra.offering import Offering
        from deviceplugin.dra.planner import Planner
        from deviceplugin.dra.pods import Allocations, GpuAsker
        from deviceplugin.dra.preparer import ClaimFiles, DeviceUsers, Preparer
        from deviceplugin.dra.registration import Door, Driver
        from deviceplugin.dra.services import ClaimService

        node, report = self._node, self._report
        objects = ClaimObjects(partial(self._opened, opened), node.name)
        offering = Offering(node.config, node.offer, published.dropped, node.name, node.leaves)
        catalog, gpus = offering.catalog, GpuAsker(node.kubelet, objects)
        preparer = Preparer(
            Allocations(node.kubelet, objects, name, node.name),
            Planner(node.config, node.offer, catalog, node.ledger, gpus, objects),
            node.ledger,
            ClaimFiles(node.specs, node.config, catalog, offering.facts),
            DeviceUsers(node.ledger, objects, node.kubelet, node.attachments),
        )
        calls = ClaimService(name, preparer, report.metrics.observe, report.claim_failed)
        return Door(Driver(name, node.name, node.config.value.kubelet_dir), calls, catalog), offering


def _healths(devices: Sequence[DraDevice]) -> tuple[tuple[str, str, int], ...]:
    counts = Tally((d.resource_name, "healthy" if d.health.healthy else str(d.health.reason)) for d in devices)
    return tuple((resource, health, count) for (resource, health), count in sorted(counts.items()))
