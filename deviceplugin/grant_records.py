"""What is recorded of a grant before kubelet has its answer: the row, CDI specs, and files for Multus."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

from agent.config import Resource
from agent.edits.compat import pool_specs
from agent.edits.device_info import GrantedFiles, Key, describe
from agent.edits.specs import Specs
from agent.edits.unit_specs import UnitSpecs
from agent.ledger import Ledger
from agent.model.allocation import Hold
from agent.model.device import is_pci_address
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
        specs: Specs,
        units: UnitSpecs,
    ) -> None:
        self._ledger = ledger
        self._specs = specs
        self._units = units
        self._files = files
        self._offer = offer
        self._resource_names: frozenset[str] = frozenset()
        """Those of VFs and whole adapters."""
        # Or a file that is just being written would be taken for one that nobody needs.
        self._guard = threading.Lock()

    def go_by(self, resources: Iterable[Resource]) -> None:
        """Take a configuration's resources. The attachment of a slot says what it stands for, once there is one."""
        early = (r for r in resources if r.kind in ("vf", "nic") and r.binding == "early")
        self._resource_names = frozenset(r.name for r in early)

    def grant(self, holds: Sequence[Hold]) -> None:
        """Record that kubelet was given units and slots, all of one resource, and write the CDI specs that some have.

        Raises LedgerError, and Unavailable if a spec cannot be written.
        """
        described = [hold for hold in holds if hold.resource_name in self._resource_names]
        if not described:
            self._specs.grant(holds)
            return
        with self._guard:
            self._specs.grant(holds)
            snapshot = self._offer.value.snapshot
            for hold, device in ((each, device) for each in described for device in each.devices):
                unit = self._offer.value.by_id.get(hold.key)
                document = describe(snapshot, device, unit.rdma_devices if unit is not None else ())
                self._files.write(hold.resource_name, hold.key, document)

    def renew(self, offer: Offer, resources: Sequence[Resource]) -> None:
        """Have the CDI specs say what the hardware of an offer is. Raises LedgerError, and Unavailable."""
        try:
            self._specs.keep_pools(pool_specs(resources, offer.units, offer.snapshot))
        finally:  # no unit waits for that: the file that its spec names may be another device's by now
            if offer.snapshot.generation:  # the first one may be of nothing
                self._units.renew(offer, resources)

    def keep(self) -> None:
        """Have files of what is granted or still in a pod, and of nothing else.

        Raises LedgerError, and Unavailable if a CDI spec stays that is nobody's.
        """
        self._units.tidy()
        names = self._resource_names
        # Nobody who wants a grant waits while there is nothing to do.
        if not names or not any(self._files.changes(self._wanted(), names)):
            return
        with self._guard:
            wanted, snapshot = self._wanted(), self._offer.value.snapshot
            needless, missing = self._files.changes(wanted, names)
            self._files.keep(needless, {key: describe(snapshot, *wanted[key]) for key in missing})

    def _wanted(self) -> Mapping[Key, tuple[str, Sequence[str]]]:
        """Tell which files there should be, of which device each tells, and which RDMA devices that has in a pod."""
        rows = {row.device: row for row in self._ledger.attachments()}
        wanted = {(hold.resource_name, hold.key): hold.device for hold in self._ledger.holds()}
        # A VF's unit is called by its address. A bond's row and a child's are keyed by more, and are no units.
        wanted |= {(row.resource_name, device): device for device, row in rows.items() if is_pci_address(device)}
        return {
            key: (device, (rows[device].undo.rdma or "",) if device in rows else ())
            for key, device in wanted.items()
            if key[0] in self._resource_names
        }
