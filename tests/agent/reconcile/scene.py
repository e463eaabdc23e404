"""A reconciler on real books; what surrounds it is told by the test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from agent.clients.cri import Sandbox
from agent.ledger import Ledger
from agent.model.allocation import PodRef
from agent.model.device import Snapshot
from agent.model.known import KnownDevice
from agent.reconcile import Claim, Reconciler
from agent.reconcile.slots import Slots
from cni.adoption import Adopted
from cni.attachment import Attachments
from cni.detach import PodKnown
from tests.agent.books import VF

OTHER_VF = "0000:3b:00.3"


class Hands:
    """What heals, as the reconciler sees it."""

    def __init__(self) -> None:
        self.errors: dict[str, Exception] = {}
        self.healed: list[str] = []
        self.asked_for_leases = 0
        self.lease_error: Exception | None = None
        self.pod_known: PodKnown = lambda row: None
        self.looked_for: list[tuple[Any, ...]] = []
        self.strange: list[tuple[str, KnownDevice | None]] = []
        self.adopted = Adopted()

    def heal(self, device: str, pod_known: PodKnown) -> str | None:
        """Heal, or fail as told."""
        if device in self.errors:
            raise self.errors[device]
        self.healed.append(device)
        self.pod_known = pod_known
        return "owner-gone"

    def resume(self) -> None:
        """Note that leases are given back from now on."""
        self.asked_for_leases = 0

    @property
    def leases(self) -> Hands:
        """The books of leases."""
        return self

    @property
    def finder(self) -> Hands:
        """What finds VFs without a row."""
        return self

    @property
    def adopter(self) -> Hands:
        """What takes over from replaced plugins."""
        return self

    def adopt(self) -> Adopted:
        """Take over as told."""
        return self.adopted

    def settle(self) -> tuple[int, int]:
        """Settle one, or fail as told."""
        self.asked_for_leases += 1
        if self.lease_error is not None:
            raise self.lease_error
        return 1, 0

    def in_namespaces(
        self,
        devices: Sequence[str],
        pods: Mapping[str, PodRef],
        containers: Mapping[tuple[str, str], str],
        resources: Mapping[str, str],
    ) -> tuple[str, ...]:
        """Note what was looked for, and find it all."""
        self.looked_for.append((tuple(devices), dict(pods), dict(containers), dict(resources)))
        return tuple(devices)

    def udev(self, ifindex: int) -> Mapping[str, str]:
        """Say nothing."""
        return {}

    def under_a_strange_name(self, device: str, known: KnownDevice | None) -> bool:
        """Note what was found, or fail as told."""
        if device in self.errors:
            raise self.errors[device]
        self.strange.append((device, known))
        return True


class Scene:
    """A reconciler on real books. What surrounds it is told by the test."""

    def __init__(self, books: Ledger, slots: Slots | None = None) -> None:
        self.books = books
        self.hands = Hands()
        self.claims: Sequence[Claim] | Exception = ()
        self.offered: dict[str, str] | None = {VF: VF}
        self.now = time.time()
        self.counted: list[tuple[str, str]] = []
        self.snapshot = Snapshot(boot_id="boot")
        self.ours: set[str] = {VF, OTHER_VF}
        self.sandboxes: Sequence[Sandbox] | Exception = ()
        self.pods: frozenset[tuple[str, str]] = frozenset()
        self.complaints: list[str | None] = []
        self.meanwhile: Callable[[], object] = lambda: None
        """What happens after kubelet was asked, while devices are healed."""
        self.on_claims: Callable[[], object] = lambda: None
        """What happens when kubelet is asked."""
        self.reconciler = Reconciler(
            books,
            cast(Attachments, self.hands),
            claims=self._claims,
            devices_of_units=lambda: self.offered,
            replay_spool=self._heal,
            count=lambda action, reason: self.counted.append((action, reason)),
            snapshot=lambda: self.snapshot,
            ours=lambda: self.ours,
            pods=lambda: self.pods,
            sandboxes=self._sandboxes,
            complain=self.complaints.append,
            slots=slots,
            clock=lambda: self.now,
        )

    def _heal(self) -> int:
        self.meanwhile()
        return 0

    async def _sandboxes(self) -> Sequence[Sandbox]:
        if isinstance(self.sandboxes, Exception):
            raise self.sandboxes
        return self.sandboxes

    async def _claims(self) -> Sequence[Claim]:
        self.on_claims()
        if isinstance(self.claims, Exception):
            raise self.claims
        return self.claims

    def run_once(self) -> None:
        """Reconcile."""
        asyncio.run(self.reconciler.run_once())
