"""The reconciler itself: looks, lets the pure modules decide, acts, logs and counts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from agent.clients.cri import Sandbox
from agent.errors import AgentError, LedgerError, Unavailable
from agent.ledger import Ledger
from agent.model.allocation import Attachment, PodRef
from agent.model.device import Snapshot
from agent.model.known import KnownDevice, moved
from agent.reconcile import vfs
from agent.reconcile.backoff import Backoff
from agent.reconcile.ended import EndedPods
from agent.reconcile.grants import Claim
from agent.reconcile.settling import Count, GrantSettling
from agent.reconcile.slots import Known, Slots, is_over
from cni.attachment import Attachments

PROBE_SECONDS = 30.0
"""Runs may follow each other quickly, and pods write into the same books."""
SEARCH = "search"
"""Name of the search among what is left alone for a while. No device is called so."""
PAUSE_SECONDS = 0.5
REPAIR_SECONDS = 5.0
"""How soon it is looked again whether books that could not be written can be, and who did not answer does."""
UNSETTLED_SECONDS = 1.0
"""How soon kubelet's word is compared again if it could not be: at the start the device lists may come later."""

log = logging.getLogger(__name__)


def _nothing_scanned() -> Snapshot:
    return Snapshot()


def _nothing_ours() -> Collection[str]:
    return ()


def _no_complaint(what: str | None) -> None:
    return None


async def _at_once() -> None:
    return None


def _nobody_waits() -> None:
    return None


class Reconciler:
    """Heals attachments, VFs without one, quarantine, leases and grants."""

    def __init__(
        self,
        ledger: Ledger,
        attachments: Attachments,
        *,
        claims: Callable[[], Awaitable[Sequence[Claim]]],
        devices_of_units: Callable[[], Mapping[str, str] | None],
        replay_spool: Callable[[], int],
        count: Count,
        snapshot: Callable[[], Snapshot] = _nothing_scanned,
        ours: Callable[[], Collection[str]] = _nothing_ours,
        pods: Callable[[], frozenset[tuple[str, str]]] = frozenset,
        sandboxes: Callable[[], Awaitable[Sequence[Sandbox]]] | None = None,
        complain: Callable[[str | None], None] = _no_complaint,
        slots: Slots | None = None,
        tell_settled: Callable[[], None] = _nobody_waits,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Join the parts.

        `claims` asks kubelet's PodResources; `devices_of_units` maps the offered unit IDs to devices,
        and gives None before the first offer; `ours` lists the devices that resources offer; `pods` names all pods
        (namespace and name) of kubelet's last answer, whatever they hold; `sandboxes`
        asks the container runtime, where it can be asked; `complain` tells what is wrong with the books,
        or None when nothing is; `slots` binds devices late; `tell_settled` is called once `settled` is true.
        """
        self._ledger = ledger
        self._attachments = attachments
        self._ask_kubelet = claims
        self._devices_of_units = devices_of_units
        self._replay_spool = replay_spool
        self._count = count
        self._snapshot = snapshot
        self._ours = ours
        self._pods = pods
        self._ask_runtime = sandboxes
        self._complain = complain
        self._slots = slots
        self._tell_settled = tell_settled
        self._clock = clock
        self._backoff = Backoff(clock)
        self._settling = GrantSettling(ledger, count, clock)
        self.ended = EndedPods(ledger, clock)
        """Pods whose DEL has come: tell it of them."""
        self._turn = asyncio.Lock()
        """Held while what was asked is gone by."""
        self._missing: Sequence[str] = ()
        self._probe_at = 0.0
        self._claims: Sequence[Claim] | None = None
        """kubelet's last word; None if it did not answer the last time."""
        self._sandboxes: Sequence[Sandbox] | None = None
        self._asked_at = 0.0
        """When both were asked."""
        self._moved: Mapping[str, str] | None = None
        """Where the VFs of the last boot are now: old address → new; None until worked out."""
        self._is_too_early = False
        """Whether there were no device lists yet to compare kubelet's word with."""
        self.settled = False
        """Whether the grants have agreed with kubelet's word once since the start."""

    async def run(
        self,
        changed: Callable[[], Awaitable[object]],
        seconds: float = 60.0,
        served: Callable[[], Awaitable[object]] = _at_once,
    ) -> None:
        """Reconcile for ever: when `changed` returns, and at the latest after `seconds`.

        What failed is tried again when it is due. Leases have a loop of their own, since a plugin that
        hangs takes its whole time limit; it begins when `served` returns, and resumes them.
        """
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._heal_for_ever(changed, seconds), name="healing")
            loops.create_task(self._settle_leases_for_ever(seconds, served), name="leases")
            loops.create_task(self._free_ended_for_ever(), name="ended pods")

    async def run_once(self) -> None:
        """Compare everything once, and heal what can be healed. Leases come last."""
        await self.look_around()
        await asyncio.to_thread(self._probe)
        await asyncio.to_thread(self.heal_attachments)
        await asyncio.to_thread(self._settle_grants)
        await asyncio.to_thread(self._settle_leases)

    async def look_around(self) -> None:
        """Ask kubelet and the runtime what they know. Neither need answer."""
        asked_at = self._clock()
        try:
            self._claims = await self._ask_kubelet()
        except Unavailable as error:
            log.info("grants are not compared: %s", error)
            self._claims = None
        except AgentError as error:
            log.error("grants are not compared: %s", error)
            self._claims = None
        if self._ask_runtime is not None:
            try:
                self._sandboxes = await self._ask_runtime()
            except AgentError as error:
                log.info("the runtime's sandboxes are not known: %s", error)
                self._sandboxes = None
        self._asked_at = asked_at

    def heal_attachments(self) -> None:
        """Adopt, replay spooled DELs, then look at every row of the ledger and every VF without one. Blocks.

        Raises nothing that a later time could put right, such as a full disk: it is called before
        the agent serves anybody, and an agent that ends there ends again after each restart.
        """
        steps = (self._adopt, self._replay, self._heal_rows, self._heal_slots, self._heal_vfs, self._end_quarantines)
        for step in steps:
            try:
                step()
            except (AgentError, OSError) as error:  # OSError: no descriptor left to look with
                log.error("looking for what to heal ended early: %s", error)

    # ------------------------------------------------------------------- loops

    async def _heal_for_ever(self, changed: Callable[[], Awaitable[object]], seconds: float) -> None:
        while True:
            async with self._turn:
                await self.look_around()
                await asyncio.to_thread(self._probe)
                await asyncio.to_thread(self.heal_attachments)
                await asyncio.to_thread(self._settle_grants)
            due = [seconds, self._backoff.next_due(), None if self._probe_at else REPAIR_SECONDS]
            if self._is_too_early:
                due.append(UNSETTLED_SECONDS)
            if self._claims is None or (self._ask_runtime is not None and self._sandboxes is None):
                due.append(REPAIR_SECONDS)
            ended = asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(min(d for d in due if d is not None)):
                    await changed()
            except TimeoutError:
                pass
            # Each pod that starts or ends changes the hardware: many at once need no look each.
            await asyncio.sleep(ended + PAUSE_SECONDS - asyncio.get_running_loop().time())

    async def _settle_leases_for_ever(self, seconds: float, served: Callable[[], Awaitable[object]]) -> None:
        await served()
        self._attachments.leases.resume()
        while True:
            await asyncio.to_thread(self._settle_leases)
            await asyncio.sleep(seconds)

    async def _free_ended_for_ever(self) -> None:
        """Free what ended pods had as soon as kubelet lists them no more: nothing else tells of that."""
        while True:
            await self.ended.due()
            async with self._turn:
                await self.look_around()
                await asyncio.to_thread(self._settle_grants)
            self.ended.looked()
            await asyncio.sleep(PAUSE_SECONDS)

    def _probe(self) -> None:
        """Find out now and then whether the books can be written: pods that start would find out for good."""
        if 0 < self._probe_at - self._clock() <= PROBE_SECONDS:  # else it is time, or the clock was set back
            return
        try:
            self._ledger.probe()
        except LedgerError as error:
            self._probe_at = 0.0
            self._complain(str(error))
        else:
            self._complain(None)
            self._probe_at = self._clock() + PROBE_SECONDS

    # -------------------------------------------------------------------- rows

    def _adopt(self) -> None:
        """Take over what the replaced plugins left, before anybody's DEL looks for it."""
        if self._snapshot().boot_id:
            for _ in self._attachments.adopter.adopt().devices:
                self._count("adopt", "replaced-plugin")

    def _replay(self) -> None:
        for _ in range(self._replay_spool()):
            self._count("replay", "spooled-del")

    def _heal_rows(self) -> None:
        rows = self._ledger.attachments()
        self._backoff.keep_only({row.device for row in rows} | {SEARCH})
        for row in rows:
            if self._backoff.is_due(row.device):
                self._heal(row.device)

    def _heal(self, device: str) -> None:
        try:
            reason = self._attachments.heal(device, self.pod_known)
        except (AgentError, OSError) as error:
            log.error("%s cannot be healed yet: %s", device, error)
            self._count("detach-failed", error.reason if isinstance(error, AgentError) else "OSError")
            self._backoff.failed(device)
        else:
            self._backoff.succeeded(device)
            if reason is not None:
                self._count("detach", reason)

    def _heal_slots(self) -> None:
        """Let go of what was bound for sandboxes that are no more, and have bindings and CDI specs agree."""
        if self._slots is None:
            return
        pods = None if self._claims is None else {(c.pod.namespace, c.pod.name) for c in self._claims} | self._pods()
        known = Known(self._asked_at, self._ledger.attachments(), pods, self._sandboxes, self._claims)
        is_noted = self._slots.is_noted
        for binding in self._slots.release(lambda binding: is_over(binding, known, is_noted)):
            log.warning("%s was still bound for pod %s, which is gone", binding.unit_id, binding.pod)
            self._count("slot-release", "sandbox-gone")
        for action, slot in self._slots.mend(known, self._snapshot()):
            log.info("%s: %s", action, slot)
            self._count(action, "mended")

    def pod_known(self, row: Attachment) -> bool | None:
        """Tell whether somebody knows a row's pod. kubelet lists a pod for as long as it counts."""
        pods = None if self._claims is None else {(c.pod.namespace, c.pod.name) for c in self._claims} | self._pods()
        if pods is not None and (row.owner.pod.namespace, row.owner.pod.name) in pods:
            return True
        if self._ask_runtime is None:
            return None if pods is None else False
        if self._sandboxes is None:
            return None
        if any(sandbox.sandbox_id == row.owner.container_id for sandbox in self._sandboxes):
            return True
        return None if pods is None else False

    # ---------------------------------------------------------- VFs without one

    def _heal_vfs(self) -> None:
        snapshot = self._snapshot()
        if not snapshot.boot_id:
            return  # nothing was scanned yet
        known = self._ledger.known_devices()
        if self._moved is None:
            self._moved = moved(known, snapshot)
            for before, now in self._moved.items():
                log.warning("the VF that was %s before the reboot is %s now", before, now)
        held = {row.device for row in self._ledger.attachments()}
        found = vfs.survey(snapshot, held, known, self._attachments.finder.udev)
        if found.strange or found.missing:  # mostly not, and to say which are ours takes long on a large node
            found = found.of(set(self._ours()))
        by_device = {k.device: k for k in known}
        for device in found.strange:
            if self._backoff.is_due(device):
                self._put_back(device, by_device.get(device))
        self._look_for(found.missing)
        # What the last boot's VFs were is needed until the grants have followed them.
        if self.settled or not self._moved:
            gone = vfs.forgotten(snapshot, known)
            if found.learn or gone:
                self._ledger.know(found.learn, gone)

    def _put_back(self, device: str, known: KnownDevice | None) -> None:
        try:
            if not self._attachments.finder.under_a_strange_name(device, known):
                return
        except (AgentError, OSError) as error:  # and the others are looked at all the same
            log.error("%s has a strange name, and cannot be put back yet: %s", device, error)
            return
        self._count("restore", "strange-name")
        self._heal(device)

    def _look_for(self, missing: Sequence[str]) -> None:
        """Search namespaces for VFs; for the same ones less and less often, since it opens each of them."""
        if missing != self._missing:
            self._missing = missing
            self._backoff.succeeded(SEARCH)
        if not missing or not self._backoff.is_due(SEARCH):
            return
        units, bindings = self._devices_of_units() or {}, self._ledger.bindings()
        pods: dict[str, PodRef] = {grant.device: grant.pod for grant in self._ledger.grants() if grant.pod}
        pods |= {units.get(claim.unit_id, claim.unit_id): claim.pod for claim in self._claims or ()}
        pods |= {b.device: b.pod for b in bindings if b.pod.name}
        live = [s for s in self._sandboxes or () if s.ready]
        containers = {(s.pod.namespace, s.pod.name): s.sandbox_id for s in live}
        resources = {units.get(claim.unit_id, claim.unit_id): claim.resource_name for claim in self._claims or ()}
        resources |= {b.device: b.resource_name for b in bindings}
        for _ in self._attachments.finder.in_namespaces(missing, pods, containers, resources):
            self._count("adopt", "found-in-pod")
        self._backoff.failed(SEARCH)

    def _end_quarantines(self) -> None:
        withheld = self._ledger.quarantines()
        # Read in this order: a device that is withheld meanwhile still has its row.
        held = {row.device for row in self._ledger.attachments()}
        snapshot = self._snapshot()
        if not snapshot.boot_id:
            return
        for device, reason in vfs.quarantines_to_end(withheld, snapshot, held, self._ledger.boot_id).items():
            log.info("%s leaves quarantine: %s", device, reason)
            self._ledger.end_quarantine(device)
            self._count("quarantine-end", reason)

    # ------------------------------------------------------- leases and grants

    def _settle_leases(self) -> None:
        try:
            settled, given_up = self._attachments.leases.settle()
        except AgentError as error:
            log.error("leases are still owed: %s", error)
            return
        for _ in range(settled):
            self._count("lease-return", "owed")
        for _ in range(given_up):
            self._count("lease-give-up", "too-old")

    def _settle_grants(self) -> None:
        """Bring the grants in line with kubelet's PodResources, the authority on who holds a unit."""
        if self._claims is None:
            return
        offered = self._devices_of_units()
        self._is_too_early = offered is None
        try:
            self._settling.settle(self._claims, offered, self._moved or {}, self._asked_at, self.ended.pods())
        except AgentError as error:
            log.error("grants are not settled: %s", error)
        else:
            if not self.settled and offered is not None:
                self.settled = True
                self._tell_settled()
