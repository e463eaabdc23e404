"""kubelet's calls for claims, with somebody told of those that fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agent.errors import AgentError
from agent.model.allocation import ClaimRef
from deviceplugin.dra.server import Claims, PreparedDevice


class Observer(Protocol):
    """Hears of calls that failed. It must not block or raise. Each on the thread of its claim."""

    def claim_failed(self, ref: ClaimRef, what: str, error: AgentError) -> None:
        """A claim was not prepared, or not unprepared: `what` says which of the two. kubelet tries again."""


class ToldClaims:
    """Carries out what kubelet wants with claims, by others."""

    def __init__(self, claims: Claims, observer: Observer) -> None:
        self._claims = claims
        self._observer = observer

    def prepare(self, ref: ClaimRef) -> Sequence[PreparedDevice]:
        """Prepare a claim. Raises AgentError."""
        try:
            return self._claims.prepare(ref)
        except AgentError as error:
            self._observer.claim_failed(ref, "not prepared", error)
            raise

    def unprepare(self, ref: ClaimRef) -> None:
        """Unprepare a claim. Raises AgentError."""
        try:
            self._claims.unprepare(ref)
        except AgentError as error:
            self._observer.claim_failed(ref, "not unprepared", error)
            raise
