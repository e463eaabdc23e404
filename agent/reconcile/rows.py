"""Rows of the ledger: devices in pods, on their way there or back, and addresses that are still to be given back."""

from __future__ import annotations

import logging

from agent.errors import AgentError
from agent.ledger import Ledger
from agent.process.backoff import Backoff, Retries
from agent.reconcile.view import Outside, View
from cni.attachment import Attachments

BACKOFF = Backoff(first=2.0, longest=600.0)
SEARCH = "search"
"""Name of the search for VFs among what is left alone for a while. No device is called so."""

log = logging.getLogger(__name__)


class Rows:
    """Heals what a row's device and namespace show to be over. What fails is left alone for longer and longer."""

    name = "rows"

    def __init__(self, ledger: Ledger, attachments: Attachments, outside: Outside) -> None:
        self.retries = Retries(BACKOFF, outside.now)
        self._ledger = ledger
        self._attachments = attachments
        self._outside = outside

    def heal(self, view: View) -> None:
        """Look at every row that is due."""
        rows = self._ledger.attachments()
        self.retries.keep_only({row.device for row in rows} | {SEARCH})
        for row in rows:
            if self.retries.is_due(row.device):
                self.heal_one(row.device)

    def heal_one(self, device: str) -> None:
        """Look at a device's row."""
        try:
            reason = self._attachments.heal(device)
        except (AgentError, OSError) as error:
            log.error("%s cannot be healed yet: %s", device, error)
            self._outside.count("detach-failed", error.reason if isinstance(error, AgentError) else "OSError")
            self.retries.failed(device)
        else:
            self.retries.succeeded(device)
            if reason is not None:
                self._outside.count("detach", reason)


def adopt(attachments: Attachments, outside: Outside) -> None:
    """Take over what replaced plugins have left."""
    for _ in attachments.adopter.adopt():
        outside.count("adopt", "replaced-plugin")


def give_leases_back(attachments: Attachments, outside: Outside) -> None:
    """Give back addresses of ended pods that are due. A plugin that hangs takes its whole time limit."""
    try:
        settled, given_up = attachments.leases.settle()
    except AgentError as error:
        log.error("addresses are still to be given back: %s", error)
        return
    for _ in range(settled):
        outside.count("lease-return", "owed")
    for _ in range(given_up):
        outside.count("lease-give-up", "too-old")
