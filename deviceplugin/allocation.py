"""Allocate and GetPreferredAllocation, answered from memory and written into the ledger.

Holds the newest offer. kubelet's admission of the whole node waits for these answers, so nothing
here asks the kernel or a peer, and the wait for the ledger is bounded.

An Allocate error fails the pod for good. It is for what can never work: an ID that is not offered,
a device in quarantine, a device without the files a container needs,
and a ledger that cannot be written (a grant that is not on record would be handed out twice after
a restart). A link that happens to be down is none of these: it may be up when the pod starts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from agent.config import Resource
from agent.edits.build import NO_GPU_FILES, build, unit_specs
from agent.edits.cdi import ContainerEdits
from agent.errors import LedgerError, Unavailable, UnitUnhealthy, UnknownUnit
from agent.model.allocation import NO_SPECS, Hold, PodRef, Spec
from agent.model.device import Snapshot
from agent.model.health import HEALTHY
from agent.model.unit_id import UnitId
from agent.offer.offer import Offer, Unit
from agent.process import interpreter
from agent.state import Latest
from deviceplugin.preference import Preference

LEDGER_SECONDS = 5.0

log = logging.getLogger(__name__)


Record = Callable[[Sequence[Hold]], None]
"""Records that kubelet was given units and slots of a resource, and writes the CDI specs that some have.
Blocks; raises LedgerError, and Unavailable if a spec cannot be written."""


class Allocator:
    """Answers for all resources of the node, so that what is granted last can draw its partner near."""

    def __init__(
        self,
        offer: Latest[Offer],
        record: Record,
        pod_of: Callable[[str], PodRef | None],
        clock: Callable[[], float] = time.monotonic,
        by_cdi: Latest[bool] | None = None,
    ) -> None:
        """`pod_of` tells which pod a unit was granted to, if that is known. Answered from memory.

        `by_cdi` says whether kubelet and runtime know CDI names, so that answers can stay true whatever becomes of the
        numbers of device files.
        """
        self.offer = offer
        """The newest offer, which is what is granted."""
        self.gpu_files = NO_GPU_FILES
        """What the host has to pass GPUs by."""
        self.verbs_nodes: dict[str, str] = {}
        """Device → its verbs node in the last answer about it. An answer stays with its pod, whatever becomes of the
        number; those of an earlier process are not known."""
        self._write = record
        self.preference = Preference(offer, clock, pod_of)
        self._by_cdi = by_cdi or Latest(False)
        # A thread of its own: the loop's common pool may be full of slow scans.
        self._thread = interpreter.started_workers(1, "grant")

    def close(self) -> None:
        """Take no more grants."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def allocate(self, resource_name: str, containers: Sequence[Sequence[str]]) -> tuple[ContainerEdits, ...]:
        """Grant units to containers: check all, record all, answer.

        A unit that is granted already is granted again: to the main container after an init
        container, or to a new pod before the old one's DEL.
        Raises UnknownUnit, UnitUnhealthy or LedgerError; nothing is granted then.
        """
        offer = self.offer.value
        resource = offer.resources.get(resource_name)
        if resource is None:
            raise UnknownUnit(f"{resource_name} is not configured any more: recreate the pod")
        # As ADD numbers net1, net2 …, so that PCIDEVICE_* and its like name them in the same order.
        wanted = [[self._unit(offer, resource_name, i) for i in sorted(set(ids))] for ids in containers]
        named = self._by_cdi.value and not resource.has_slots
        specs = [unit_specs(resource, units, offer.snapshot) if named else NO_SPECS for units in wanted]
        answers = self._answers(resource, wanted, offer.snapshot, specs)
        # A slot's new life begins without a device, whatever its former pod had.
        listed = [unit for units in wanted for unit in units if not unit.is_counted]
        spec_of = {i: spec for of_one in specs for i, spec in of_one.items()}
        holds = {
            unit.unit_id: Hold(
                unit.unit_id, resource_name, () if unit.is_slot else unit.devices, spec=spec_of.get(unit.unit_id)
            )
            for unit in listed
        }
        if holds:
            try:
                await self._record(tuple(holds.values()))
            except Unavailable as error:
                log.error("units of %s are handed out by the paths of their files: %s", resource_name, error)
                answers = self._answers(resource, wanted, offer.snapshot, [NO_SPECS for _ in wanted])
                await self._record([replace(hold, spec=None) for hold in holds.values()])
            for units, answer in zip(wanted, answers, strict=True):
                self._note_nodes(units, answer, offer.snapshot)
            self.preference.granted(resource, listed)
        return answers

    def _answers(
        self,
        resource: Resource,
        wanted: Sequence[Sequence[Unit]],
        snapshot: Snapshot,
        specs: Sequence[Mapping[str, Spec]],
    ) -> tuple[ContainerEdits, ...]:
        pairs = zip(wanted, specs, strict=True)
        return tuple(build(resource, units, snapshot, self.gpu_files, of_one) for units, of_one in pairs)

    def prefer(
        self, resource_name: str, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> tuple[str, ...]:
        """Say which of the available units a container should get. Never fails."""
        return self.preference.prefer(resource_name, available, must_include, size)

    def _unit(self, offer: Offer, resource_name: str, unit_id: str) -> Unit:
        unit = offer.find(resource_name, unit_id)
        resource = offer.resources[resource_name]
        slot = UnitId.parse(unit_id)
        if resource.has_slots and slot.is_slot_of(resource_name):
            # One that has just left the list will do: kubelet may not have heard, and the device is chosen later.
            return unit or Unit(unit_id, resource_name, resource.kind, "", HEALTHY, slot.numa_node, is_slot=True)
        if unit is None:
            count = len(offer.units.get(resource_name, ()))
            raise UnknownUnit(
                f"{unit_id} is not among the {count} units that {resource_name} offers now:"
                " its device is gone, or the configuration has changed; recreate the pod"
            )
        if unit.health.reason == "Quarantined":
            raise UnitUnhealthy(
                f"unit {unit_id} of {resource_name}: {' or '.join(unit.devices)} is in quarantine, because what its"
                " last pod left behind is not cleaned up yet; recreate the pod"
            )
        if unit.health.reason == "Held" and slot.is_share:
            # kubelet may not have heard, and of shares no row of the books refuses one too many.
            raise UnitUnhealthy(
                f"unit {unit_id} of {resource_name}: claims still have as many shares of {unit.device};"
                " recreate the pod"
            )
        return unit

    def _note_nodes(self, units: Sequence[Unit], answer: ContainerEdits, snapshot: Snapshot) -> None:
        paths = {node.path for node in answer.devices}
        for address in (address for unit in units for address in unit.devices):
            self.verbs_nodes.pop(address, None)
            device = snapshot.by_address.get(address)
            nodes = [c.path for r in device.rdma_devices for c in r.char_device("uverbs")] if device is not None else []
            if len(nodes) == 1 and nodes[0] in paths:
                self.verbs_nodes[address] = nodes[0]

    async def _record(self, holds: Sequence[Hold]) -> None:
        loop = asyncio.get_running_loop()
        write = loop.run_in_executor(self._thread, self._write, holds)
        try:
            async with asyncio.timeout(LEDGER_SECONDS):
                await write
        except TimeoutError as error:
            raise LedgerError(
                f"the ledger did not take the grant of {len(holds)} units of {holds[0].resource_name} within"
                f" {LEDGER_SECONDS:g} s: its disk is stuck or overloaded"
            ) from error
