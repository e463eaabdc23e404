"""Grants of VFs, told to Multus: the books' `grant` with a device-info file for each unit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from agent.device_info import GrantedFiles, describe
from agent.model.allocation import Attachment, Grant
from agent.model.device import Snapshot
from deviceplugin.allocation import GrantBook
from deviceplugin.resources import Unit


class GrantsAndAttachments(GrantBook, Protocol):
    """The part of the ledger that the files follow."""

    def grants(self) -> tuple[Grant, ...]:
        """List all grants."""

    def attachments(self) -> tuple[Attachment, ...]:
        """List all devices in pods."""


class InformingBook:
    """A book of grants that writes the files of VFs, too, before kubelet has its answer.

    A file is a few system calls on a tmpfs, and on the thread that has just waited for the books.
    """

    def __init__(
        self,
        book: GrantsAndAttachments,
        files: GrantedFiles,
        unit: Callable[[str], Unit | None],
        snapshot: Callable[[], Snapshot],
    ) -> None:
        """`unit` finds an offered one by its ID."""
        self._book = book
        self._files = files
        self.resource_names: frozenset[str] = frozenset()
        """Those of VFs and whole adapters."""
        self._unit = unit
        self._snapshot = snapshot
        # Or a file that is just being written would be taken for one that nobody needs.
        self._guard = threading.Lock()

    def grant(self, resource_name: str, units: Mapping[str, str]) -> None:
        """Record that kubelet was given these units (unit ID → device). Blocks; raises LedgerError."""
        if resource_name not in self.resource_names:
            self._book.grant(resource_name, units)
            return
        with self._guard:
            self._book.grant(resource_name, units)
            snapshot = self._snapshot()
            for unit_id, device in units.items():
                unit = self._unit(unit_id)
                document = describe(snapshot, device, unit.rdma_devices if unit is not None else ())
                self._files.write(resource_name, unit_id, document)

    def keep(self) -> None:
        """Have files of what is granted or still in a pod, and of nothing else. Blocks; raises LedgerError."""
        names = self.resource_names
        if not names:
            return
        # Nobody who wants a grant waits while there is nothing to do.
        if not self._files.are_kept(self._wanted(self._held(), names), names):
            with self._guard:
                held, snapshot = self._held(), self._snapshot()
                wanted = self._wanted(held, names)

                def document(resource_name: str, unit_id: str) -> Mapping[str, Any]:
                    device = wanted[resource_name, unit_id]
                    return describe(snapshot, device, (held[device].undo.rdma or "",) if device in held else ())

                self._files.keep(wanted, names, document)

    def _held(self) -> Mapping[str, Attachment]:
        return {attachment.device: attachment for attachment in self._book.attachments()}

    def _wanted(self, held: Mapping[str, Attachment], names: Collection[str]) -> Mapping[tuple[str, str], str]:
        """Tell which files there should be (resource name, unit ID), and of which device each tells."""
        wanted = {(g.resource_name, g.unit_id): g.device for g in self._book.grants()}
        # A VF's unit is called by its address.
        wanted |= {(a.resource_name, a.device): a.device for a in held.values()}
        return {key: device for key, device in wanted.items() if key[0] in names}
