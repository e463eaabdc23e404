"""A reconciler on real books; what surrounds it is told by the test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent.edits.specs import Specs
from agent.kubelet.cri import Sandbox
from agent.kubelet.podresources import HeldUnit
from agent.ledger import Ledger
from agent.model.allocation import PodRef
from agent.model.device import Snapshot
from agent.model.vf_identity import KnownDevice
from agent.reconcile.grants import Grants
from agent.reconcile.reconciler import Reconciler
from agent.reconcile.view import Healer
from agent.state import Latest
from tests.agent.reconcile.outside import Answers
from tests.node import VF

OTHER_VF = "0000:3b:00.3"


async def reconcile_once(reconciler: Reconciler) -> None:
    """Compare and heal everything once; leases come last."""
    await reconciler.round()
    await reconciler.give_leases_back()


class Hands:
    """What heals, as the reconciler sees it."""

    def __init__(self) -> None:
        self.errors: dict[str, Exception] = {}
        self.healed: list[str] = []
        self.asked_for_leases = 0
        self.lease_error: Exception | None = None
        self.looked_for: list[tuple[Any, ...]] = []
        self.strange: list[tuple[str, KnownDevice | None]] = []
        self.adopted: tuple[str, ...] = ()
        self.is_due, self.waits = True, False
        self.leases = self.finder = self.adopter = self

    def heal(self, device: str) -> str | None:
        """Heal, or fail as told."""
        if device in self.errors:
            raise self.errors[device]
        self.healed.append(device)
        return "owner-gone"

    def resume(self) -> None:
        """Note that leases are given back from now on."""
        self.asked_for_leases = 0

    def adopt(self) -> tuple[str, ...]:
        """Take over as told."""
        self.is_due = self.waits
        return self.adopted

    def watch_ends(self, listener: object) -> None:
        """No pod ends by a DEL."""

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


def reconciler_of(
    books: Ledger,
    attachments: Any,
    snapshot: Latest[Snapshot],
    outside: Answers,
    before: Sequence[Healer] = (),
    others: Sequence[Healer] = (),
) -> Reconciler:
    """Make one that compares grants on real books, and lets other healers look before and after that."""
    grants = Grants(books, Specs(books, books.path.parent / "cdi"), snapshot, outside, Latest(False))
    return Reconciler(books, attachments, snapshot, outside, grants, (*before, grants, *others))


class Scene:
    """A reconciler on real books. What surrounds it is told by the test."""

    def __init__(self, books: Ledger, others: Sequence[Healer] = ()) -> None:
        self.books = books
        self.hands = Hands()
        self.held_units: Sequence[HeldUnit] | Exception = ()
        self.offered: Mapping[str, tuple[str, ...]] | None = {VF: (VF,)}
        self.now = time.time()
        self.ours: set[str] = {VF, OTHER_VF}
        self.sandboxes: Sequence[Sandbox] | Exception = ()
        self.pods: frozenset[tuple[str, str]] = frozenset()
        self.meanwhile: Callable[[], object] = lambda: None
        """What happens after kubelet was asked, while devices are healed."""
        self.on_claims: Callable[[], object] = lambda: None
        """What happens when kubelet is asked."""
        self.found = Latest(Snapshot(boot_id="boot"))
        self.outside = _Answers(self)
        self.reconciler = reconciler_of(books, self.hands, self.found, self.outside, others=others)
        self.grants = self.reconciler.grants
        self.settled = self.grants.settled

    @property
    def counted(self) -> list[tuple[str, str]]:
        """What was done."""
        return self.outside.counted

    @property
    def snapshot(self) -> Snapshot:
        """The newest one."""
        return self.found.value

    @snapshot.setter
    def snapshot(self, snapshot: Snapshot) -> None:
        self.found.set(snapshot)

    def run_once(self) -> None:
        """Reconcile."""
        asyncio.run(reconcile_once(self.reconciler))


class _Answers(Answers):
    """What surrounds the reconciler, as the scene has it."""

    asks_runtime = True

    def __init__(self, scene: Scene) -> None:
        super().__init__(lambda: scene.offered, lambda: scene.ours, self._asked, self._meanwhile, lambda: scene.pods)
        self._scene = scene

    async def _asked(self) -> Sequence[HeldUnit]:
        self._scene.on_claims()
        if isinstance(self._scene.held_units, Exception):
            raise self._scene.held_units
        return self._scene.held_units

    async def sandboxes(self) -> Sequence[Sandbox]:
        if isinstance(self._scene.sandboxes, Exception):
            raise self._scene.sandboxes
        return self._scene.sandboxes

    def _meanwhile(self) -> int:
        self._scene.meanwhile()
        return 0

    def now(self) -> float:
        return self._scene.now
