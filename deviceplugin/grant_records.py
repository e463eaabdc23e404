"""What is recorded of a grant before kubelet has its answer: the row, CDI specs, and files for Multus."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from agent.config import Resource
from agent.edits.device_info import GrantedFiles, describe
from agent.edits.unit_specs import UnitSpecs
from agent.ledger import Ledger
from agent.model.allocation import NO_SPECS, Attachment, Devices, UnitSpec, all_of
from agent.model.device import Snapshot, is_pci_address
from agent.model.unit_id import UnitId
from agent.offer.offer import Offer
from agent.state import Latest


class GrantRecords:
    """Records grants, and keeps their files. Methods block, briefly.

    A file is a few system calls on a tmpfs, and on the thread that has just waited for the books.
    """

    def __init__(
        self,
        ledger: Ledger,
        files: GrantedFiles,
        offer: Latest[Offer],
        snapshot: Latest[Snapshot],
        specs: UnitSpecs,
        forget_slots: Callable[[Collection[str]], object],
    ) -> None:
        """`forget_slots` lets go of what slots were bound to: kubelet frees units without a word."""
        self._ledger = ledger
        self._specs = specs
        self._files = files
        self._offer = offer
        self._snapshot = snapshot
        self._forget_slots = forget_slots
        self._resource_names: frozenset[str] = frozenset()
        """Those of VFs and whole adapters."""
        # Or a file that is just being written would be taken for one that nobody needs.
        self._guard = threading.Lock()

    def go_by(self, resources: Iterable[Resource]) -> None:
        """Take a configuration's resources. The attachment of a slot says what it stands for, once there is one."""
        early = (r for r in resources if r.kind in ("vf", "nic") and r.binding == "early")
        self._resource_names = frozenset(r.name for r in early)

    def grant(self, resource_name: str, units: Mapping[str, Devices], specs: Mapping[str, UnitSpec] = NO_SPECS) -> None:
        """Record that kubelet was given these units (unit ID → devices), and write the CDI specs that some have.

        A slot is first made nobody's. Raises LedgerError, and Unavailable if a spec cannot be written.
        """
        if slots := [unit for unit in units if UnitId.parse(unit).is_slot]:
            self._forget_slots(slots)
        if resource_name not in self._resource_names:
            self._specs.grant(resource_name, units, specs)
            return
        with self._guard:
            self._specs.grant(resource_name, units, specs)
            snapshot = self._snapshot.value
            for unit_id, device in ((unit_id, one) for unit_id, its in units.items() for one in all_of(its)):
                unit = self._offer.value.by_id.get(unit_id)
                document = describe(snapshot, device, unit.rdma_devices if unit is not None else ())
                self._files.write(resource_name, unit_id, document)

    def renew(self, offer: Offer, resources: Sequence[Resource]) -> None:
        """Have the CDI specs say what the hardware of an offer is. Raises LedgerError, and Unavailable."""
        self._specs.renew(offer, resources)

    def keep(self) -> None:
        """Have files of what is granted or still in a pod, and of nothing else.

        Raises LedgerError, and Unavailable if a CDI spec stays that is nobody's.
        """
        self._specs.tidy()
        names = self._resource_names
        if not names:
            return
        # Nobody who wants a grant waits while there is nothing to do.
        if not self._files.are_kept(self._wanted(self._held(), names), names):
            with self._guard:
                held, snapshot = self._held(), self._snapshot.value
                wanted = self._wanted(held, names)

                def document(resource_name: str, unit_id: str) -> Mapping[str, Any]:
                    device = wanted[resource_name, unit_id]
                    return describe(snapshot, device, (held[device].undo.rdma or "",) if device in held else ())

                self._files.keep(wanted, names, document)

    def _held(self) -> Mapping[str, Attachment]:
        return {attachment.device: attachment for attachment in self._ledger.attachments()}

    def _wanted(self, held: Mapping[str, Attachment], names: Collection[str]) -> Mapping[tuple[str, str], str]:
        """Tell which files there should be (resource name, unit ID), and of which device each tells."""
        wanted = {(g.resource_name, g.unit_id): g.device for g in self._ledger.grants()}
        # A VF's unit is called by its address. A bond's row and a child's are keyed by more, and are no units.
        wanted |= {(a.resource_name, a.device): a.device for a in held.values() if is_pci_address(a.device)}
        return {key: device for key, device in wanted.items() if key[0] in names}
