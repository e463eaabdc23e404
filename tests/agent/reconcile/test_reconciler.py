"""The reconciler's decisions: what it heals, frees and takes over, and what never ends it."""

from __future__ import annotations

import asyncio
import errno
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from agent.clients.cri import Sandbox
from agent.errors import HardwareError, LedgerError, Unavailable
from agent.ledger import Ledger
from agent.model.allocation import PodRef
from agent.model.device import Snapshot
from agent.model.known import KnownDevice
from agent.reconcile import UNCLAIMED_SECONDS, Claim, Reconciler
from cni.adoption import Adopted
from cni.attachment import Attachments
from cni.detach import PodKnown
from tests.agent.books import POD, VF, attach, open_books, owner
from tests.cni.tiny_node import tiny_snapshot, vf

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

    def __init__(self, books: Ledger) -> None:
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
        self.reconciler = Reconciler(
            books,
            cast(Attachments, self.hands),
            claims=self._claims,
            devices_of_units=lambda: self.offered,
            replay_spool=lambda: 0,
            count=lambda action, reason: self.counted.append((action, reason)),
            snapshot=lambda: self.snapshot,
            ours=lambda: self.ours,
            pods=lambda: self.pods,
            sandboxes=self._sandboxes,
            complain=self.complaints.append,
            clock=lambda: self.now,
        )

    async def _sandboxes(self) -> Sequence[Sandbox]:
        if isinstance(self.sandboxes, Exception):
            raise self.sandboxes
        return self.sandboxes

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
    reason = getattr(error, "reason", "OSError")
    assert scene.counted == [("detach-failed", reason), ("detach", "owner-gone")]


def test_what_replaced_plugins_left_is_adopted_once_the_node_is_known(scene: Scene) -> None:
    scene.hands.adopted = Adopted(devices=(VF, OTHER_VF))
    scene.snapshot = Snapshot()
    scene.reconciler.heal_attachments()
    assert scene.counted == []
    scene.snapshot = Snapshot(boot_id="boot")
    scene.reconciler.heal_attachments()
    assert scene.counted == [("adopt", "replaced-plugin")] * 2


def test_books_that_cannot_be_written_at_the_start_do_not_end_the_agent(scene: Scene) -> None:
    scene.books.quarantine(VF, "clean-up failed")
    scene.books.close()
    scene.reconciler.heal_attachments()
    scene.run_once()
    assert scene.counted == [("lease-return", "owed")]
    assert "is closed" in str(scene.complaints[-1])


def test_leases_are_no_part_of_what_the_start_waits_for(scene: Scene) -> None:
    scene.reconciler.heal_attachments()
    assert scene.hands.asked_for_leases == 0
    scene.run_once()
    assert scene.counted == [("lease-return", "owed")]


def test_leases_that_cannot_be_struck_off_are_asked_for_again(scene: Scene) -> None:
    scene.hands.lease_error = LedgerError("disk full")
    scene.run_once()
    scene.run_once()
    assert scene.hands.asked_for_leases == 2


def test_a_vf_that_cannot_be_put_back_keeps_no_other_from_it(scene: Scene) -> None:
    scene.snapshot = tiny_snapshot(3, names={0: "dev7", 1: "dev8"}, in_pods=[2])
    scene.ours = {vf(0), vf(1), vf(2)}
    scene.hands.errors[vf(0)] = HardwareError("netlink says no")
    scene.run_once()
    assert [device for device, _ in scene.hands.strange] == [vf(1)]
    assert [devices for devices, *_ in scene.hands.looked_for] == [(vf(2),)]


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
    assert ("quarantine-end", "device-gone") in scene.counted


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


def test_what_failed_is_left_alone_for_longer_each_time(scene: Scene) -> None:
    attach(scene.books, VF, owner())
    scene.hands.errors[VF] = HardwareError("stuck")
    tried = []
    for _ in range(100):
        before = len(scene.counted)
        scene.reconciler.heal_attachments()
        if len(scene.counted) > before:
            tried.append(scene.now)
        scene.now += 1
    gaps = [round(b - a) for a, b in itertools.pairwise(tried)]
    assert gaps == [2, 4, 8, 16, 32]
    del scene.hands.errors[VF]
    scene.now += 64
    scene.reconciler.heal_attachments()
    assert scene.hands.healed == [VF]


def test_a_pod_is_known_to_kubelet_or_to_the_runtime_or_to_nobody(scene: Scene) -> None:
    row = attach(scene.books, VF, owner("c1"))
    known: list[bool | None] = []
    for claims, sandboxes in (
        ([Claim(POD, "rdma/vf", VF)], Unavailable("no runtime")),
        ((), [Sandbox("c1", POD, ready=False)]),
        ((), ()),
        (Unavailable("no kubelet"), ()),
        ((), Unavailable("no runtime")),
        (Unavailable("no kubelet"), [Sandbox("c1", POD, ready=True)]),
    ):
        scene.claims, scene.sandboxes = claims, sandboxes
        scene.run_once()
        known.append(scene.hands.pod_known(row))
    assert known == [True, True, False, None, None, True]


def test_natural_names_are_learnt_of_vfs_in_the_host_and_forgotten_with_them(scene: Scene) -> None:
    scene.snapshot = tiny_snapshot(2)
    scene.run_once()
    assert [(k.device, k.netdev, k.boot_id) for k in scene.books.known_devices()] == [
        (VF, "ens1f0v0", "boot"),
        (OTHER_VF, "ens1f0v1", "boot"),
    ]
    scene.snapshot = tiny_snapshot(1)
    scene.run_once()
    assert [k.device for k in scene.books.known_devices()] == [VF]


def test_a_vf_that_has_no_interface_and_no_row_is_looked_for_with_all_that_is_known(scene: Scene) -> None:
    scene.snapshot = tiny_snapshot(2, in_pods=[0])
    scene.claims = [Claim(POD, "rdma/vf", VF)]
    scene.sandboxes = [Sandbox("c1", POD, ready=True), Sandbox("old", PodRef("default", "x"), ready=False)]
    scene.run_once()
    assert scene.hands.looked_for == [((VF,), {VF: POD}, {("default", "trainer"): "c1"}, {VF: "rdma/vf"})]
    assert ("adopt", "found-in-pod") in scene.counted
    attach(scene.books, VF, owner())
    scene.run_once()
    assert len(scene.hands.looked_for) == 1


def test_a_vf_of_nobody_under_a_pods_name_is_put_back(scene: Scene) -> None:
    scene.snapshot = tiny_snapshot(2)
    scene.run_once()
    scene.snapshot = tiny_snapshot(2, names={0: "net1"})
    scene.run_once()
    ((device, known),) = scene.hands.strange
    assert device == VF
    assert known is not None
    assert known.netdev == "ens1f0v0"
    assert scene.hands.healed == [VF]
    assert ("restore", "strange-name") in scene.counted
    # And its strange name is not taken for its own.
    assert [k.netdev for k in scene.books.known_devices()] == ["ens1f0v0", "ens1f0v1"]


def test_vfs_that_no_resource_offers_are_left_to_whoever_has_them(scene: Scene) -> None:
    scene.ours = set()
    scene.snapshot = tiny_snapshot(2, in_pods=[0], names={1: "net1"})
    scene.run_once()
    assert (scene.hands.looked_for, scene.hands.strange) == ([], [])


def test_grants_follow_their_vfs_to_new_addresses_after_a_reboot(tmp_path: Path) -> None:
    with open_books(tmp_path, boot_id="yesterday") as books:
        scene = Scene(books)
        scene.snapshot = tiny_snapshot(2, boot_id="yesterday")
        scene.run_once()
        books.grant("rdma/vf", {VF: VF})
        books.bind([VF], POD)
    with open_books(tmp_path, boot_id="today") as books:
        scene = Scene(books)
        scene.snapshot = tiny_snapshot(2, boot_id="today", bus="5e")
        scene.claims = [Claim(POD, "rdma/vf", VF)]
        scene.offered = None
        scene.run_once()
        # Not before it is known what is offered; and what is needed for it is not forgotten meanwhile.
        assert [grant.device for grant in books.grants()] == [VF]
        assert {k.boot_id for k in books.known_devices()} == {"yesterday"}
        scene.offered = {"0000:5e:00.2": "0000:5e:00.2", "0000:5e:00.3": "0000:5e:00.3"}
        scene.run_once()
        assert [(grant.unit_id, grant.device) for grant in books.grants()] == [(VF, "0000:5e:00.2")]
        assert ("grant-move", "renumbered") in scene.counted
        scene.run_once()
        assert [(k.device, k.boot_id) for k in books.known_devices()] == [
            ("0000:5e:00.2", "today"),
            ("0000:5e:00.3", "today"),
        ]


def test_books_that_can_be_written_again_are_told(scene: Scene) -> None:
    scene.run_once()
    assert scene.complaints == [None]


class _Enough(Exception):
    """Ends what would go on for ever."""


def test_what_is_due_again_is_not_waited_for_until_the_next_round(scene: Scene) -> None:
    attach(scene.books, VF, owner())
    scene.hands.errors[VF] = HardwareError("stuck")
    waits = 0

    async def changed() -> None:
        nonlocal waits
        waits += 1
        if waits == 2:
            raise _Enough
        scene.now += 1000
        del scene.hands.errors[VF]
        await asyncio.sleep(3600)

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(scene.reconciler.run(changed, seconds=3600))
    assert caught.group_contains(_Enough)
    assert scene.hands.healed == [VF]


def test_vfs_that_are_found_nowhere_are_looked_for_less_and_less_often(scene: Scene) -> None:
    """It opens every namespace of the node, and most of what is missing has no interface for good."""
    scene.snapshot = tiny_snapshot(2, in_pods=[0])
    looked = []
    for _ in range(100):
        before = len(scene.hands.looked_for)
        scene.reconciler.heal_attachments()
        if len(scene.hands.looked_for) > before:
            looked.append(scene.now)
        scene.now += 1
    assert [round(b - a) for a, b in itertools.pairwise(looked)] == [2, 4, 8, 16, 32]
    scene.snapshot = tiny_snapshot(2, in_pods=[0, 1])
    scene.reconciler.heal_attachments()
    assert scene.hands.looked_for[-1][0] == (VF, OTHER_VF)


def test_a_pod_that_holds_nothing_of_ours_is_known_all_the_same(scene: Scene) -> None:
    """Its device was named by somebody else, and kubelet counts it to no unit of ours."""
    row = attach(scene.books, VF, owner("c1"))
    scene.run_once()
    assert scene.hands.pod_known(row) is False
    scene.pods = frozenset({("default", "trainer")})
    assert scene.hands.pod_known(row) is True
