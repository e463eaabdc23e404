"""Binds slots: asks kubelet what a pod has, chooses devices, and writes books and CDI specs.

A slot is bound for one sandbox. The next one of the pod, or the next pod that kubelet gives the slot to, binds it anew;
so a DEL that comes late, or once more, finds nothing that is its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from agent.config import Config, Resource
from agent.config.networks import Network
from agent.edits.build import edits_by_device, pcidevice_name, variables_of_container
from agent.edits.specs import Specs
from agent.errors import DeviceBusy, UnitUnhealthy, UnknownUnit
from agent.kubelet import checkpoint
from agent.kubelet.checkpoint import Held
from agent.kubelet.podresources import PodDevices
from agent.ledger import Ledger
from agent.model.allocation import Hold, PodRef, Spec
from agent.model.unit_id import UnitId
from agent.offer.offer import Offer, Unit
from agent.placement import Distances, for_pairs
from agent.state import Latest
from cni.call import Call, GrantedDevice, pf_in_pod
from cni.pod_devices import HeldDevices
from cni.slots.choice import Choice, Wish, choose, wishes

BUSY_SECONDS = 5.0
"""How long ADD waits for devices on their way back."""
POLL_SECONDS = 0.05

log = logging.getLogger(__name__)


class Binder:
    """Chooses devices for slots. Methods block and may run on many threads at once."""

    def __init__(
        self,
        config: Latest[Config],
        ledger: Ledger,
        specs: Specs,
        offer: Latest[Offer],
        held: HeldDevices,
        busy_seconds: float = BUSY_SECONDS,
    ) -> None:
        """`busy_seconds` is how long a pod waits for devices on their way back."""
        self._config = config
        self._ledger = ledger
        self.specs = specs
        self._offer = offer
        self._held = held
        self._busy_seconds = busy_seconds
        self._choosing = threading.Lock()
        """Held from the look at what is free until that is bound."""

    def bind(self, call: Call, wanted: Callable[[], bool]) -> Sequence[GrantedDevice]:
        """Choose a device for each slot of the call's pod, once for each sandbox, and list them.

        Waits a bounded time for devices on their way back, as long as `wanted` says that it is worth it. Raises
        DeviceBusy if there are too few, Unavailable if kubelet does not answer, and UnknownUnit if the configuration
        does not bind the resource of one of them late any more.
        """
        config = self._config.value
        bound = self._bound_before(call)
        if not bound:
            resources, late = config.resources, config.late
            containers = self._containers(call.pod, late)
            if not containers:
                return ()
            _refuse_strangers(containers, late)
            distances = self._offer.value.distances
            own_gpus = {resource.name for resource in resources if resource.kind in ("gpu", "rail")}
            own_nics = {resource.name for resource in resources} - own_gpus
            asked = wishes(containers, late, distances, own_gpus, own_nics)
            if not asked:
                return ()
            bound = self._bind(call, asked, containers, wanted)
        return tuple(_granted(b, config.joined.get(b.resource_name)) for b in bound)

    def unbind(self, container_id: str, ifname: str) -> None:
        """Let go of what was chosen for a sandbox in calls for this interface, and of what no call has used."""
        if mine := self._ledger.bound_slots(container_id):
            self.specs.let_go(slot for slot in mine if slot.cni_ifname in ("", ifname))

    # ------------------------------------------------------------------ binding

    def _bound_before(self, call: Call) -> tuple[Hold, ...]:
        """List what an earlier call for this sandbox has bound; the slot that this call is about becomes its own."""
        slots = self._of(call)
        own = [slot for slot in slots if slot.key == call.conf.device and not slot.cni_ifname]
        if not own:
            return slots
        with self._choosing:
            self.specs.bind([replace(slot, cni_ifname=call.ifname, bound_at=0.0) for slot in own])
        return self._of(call)

    def _of(self, call: Call) -> tuple[Hold, ...]:
        return self._ledger.bound_slots(call.container_id)

    def _containers(self, pod: PodRef, late: Collection[str]) -> tuple[Held, ...]:
        """Ask what a pod's containers have. kubelet is not asked where books and checkpoint tell of no slots."""
        if not pod.name:
            return ()
        # The grant of what only an init container has may have ended: nobody tells the reconciler whose it is.
        noted = checkpoint.containers_of(self._config.value.kubelet_dir, pod.uid) if pod.uid else ()
        is_granted = any(hold.is_slot for hold in self._ledger.holds())
        if not is_granted and not _slots_of(noted) and (not late or self._held.is_settled):
            return ()
        found = self._held.pod_devices(pod)
        containers = _listed(found, {held.container: held.answers for held in noted}) if found is not None else ()
        return containers + self._init_containers(pod, containers, noted)

    def _init_containers(self, pod: PodRef, known: Sequence[Held], noted: Sequence[Held]) -> tuple[Held, ...]:
        """List the containers that PodResources does not tell of, if they have slots that nobody has else."""
        names = {held.container for held in known}
        bound = self._ledger.bound_slots()
        others = {slot.key for slot in bound if slot.pod is not None and slot.pod.uid not in ("", pod.uid)}
        had = _slots_of(known) | others
        return tuple(held for held in noted if held.container not in names and _slots_of([held]) - had)

    def _bind(
        self, call: Call, asked: Sequence[Wish], containers: Sequence[Held], wanted: Callable[[], bool]
    ) -> tuple[Hold, ...]:
        deadline = time.monotonic() + self._busy_seconds
        while True:
            with self._choosing:
                shortage = self._try(call, asked, containers)
                if shortage is None:
                    return self._of(call)
            if time.monotonic() > deadline or not wanted():
                raise DeviceBusy(shortage)
            time.sleep(POLL_SECONDS)  # without the lock: a DEL that lets a device go needs it

    def _try(self, call: Call, asked: Sequence[Wish], containers: Sequence[Held]) -> str | None:
        """Choose and bind, or tell what there is too little of. The caller holds the lock."""
        config, offer = self._config.value, self._offer.value  # once: both may be others at the next look
        late = config.late
        _refuse_strangers(containers, late)
        mine = {slot for wish in asked for slot in wish.slots}
        chosen: list[Choice] = []
        for name in dict.fromkeys(wish.resource_name for wish in asked):
            here = [wish for wish in asked if wish.resource_name == name]
            pool = offer.pools.get(name, ())
            free = [
                unit
                for unit in self._free(pool, mine)
                if pf_in_pod(self._ledger, offer.snapshot, unit.device, call.container_id)
                is None  # ADD would refuse it
            ]
            count, fit = sum(len(wish.slots) for wish in here), free
            if late[name].bonded:
                kept = for_pairs(offer.distances, [unit.device for unit in free], count)
                fit = [unit for unit in free if unit.device in kept]
            found = choose(offer.distances, here, fit, self._load(offer.distances), spread=late[name].spread)
            if found is None:
                lacking = self._shortage(name, count, free, pool)
                return f"{lacking}; a bond joins two of different PFs" if late[name].bonded else lacking
            chosen += found
        try:
            made = list(_holds(call, chosen, containers, config, offer))
        except UnitUnhealthy as error:
            raise DeviceBusy(str(error)) from error
        for slot in self.specs.bind(made):
            log.info("%s is bound to %s for container %s of pod %s", slot.key, slot.device, slot.container, slot.pod)
        return None

    def _free(self, pool: Sequence[Unit], slots: Collection[str]) -> list[Unit]:
        """List the healthy devices that nobody has. What these slots were bound to before does not count as had."""
        return [
            unit
            for unit in pool
            if unit.health.healthy
            and self._ledger.attachment_on(unit.device) is None
            and all(hold.key in slots or hold.is_share for hold in self._ledger.holds_on(unit.device))
        ]

    def _load(self, distances: Distances) -> Mapping[str, int]:
        attached = (row.device for row in self._ledger.attachments())
        devices = {*attached, *(slot.device for slot in self._ledger.bound_slots())}
        return Counter(distances.port(device) for device in devices)

    def _shortage(self, name: str, count: int, free: Sequence[Unit], pool: Sequence[Unit]) -> str:
        if not pool:
            return f"no device of {name} is known yet, or any more"
        sick = Counter(unit.health.reason for unit in pool if not unit.health.healthy)
        reasons = "".join(f", {n} {reason}" for reason, n in sorted(sick.items()))
        used = len(pool) - len(free) - sick.total()
        return f"{count} devices of {name} are wanted and {len(free)} are free: of {len(pool)}, {used} in use{reasons}"


def _holds(
    call: Call, chosen: Sequence[Choice], containers: Sequence[Held], config: Config, offer: Offer
) -> Iterator[Hold]:
    """Say what each slot of a pod is bound to, and brings. Raises UnitUnhealthy for a device that lacks something."""
    units = {unit.device: unit for choice in chosen for unit in offer.pools[choice.wish.resource_name]}
    for choice in chosen:
        wish, resource = choice.wish, config.by_name[choice.wish.resource_name]
        held = [
            (config.by_name[other.wish.resource_name], [units[device] for device in other.devices])
            for other in chosen
            if other.wish.container == wish.container
        ]
        variables = variables_of_container([*held, *_early(wish.container, containers, config, offer)], offer.snapshot)
        if (
            resource.kind == "hca"
        ):  # which of several is whose must be told, also to who finds the spec without the books
            variables = ((pcidevice_name(resource.name), ",".join(choice.devices)), *variables)
        edits = edits_by_device(resource, [units[device] for device in choice.devices], offer.snapshot, variables)
        for slot, device in choice.pairs:
            yield Hold(
                slot,
                resource.name,
                (device,),
                pod=call.pod,
                spec=Spec(resource.kind, edits[device]),
                kind=resource.kind,
                container=wish.container,
                container_id=call.container_id,
                # What a call of Multus's is not about gets its name from the call that is.
                cni_ifname=call.ifname if call.conf.device in (None, slot) else "",
            )


def _early(
    container: str, containers: Sequence[Held], config: Config, offer: Offer
) -> Iterator[tuple[Resource, list[Unit]]]:
    """List what a container has of early-bound resources with helper variables: they name these devices, too."""
    ids = next((held.units for held in containers if held.container == container), {})
    for resource in config.resources:
        if resource.binding == "early" and resource.environment:
            units = (offer.find(resource.name, unit_id) for unit_id in ids.get(resource.name, ()))
            yield resource, [unit for unit in units if unit is not None]


def _granted(slot: Hold, network: Network | None) -> GrantedDevice:
    files_only = slot.kind == "hca" and network is None
    return GrantedDevice(slot.device, slot.resource_name, network, slot.key, files_only=files_only)


def _refuse_strangers(containers: Sequence[Held], late: Collection[str]) -> None:
    """Raise UnknownUnit for a slot of a resource that is not bound late: its container could not be created."""
    for held in containers:
        for name, units in held.units.items():
            if name not in late and any(UnitId.parse(unit).is_slot_of(name) for unit in units):
                raise UnknownUnit(
                    f"container {held.container} has slots of {name}, and the configuration has no resource of this"
                    " name with `binding: late` any more, so no device can be chosen: put the resource back, or"
                    " recreate the pod"
                )


def _slots_of(containers: Sequence[Held]) -> frozenset[str]:
    return frozenset(
        u for held in containers for units in held.units.values() for u in units if UnitId.parse(u).is_slot
    )


def _listed(found: PodDevices, answers: Mapping[str, Mapping[str, str]]) -> tuple[Held, ...]:
    return tuple(
        Held(
            c.name,
            {name: c.device_ids(name) for name in dict.fromkeys(d.resource_name for d in c.devices)},
            c.numa_nodes,
            answers.get(c.name, {}),
        )
        for c in found.containers
    )
