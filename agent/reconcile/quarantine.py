"""Quarantined devices that are clean again."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum

from agent.ledger import Ledger
from agent.model.allocation import Quarantine
from agent.model.device import Snapshot, is_pci_address
from agent.reconcile.vfs import should_have_interface
from agent.reconcile.view import Outside, View
from agent.state import Latest

log = logging.getLogger(__name__)


class Ended(StrEnum):
    """By what a device is clean again. Metrics count by it."""

    VERIFIED = "verified"
    REBOOTED = "rebooted"
    DEVICE_GONE = "device-gone"


class Quarantines:
    """Ends the quarantine of devices that are clean again."""

    name = "quarantine"

    def __init__(self, ledger: Ledger, snapshot: Latest[Snapshot], outside: Outside) -> None:
        self._ledger = ledger
        self._snapshot = snapshot
        self._outside = outside

    def heal(self, view: View) -> None:
        """Look at each device in quarantine."""
        withheld = self._ledger.quarantines()
        # Read in this order: a device that is withheld meanwhile still has its row.
        held = {row.device for row in self._ledger.attachments()}
        snapshot = self._snapshot.value
        if not snapshot.boot_id:
            return
        for device, reason in quarantines_to_end(withheld, snapshot, held, self._ledger.boot_id).items():
            log.info("%s leaves quarantine: %s", device, reason)
            self._ledger.end_quarantine(device)
            self._outside.count("quarantine-end", reason)


def quarantines_to_end(
    withheld: Iterable[Quarantine], snapshot: Snapshot, held: Collection[str], boot_id: str
) -> Mapping[str, Ended]:
    """Tell which devices are clean again, and by what.

    The row of a device in doubt stays until it is verified clean. So one without a row is clean, if it is
    where it should be; a reboot has reset it, and has made its address another device's, maybe; and what
    is off the bus comes back reset.
    """
    ended = {}
    for entry in withheld:
        if entry.device in held:
            continue
        device = snapshot.by_address.get(entry.device)
        if entry.boot_id not in ("", boot_id):
            ended[entry.device] = Ended.REBOOTED
        elif device is None:
            ended[entry.device] = Ended.DEVICE_GONE if is_pci_address(entry.device) else Ended.VERIFIED
        elif device.netdev is not None or not should_have_interface(device, snapshot):
            ended[entry.device] = Ended.VERIFIED
    return ended
