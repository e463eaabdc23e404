"""Leases that are owed: addresses of pods that have ended, which the IPAM plugin has not taken back yet."""

from __future__ import annotations

import logging

from agent.errors import AgentError
from agent.reconcile.view import Outside, View
from cni.attachment import Attachments

log = logging.getLogger(__name__)


class Leases:
    """Gives back what is due."""

    name = "leases"

    def __init__(self, attachments: Attachments, outside: Outside) -> None:
        self._attachments = attachments
        self._outside = outside

    def resume(self) -> None:
        """Give leases back from now on."""
        self._attachments.leases.resume()

    def heal(self, view: View) -> None:
        """Give back what is due. A plugin that hangs takes its whole time limit."""
        try:
            settled, given_up = self._attachments.leases.settle()
        except AgentError as error:
            log.error("leases are still owed: %s", error)
            return
        for _ in range(settled):
            self._outside.count("lease-return", "owed")
        for _ in range(given_up):
            self._outside.count("lease-give-up", "too-old")
