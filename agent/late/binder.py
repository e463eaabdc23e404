"""Binds slots: asks kubelet what a pod has, chooses devices, and writes books and CDI specs.

A binding belongs to one sandbox. The next one of the pod, or the next pod that kubelet gives the slot to, makes
another in its place; so a DEL that comes late, or once more, finds nothing that is its own.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from agent.cdi import SlotSpecs
from agent.clients.kubelet import PodDevices
from agent.config import Resource
from agent.errors import DeviceBusy, Unavailable, UnitUnhealthy, UnknownUnit
from agent.late import checkpoint, edits
from agent.late.bound import BoundSlots
from agent.late.choice import Choice, choose
from agent.late.edits import Given
from agent.late.wishes import Held, Wish, wishes
from agent.ledger import Ledger
from agent.model.allocation import Binding, PodRef
from agent.model.device import Snapshot
from agent.model.slots import is_slot_id, is_slot_of
from agent.placement import Terrain
from cni.call import Call, GrantedDevice
from cni.ruled import ruler
from deviceplugin.unit import Unit

BUSY_SECONDS = 5.0
"""How long ADD waits for devices on their way back."""
POLL_SECONDS = 0.05

log = logging.getLogger(__name__)


class Stock(Protocol):
    """What the device plugins offer at the moment: `deviceplugin.allocation.Offer` is one."""

    @property
    def snapshot(self) -> Snapshot:
        """The scan that it comes from."""

    @property
    def pools(self) -> Mapping[str, Sequence[Unit]]:
        """Late-bound resource → a unit for each device that may be chosen."""

    @property
    def terrain(self) -> Terrain:
        """How near everything is."""

    def find(self, resource_name: str, unit_id: str) -> Unit | None:
        """Find a unit of a resource."""


class Binder(BoundSlots):
    """Chooses devices for slots. Methods block and may run on many threads at once."""

    def __init__(
        self,
        kubelet_dir: Path,
        ledger: Ledger,
        specs: SlotSpecs,
        *,
        resources: Callable[[], Sequence[Resource]],
        stock: Callable[[], Stock],
        ask_kubelet: Callable[[PodRef], PodDevices | None],
        network_of: Callable[[str], Mapping[str, Any] | None],
        is_settled: Callable[[], bool],
        busy_seconds: float = BUSY_SECONDS,
    ) -> None:
        """`resources` are all of the configuration, `stock` what is offered of them at the moment.

        `is_settled` tells whether the grants agree with kubelet; `ask_kubelet` raises Unavailable.
        """
        super().__init__(kubelet_dir, ledger, specs, resources)
        self._stock = stock
        self._ask_kubelet = ask_kubelet
        self._network_of = network_of
        self._is_settled = is_settled
        self._busy_seconds = busy_seconds
        self._had_slots = any(is_slot_id(grant.unit_id) for grant in ledger.grants())
        """Whether a pod may have slots of a resource that the configuration does not bind late any more."""

    def bind(self, call: Call, wanted: Callable[[], bool]) -> Sequence[GrantedDevice]:
        """Choose a device for each slot of the call's pod, once for each sandbox, and list them.

        Raises UnknownUnit if the configuration does not bind the resource of one of them late any more.
        """
        bound = self._bound_before(call)
        if not bound:
            resources = self._resources()
            late = _late_of(resources)
            containers = self._containers(call.pod, late)
            _refuse_strangers(containers, late)
            terrain = self._stock().terrain
            own_gpus = {resource.name for resource in resources if resource.kind in ("gpu", "rail")}
            asked = wishes(containers, late, terrain.gpu, terrain.gpus, own_gpus)
            if not asked:
                return ()
            bound = self._bind(call, asked, containers, wanted)
        return tuple(
            GrantedDevice(b.device, b.resource_name, self._network_of(b.resource_name), b.unit_id) for b in bound
        )

    def forget(self, slots: Collection[str]) -> None:
        """Let go of what some slots were bound to: kubelet gives them to another pod. Not even a stray spec stays."""
        self._had_slots = True
        super().forget(slots)

    # ------------------------------------------------------------------ binding

    def _bound_before(self, call: Call) -> tuple[Binding, ...]:
        """List what an earlier call for this sandbox has bound; the slot that this call is about becomes its own."""
        own = [b for b in self._of(call) if b.unit_id == call.conf.device and not b.cni_ifname]
        if own:
            with self._guard:
                self._ledger.bind_slots([replace(b, cni_ifname=call.ifname) for b in own])
        return self._of(call)

    def _of(self, call: Call) -> tuple[Binding, ...]:
        return tuple(b for b in self._ledger.bindings() if b.container_id == call.container_id)

    def _containers(self, pod: PodRef, late: Collection[str]) -> tuple[Held, ...]:
        """Ask what a pod's containers have. kubelet is not asked where books and checkpoint tell of no slots."""
        if not (late or self._had_slots) or not pod.name:
            return ()
        # The grant of what only an init container has may have ended: nobody tells the reconciler whose it is.
        noted = checkpoint.containers_of(self._kubelet_dir, pod.uid) if pod.uid else ()
        if not self._ledger.granted_slots() and not _slots_of(noted) and (not late or self._is_settled()):
            return ()
        found = self._ask_kubelet(pod)
        containers = _listed(found) if found is not None else ()
        return containers + self._init_containers(pod, containers, noted)

    def _init_containers(self, pod: PodRef, known: Sequence[Held], noted: Sequence[Held]) -> tuple[Held, ...]:
        """List the containers that PodResources does not tell of, if they have slots that nobody has else."""
        names = {held.container for held in known}
        others = {b.unit_id for b in self._ledger.bindings() if b.pod.uid not in ("", pod.uid)}
        had = _slots_of(known) | others
        return tuple(held for held in noted if held.container not in names and _slots_of([held]) - had)

    def _bind(
        self, call: Call, asked: Sequence[Wish], containers: Sequence[Held], wanted: Callable[[], bool]
    ) -> tuple[Binding, ...]:
        deadline = time.monotonic() + self._busy_seconds
        while True:
            with self._guard:
                shortage = self._try(call, asked, containers)
                if shortage is None:
                    return self._of(call)
            if time.monotonic() > deadline or not wanted():
                raise DeviceBusy(shortage)
            time.sleep(POLL_SECONDS)  # without the lock: a DEL that lets a device go needs it

    def _try(self, call: Call, asked: Sequence[Wish], containers: Sequence[Held]) -> str | None:
        """Choose and bind, or tell what there is too little of. The caller holds the guard."""
        resources, stock = self._resources(), self._stock()  # once: both may be others at the next look
        late = _late_of(resources)
        _refuse_strangers(containers, late)
        mine = {slot for wish in asked for slot in wish.slots}
        chosen: list[Choice] = []
        for name in dict.fromkeys(wish.resource_name for wish in asked):
            here = [wish for wish in asked if wish.resource_name == name]
            pool = stock.pools.get(name, ())
            free = [
                unit
                for unit in self._free(pool, mine)
                if ruler(self._ledger, stock.snapshot, unit.device, call.container_id) is None  # ADD would refuse it
            ]
            found = choose(stock.terrain, here, free, self._load(stock.terrain))
            if found is None:
                count = sum(len(wish.slots) for wish in here)
                return self._shortage(name, count, free, pool)
            chosen += found
        units = {unit.device: unit for choice in chosen for unit in stock.pools[choice.wish.resource_name]}
        try:
            given = edits.of_pod(chosen, containers, resources, units, stock.snapshot, stock.find)
        except UnitUnhealthy as error:
            raise DeviceBusy(str(error)) from error
        self._write(call, given, late)
        return None

    def _free(self, pool: Sequence[Unit], slots: Collection[str]) -> list[Unit]:
        """List the healthy devices that nobody has. What these slots were bound to before does not count as had."""
        bound = {b.device for b in self._ledger.bindings() if b.unit_id not in slots}
        return [
            unit
            for unit in pool
            if unit.health.healthy
            and unit.device not in bound
            and self._ledger.attachment_on(unit.device) is None
            and not self._granted_early(unit.device)
        ]

    def _granted_early(self, device: str) -> bool:
        """Tell whether a pod has the device under its own name, from before its resource was bound late."""
        return any(not is_slot_id(unit) for unit in self._ledger.granted_units(device))

    def _load(self, terrain: Terrain) -> Mapping[str, int]:
        devices = {row.device for row in self._ledger.attachments()} | {b.device for b in self._ledger.bindings()}
        return Counter(terrain.port(device) for device in devices)

    def _shortage(self, name: str, count: int, free: Sequence[Unit], pool: Sequence[Unit]) -> str:
        if not pool:
            return f"no device of {name} is known yet, or any more"
        sick = Counter(unit.health.reason for unit in pool if not unit.health.healthy)
        reasons = "".join(f", {n} {reason}" for reason, n in sorted(sick.items()))
        used = len(pool) - len(free) - sick.total()
        return f"{count} devices of {name} are wanted and {len(free)} are free: of {len(pool)}, {used} in use{reasons}"

    def _write(self, call: Call, given: Sequence[Given], late: Mapping[str, Resource]) -> None:
        """Write books and specs, in this order."""
        made = [
            Binding(
                unit_id=each.slot,
                resource_name=each.wish.resource_name,
                kind=late[each.wish.resource_name].kind,
                device=each.device,
                container=each.wish.container,
                container_id=call.container_id,
                # What a call of Multus's is not about gets its name from the call that is.
                cni_ifname=call.ifname if call.conf.device in (None, each.slot) else "",
                pod=call.pod,
                edits=each.edits,
            )
            for each in given
        ]
        bound = self._ledger.bind_slots(made)
        try:
            for binding in bound:
                self._specs.write(binding.kind, binding.unit_id, binding.edits)
        except Unavailable:
            self._let_go(bound)
            raise
        for b in bound:
            log.info("%s is bound to %s for container %s of pod %s", b.unit_id, b.device, b.container, b.pod)


def _late_of(resources: Sequence[Resource]) -> Mapping[str, Resource]:
    return {resource.name: resource for resource in resources if resource.binding == "late"}


def _refuse_strangers(containers: Sequence[Held], late: Collection[str]) -> None:
    """Raise UnknownUnit for a slot of a resource that is not bound late: its container could not be created."""
    for held in containers:
        for name, units in held.units.items():
            if name not in late and any(is_slot_of(name, unit) for unit in units):
                raise UnknownUnit(
                    f"container {held.container} has slots of {name}, and the configuration has no resource of this"
                    " name with `binding: late` any more, so no device can be chosen: put the resource back, or"
                    " recreate the pod"
                )


def _slots_of(containers: Sequence[Held]) -> frozenset[str]:
    return frozenset(u for held in containers for units in held.units.values() for u in units if is_slot_id(u))


def _listed(found: PodDevices) -> tuple[Held, ...]:
    return tuple(
        Held(c.name, {name: c.device_ids(name) for name in dict.fromkeys(d.resource_name for d in c.devices)})
        for c in found.containers
    )
