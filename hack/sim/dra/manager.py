"""The DRA manager: claims of a pod prepared before its sandbox is made, and unprepared after it is gone.

Nothing of a claim is remembered before all of a pod's claims have been looked at; then it is on disk before a driver is
asked. Drivers are asked one after the other in any order, each for all claims that are not prepared; the first error
ends it, and all of them are asked again at the next try. Source of the order and of the errors' texts: Kubernetes 1.36,
pkg/kubelet/cm/dra/manager.go.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hack.sim.dra.behaviour import Behaviour
from hack.sim.dra.claims import CHECKPOINT, ClaimCache, ClaimInfo, ClaimUnfit, Device, info_of
from hack.sim.dra.cluster import Cluster, ClusterFailed
from hack.sim.dra.drivers import CallFailed, Client, DraCall, Drivers
from hack.sim.dra.health import HealthCache
from hack.sim.dra.watcher import Watcher
from hack.sim.pods import Container, PodSpec
from proto.dra.v1 import api_pb2
from proto.drahealth.v1alpha1 import api_pb2 as health_pb2

WIPE_AFTER = (0.001, 0.05)
"""Seconds from the first registration to the end of all slices at kubelet's start."""
LATEST_WIPE_LOOKS = 2
"""With nobody registered, it comes after so many looks into the folder."""

log = logging.getLogger(__name__)


class DraFailed(Exception):
    """A pod's claims are not prepared, or not unprepared; it is tried again."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What kubelet shows of one device of a container's claim in the pod's status."""

    resource: str
    """claim:NAME or claim:NAME/REQUEST"""
    resource_id: str
    """The device's first CDI ID."""
    health: str
    message: str


class DraManager:
    """The manager of one kubelet process. `start`, then `close`; the file and the drivers outlive it."""

    def __init__(
        self,
        folder: Path,
        cluster: Cluster,
        rng: random.Random,
        behaviour: Behaviour,
        active: Callable[[], set[str]],
        changed: Callable[[set[str]], None],
    ) -> None:
        """`active` lists the UIDs of kubelet's pods; `changed` hears of pods whose devices' health has changed."""
        self.registry = folder / "plugins_registry"
        for path in (self.registry, folder / "plugins"):
            path.mkdir(mode=0o750, parents=True, exist_ok=True)
        self.calls: list[DraCall] = []
        """What was asked of drivers, and `wipe`, oldest first."""
        self.claims = ClaimCache(folder / CHECKPOINT)
        self.health = HealthCache()
        self.drivers = Drivers(behaviour, self._wipe, self._hear, self.calls.append)
        self._watcher = Watcher(self.registry, self.drivers, behaviour.look, self._notified)
        self._cluster = cluster
        self._rng = rng
        self._behaviour = behaviour
        self._active = active
        self._changed = changed
        self._registered = asyncio.Event()
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    async def start(self) -> None:
        """Look for drivers, wipe all slices of the node, and mind what pods have left."""
        loop = asyncio.get_running_loop()
        self._tasks = (
            loop.create_task(self._watcher.run(), name="plugin watcher"),
            loop.create_task(self._wipe_at_start(), name="wipe of all slices"),
            loop.create_task(self._reconcile(), name="claims of pods that are gone"),
        )

    async def close(self) -> None:
        """Die as kubelet dies: calls end, the file stays."""
        for task in self._tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
        await self.drivers.close()

    # ------------------------------------------------------------------- claims

    async def prepare(self, pod_uid: str, spec: PodSpec) -> None:
        """Have all claims of a pod prepared. Raises DraFailed."""
        wanted = []
        for name, must_own in claims_of(spec):
            info = await self._read(pod_uid, spec.namespace, name, must_own)
            wanted.append((info, {driver: self._client(driver) for driver in info.drivers}))
        batches: dict[str, tuple[Client, list[ClaimInfo]]] = {}
        for fresh, clients in wanted:
            info = self._taken_up(fresh)
            info.pods.add(pod_uid)
            self.claims.save()
            if not info.prepared:
                for driver in info.drivers:
                    client = clients.get(driver) or self._client(driver)
                    batches.setdefault(driver, (client, []))[1].append(info)
        for driver in self._rng.sample(list(batches), len(batches)):
            client, claims = batches[driver]
            try:
                self._take(driver, claims, await client.prepare(claims))
            except CallFailed as error:
                raise DraFailed(str(error)) from error
        for _, claims in batches.values():
            for info in claims:
                info.prepared = True
        self.claims.save()

    async def unprepare(self, pod_uid: str) -> None:
        """Have the claims unprepared that only this pod uses. Raises DraFailed."""
        await self._unprepare(pod_uid, [info.key for info in self.claims.of_pod(pod_uid)])

    async def _unprepare(self, pod_uid: str, names: Iterable[tuple[str, str]]) -> None:
        batches: dict[str, list[ClaimInfo]] = {}
        ending = []
        for namespace, name in names:
            info = self.claims.get(namespace, name)
            if info is None:
                continue
            if len(info.pods) > 1:
                info.pods.discard(pod_uid)
                continue
            ending.append(info)
            for driver in info.drivers:
                batches.setdefault(driver, []).append(info)
        for driver in self._rng.sample(list(batches), len(batches)):
            claims = batches[driver]
            try:
                answer = await self._client(driver).unprepare(claims)
            except CallFailed as error:
                raise DraFailed(str(error)) from error
            _check("NodeUnprepareResources", claims, {uid: a.error for uid, a in answer.claims.items()})
        for info in ending:
            self.claims.remove(info)
        self.claims.save()

    async def _read(self, pod_uid: str, namespace: str, name: str, must_own: bool) -> ClaimInfo:
        try:
            document = await asyncio.to_thread(self._cluster.claim, namespace, name)
        except ClusterFailed as error:
            raise DraFailed(f"fetch ResourceClaim {name}: {error}") from error
        if document is None:
            raise DraFailed(f'fetch ResourceClaim {name}: resourceclaims.resource.k8s.io "{name}" not found')
        try:
            return info_of(document, pod_uid, must_own)
        except ClaimUnfit as error:
            raise DraFailed(str(error)) from error

    def _client(self, driver: str) -> Client:
        client = self.drivers.get(driver)
        if client is None:
            raise DraFailed(f"DRA driver {driver} is not registered")
        return client

    def _taken_up(self, fresh: ClaimInfo) -> ClaimInfo:
        known = self.claims.get(*fresh.key)
        if known is None:
            self.claims.add(fresh)
            return fresh
        if known.uid != fresh.uid:
            raise DraFailed(
                f"old ResourceClaim with same name {fresh.name} and different UID {known.uid} still exists "
                "(previous pod force-deleted?!)"
            )
        return known

    def _take(self, driver: str, claims: list[ClaimInfo], answer: api_pb2.NodePrepareResourcesResponse) -> None:
        """Note what a driver said of its devices, up to the first error: once more of those that are known."""
        by_uid = {info.uid: info for info in claims}
        for uid, result in answer.claims.items():
            _check("NodePrepareResources", claims, {uid: result.error}, whole=False)
            known = by_uid[uid].drivers.setdefault(driver, [])
            for device in result.devices:
                known.append(
                    Device(
                        device.pool_name,
                        device.device_name,
                        tuple(device.request_names),
                        tuple(device.cdi_device_ids),
                        device.share_id,
                    )
                )
        _check("NodePrepareResources", claims, dict.fromkeys(answer.claims, ""))

    async def _reconcile(self) -> None:
        while True:
            await asyncio.sleep(self._behaviour.reconcile)
            active = self._active()
            gone: dict[str, list[tuple[str, str]]] = {}
            for info in self.claims:
                for pod_uid in info.pods - active:
                    gone.setdefault(pod_uid, []).append(info.key)
            for pod_uid, names in gone.items():
                try:
                    await self._unprepare(pod_uid, names)
                except DraFailed as error:
                    log.info("claims of the pod %s, which is gone: %s; trying again", pod_uid, error)

    # ------------------------------------------------------------ what others see

    def cdi_ids(self, spec: PodSpec, container: Container) -> list[str]:
        """List the CDI names that a container gets, as they go to the runtime."""
        return [
            i for info, request in self._used_by(spec, container) for _, d in info.devices(request) for i in d.cdi_ids
        ]

    def infos(self, spec: PodSpec, container: Container) -> list[ClaimInfo]:
        """List the claims whose devices kubelet tells of a container to PodResources clients."""
        found: dict[tuple[str, str], ClaimInfo] = {}
        for info, _ in self._used_by(spec, container):
            found[info.key] = info
        return list(found.values())

    def standings(self, spec: PodSpec, container: Container) -> list[Standing]:
        """Tell the health of a container's devices. Claims for extended resources are not shown."""
        shown: dict[tuple[str, str], Standing] = {}
        names = {claim.name: claim.claim_name for claim in spec.claims}
        for used in container.claims:
            info = self.claims.get(spec.namespace, names.get(used.name, ""))
            if info is None:
                continue
            resource = f"claim:{used.name}" + (f"/{used.request}" if used.request else "")
            for driver, device in info.devices(used.request):
                heard = self.health.read(driver, device.pool, device.name)
                first = device.cdi_ids[0] if device.cdi_ids else f"{driver}/{device.pool}/{device.name}"
                shown.setdefault((resource, first), Standing(resource, first, heard.health, heard.message))
        return list(shown.values())

    def _used_by(self, spec: PodSpec, container: Container) -> Iterator[tuple[ClaimInfo, str]]:
        """Go through (claim, request) of a container; an empty request is all of the claim."""
        names = {claim.name: claim.claim_name for claim in spec.claims}
        wanted = [(names.get(used.name, ""), used.request) for used in container.claims]
        if spec.extended is not None:
            asked = {resource for resource, _ in container.limits}
            wanted += [
                (spec.extended.claim_name, mapping.request)
                for mapping in spec.extended.requests
                if mapping.container == container.name and mapping.resource in asked
            ]
        for name, request in wanted:
            info = self.claims.get(spec.namespace, name)
            if info is not None:
                yield info, request

    def _hear(self, driver: str, devices: Iterable[health_pb2.DeviceHealth] | None) -> None:
        if devices is None:
            self.health.clear(driver)
            return
        changed = self.health.update(driver, devices)
        pods: set[str] = set()
        for info in self.claims:
            if any((device.pool, device.name) in changed for device in info.drivers.get(driver, ())):
                pods |= info.pods
        if pods:
            self._changed(pods)

    # ------------------------------------------------------------------- slices

    def _notified(self, _driver: str) -> None:
        self._registered.set()

    async def _wipe_at_start(self) -> None:
        """Wipe all slices of the node, a moment after the first driver may have written its own."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._behaviour.look * LATEST_WIPE_LOOKS):
                await self._registered.wait()
        await asyncio.sleep(self._rng.uniform(*WIPE_AFTER))
        await self._wipe("")

    async def _wipe(self, driver: str) -> None:
        """Delete slices until it has worked."""
        pause = 1.0
        while True:
            try:
                await asyncio.to_thread(self._cluster.wipe, driver)
            except ClusterFailed as error:
                log.info("deleting ResourceSlices failed: %s", error)
                await asyncio.sleep(pause)
                pause = min(pause * 2, 300.0)
                continue
            self.calls.append(DraCall("wipe", driver))
            return


def claims_of(spec: PodSpec) -> Iterator[tuple[str, bool]]:
    """Go through (claim's name, whether the pod must own it): its claims, then the one for extended resources."""
    for claim in spec.claims:
        if claim.claim_name:
            yield claim.claim_name, claim.from_template
    if spec.extended is not None:
        yield spec.extended.claim_name, False


def _check(call: str, claims: list[ClaimInfo], errors: dict[str, Any], whole: bool = True) -> None:
    """Raise DraFailed for an error, a claim that was not asked for, or (`whole`) one without an answer."""
    names = {info.uid: info.name for info in claims}
    for uid, error in errors.items():
        if uid not in names:
            raise DraFailed(f"{call} returned result for unknown claim UID {uid}")
        if error:
            raise DraFailed(f"{call} failed for ResourceClaim {names[uid]}: {error}")
    if whole and len(errors) < len(claims):
        raise DraFailed(f"{call} skipped {len(claims) - len(errors)} ResourceClaims")
