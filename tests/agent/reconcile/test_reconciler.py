"""The reconciler's decisions: what it heals, frees and takes over, and what never ends it."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest

from agent.errors import HardwareError, LedgerError, Unavailable
from agent.ledger import Ledger
from agent.model.allocation import PodRef
from agent.reconcile import UNCLAIMED_SECONDS, Claim, Reconciler
from cni.attachment import Attachments
from tests.agent.books import POD, VF, attach, open_books, owner

OTHER_VF = "0000:3b:00.3"


class Hands:
    """What heals, as the reconciler sees it."""

    def __init__(self) -> None:
        self.errors: dict[str, Exception] = {}
        self.healed: list[str] = []
        self.asked_for_leases = 0
        self.lease_error: Exception | None = None

    def heal(self, device: str) -> str | None:
        """Heal, or fail as told."""
        if device in self.errors:
            raise self.errors[device]
        self.healed.append(device)
        return "owner-gone"

    def settle_leases(self) -> int:
        """Settle one, or fail as told."""
        self.asked_for_leases += 1
        if self.lease_error is not None:
            raise self.lease_error
        return 1


class Scene:
    """A reconciler on real books. What surrounds it is told by the test."""

    def __init__(self, books: Ledger) -> None:
        self.books = books
        self.hands = Hands()
        self.claims: Sequence[Claim] | Exception = ()
        self.offered: dict[str, str] | None = {VF: VF}
        self.now = time.time()
        self.counted: list[str] = []
        self.reconciler = Reconciler(
            books,
            cast(Attachments, self.hands),
            claims=self._claims,
            devices_of_units=lambda: self.offered,
            replay_spool=lambda: 0,
            count=self.counted.append,
            clock=lambda: self.now,
        )

    async def _claims(self) -> Sequence[Claim]:
        if isinstance(self.claims, Exception):
            raise self.claims
        return self.claims

    def run_once(self) -> None:
        """Reconcile."""
        asyncio.run(self.reconciler.run_once())


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with open_books(tmp_path) as books:
        yield Scene(books)


@pytest.mark.parametrize(
    "error", [HardwareError("stuck"), LedgerError("disk full"), OSError(errno.EMFILE, "Too many open files")]
)
def test_a_device_that_cannot_be_healed_keeps_no_other_from_it(scene: Scene, error: Exception) -> None:
    attach(scene.books, VF, owner("c1"))
    attach(scene.books, OTHER_VF, owner("c2"))
    scene.hands.errors[VF] = error
    scene.reconciler.heal_attachments()
    assert scene.hands.healed == [OTHER_VF]
    assert scene.counted == ["heal-failed", "owner-gone"]


def test_books_that_cannot_be_written_at_the_start_do_not_end_the_agent(scene: Scene) -> None:
    scene.books.quarantine(VF, "clean-up failed")
    scene.books.close()
    scene.reconciler.heal_attachments()
    scene.run_once()
    assert "quarantine-ended" not in scene.counted


def test_leases_are_no_part_of_what_the_start_waits_for(scene: Scene) -> None:
    scene.reconciler.heal_attachments()
    assert scene.hands.asked_for_leases == 0
    scene.run_once()
    assert scene.counted == ["lease-returned"]


def test_leases_that_cannot_be_struck_off_are_asked_for_again(scene: Scene) -> None:
    scene.hands.lease_error = LedgerError("disk full")
    scene.run_once()
    scene.run_once()
    assert scene.hands.asked_for_leases == 2


def test_a_device_leaves_quarantine_once_its_attachment_is_gone(scene: Scene) -> None:
    row = attach(scene.books, VF, owner())
    scene.hands.errors[VF] = HardwareError("stuck")
    scene.books.quarantine(VF, "clean-up failed")
    scene.run_once()
    assert [q.device for q in scene.books.quarantines()] == [VF]
    scene.books.finish_detach(row)
    scene.books.quarantine(VF, "clean-up failed")
    scene.run_once()
    assert scene.books.quarantines() == ()
    assert "quarantine-ended" in scene.counted


def test_a_grant_that_no_pod_claims_is_released_when_it_is_old(scene: Scene) -> None:
    scene.books.grant("rdma/vf", {VF: VF})
    scene.run_once()
    assert [grant.unit_id for grant in scene.books.grants()] == [VF]
    scene.now += UNCLAIMED_SECONDS + 1
    scene.run_once()
    assert scene.books.grants() == ()


def test_the_grant_of_a_device_in_a_pod_stays_whatever_kubelet_has_forgotten(scene: Scene) -> None:
    scene.books.grant("rdma/vf", {VF: VF, OTHER_VF: OTHER_VF})
    attach(scene.books, VF, owner())
    scene.now += UNCLAIMED_SECONDS + 1
    scene.run_once()
    assert [grant.unit_id for grant in scene.books.grants()] == [VF]


def test_a_kubelet_that_does_not_answer_frees_nothing(scene: Scene) -> None:
    scene.books.grant("rdma/vf", {VF: VF})
    scene.now += UNCLAIMED_SECONDS + 1
    scene.claims = Unavailable("no kubelet")
    scene.run_once()
    assert [grant.unit_id for grant in scene.books.grants()] == [VF]
    assert not scene.reconciler.settled


def test_a_unit_that_a_pod_claims_is_taken_over_once_it_is_offered(scene: Scene) -> None:
    scene.claims = [Claim(POD, "rdma/vf", VF)]
    scene.offered = None
    scene.run_once()
    assert scene.books.grants() == ()
    assert not scene.reconciler.settled
    scene.offered = {VF: VF}
    scene.run_once()
    (grant,) = scene.books.grants()
    assert (grant.device, grant.pod) == (VF, POD)
    assert scene.reconciler.settled


def test_a_grant_goes_to_the_pod_that_claims_it_now(scene: Scene) -> None:
    scene.books.grant("rdma/vf", {VF: VF})
    scene.books.bind([VF], POD)
    scene.claims = [Claim(PodRef("default", "next"), "rdma/vf", VF)]
    scene.run_once()
    assert [grant.pod for grant in scene.books.grants()] == [PodRef("default", "next")]
