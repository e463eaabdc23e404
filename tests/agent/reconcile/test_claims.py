"""Claims that nobody has, specs that do not fit the books, and devices that a reboot has moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.edits.specs import Specs, file_of_claim
from agent.errors import Refused, Unavailable
from agent.kubelet.cri import Sandbox
from agent.ledger import Ledger
from agent.model.allocation import Claim, ClaimRef, ClaimState, PodRef, Spec
from agent.model.device import Snapshot
from agent.model.vf_identity import identities
from agent.reconcile.claims import ASK_SECONDS, NEW_SECONDS, SLOW_SECONDS, Claims
from agent.reconcile.grants import Grants
from agent.reconcile.lost_books import LostBooks
from agent.reconcile.view import View
from agent.state import Latest
from cni.pod_devices import ClaimReader
from tests.agent.reconcile.outside import Answers
from tests.cni.tiny_node import tiny_snapshot, vf
from tests.node import POD, VF, attach, claimed_vf, granted, open_books, owner, prepare

NOW = 10_000.0
NOBODY = View(asked_at=NOW, held_units=(), pods=())


class Reader:
    """The API server: what it says of any claim, or an error."""

    def __init__(self) -> None:
        self.says: Mapping[str, Any] | Exception | None = None
        self.asked: list[str] = []
        self.meanwhile: Callable[[], object] = int
        """What happens until it answers."""

    def get(self, ref: ClaimRef) -> Mapping[str, Any] | None:
        self.asked.append(ref.name)
        self.meanwhile()
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


class Room:
    """The healer on real books and a real folder of specs."""

    def __init__(self, books: Ledger, folder: Path) -> None:
        self.books = books
        self.specs_folder = folder / "cdi"
        self.specs = specs = Specs(books, self.specs_folder)
        self.snapshot = Latest(Snapshot(boot_id="boot"))
        self.outside = Answers()
        self.reader = Reader()
        self.asks = Latest[ClaimReader | None](self.reader)
        self.now = 0.0
        self.healers = (
            LostBooks(books, specs, self.outside),
            Grants(books, specs, self.snapshot, self.outside, Latest(False)),
            Claims(books, self.specs, self.outside, self.asks, lambda: self.now),
        )

    def prepare(self, *args: Any, **more: Any) -> Claim:
        """Prepare a claim, with its spec."""
        claim = prepare(self.books, *args, **more)
        self.specs.sync([file_of_claim(claim.ref.uid)])
        return claim

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def heal(self, view: View = NOBODY) -> list[tuple[str, str]]:
        """Heal once, and tell what was done."""
        before = len(self.outside.counted)
        for healer in self.healers:
            healer.heal(view)
        return self.outside.counted[before:]


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    with open_books(tmp_path, clock=lambda: NOW - NEW_SECONDS - 1) as books:
        books.is_new = False  # as after a start that found books
        yield Room(books, tmp_path)


def reserved_for(*pods: PodRef) -> Mapping[str, Any]:
    entries = [{"resource": "pods", "name": pod.name, "uid": pod.uid} for pod in pods]
    return {"metadata": {"namespace": "default", "name": "nics", "uid": "uid-nics"}, "status": {"reservedFor": entries}}


# ------------------------------------------------------------------------------------------------------------- orphans


@pytest.mark.parametrize("found", [None, reserved_for()])
def test_a_claim_that_is_gone_or_reserved_for_nobody_is_ended(room: Room, found: Mapping[str, Any] | None) -> None:
    room.prepare()
    room.reader.says = found
    assert room.heal() == [("claim-unprepare", "orphan")]
    assert (room.books.claims(), room.specs.names()) == ((), frozenset())
    room.books.grant(granted("rdma/vf", {VF: VF}))


def test_a_claim_that_is_reserved_for_a_pod_group_is_not_ended_and_keeps_the_pods_that_add_has_found(
    room: Room,
) -> None:
    room.prepare()
    known = room.books.claims()
    found = reserved_for(PodRef("default", "other", "uid-other"))
    group = {"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "workers", "uid": "uid-workers"}
    for entries in ([group], [*found["status"]["reservedFor"], group]):
        room.reader.says = {**found, "status": {"reservedFor": entries}}
        assert room.heal() == []
        assert room.books.claims() == known


SANDBOX = Sandbox("c1", POD, ready=True)


@pytest.mark.parametrize(
    "view",
    [
        View(NOW, (), {(POD.namespace, POD.name)}),
        View(NOW, None, None),
        View(NOW - 2, (), ()),
        View(NOW, (), (), (SANDBOX,), asks_runtime=True),
        View(NOW, (), (), None, asks_runtime=True),
    ],
    ids=["kubelet lists its pod", "kubelet is away", "it is new", "its sandbox lives", "the runtime is away"],
)
def test_a_claim_that_somebody_may_have_is_not_asked_about(room: Room, view: View) -> None:
    room.prepare()
    assert room.heal(view) == []
    assert (len(room.books.claims()), room.reader.asked) == (1, [])


@pytest.mark.parametrize(
    ("state", "view"),
    [
        (ClaimState.UNPREPARING, View(NOW, (), {(POD.namespace, POD.name)})),  # it may be another of the same name
        (ClaimState.PREPARED, View(NOW, (), (), (replace(SANDBOX, ready=False),), asks_runtime=True)),
    ],
)
def test_no_other_pod_and_no_stopped_sandbox_speaks_for_a_claim(room: Room, state: ClaimState, view: View) -> None:
    room.prepare()
    room.books.set_claim_state("uid-nics", state)
    assert room.heal(view) == [("claim-unprepare", "orphan")]


@pytest.mark.parametrize("claim_uid", ["uid-nics", ""])
def test_a_claim_whose_device_is_in_a_pod_stays(room: Room, claim_uid: str) -> None:
    room.prepare()
    row = attach(room.books, VF, owner())
    assert room.heal() == []
    room.books.finish_detach(row)
    assert room.heal() == [("claim-unprepare", "orphan")]


@pytest.mark.parametrize("error", [Unavailable("away"), Refused(403, "may not read claims"), None])
def test_without_the_api_servers_word_no_claim_is_ended(room: Room, error: Exception | None) -> None:
    room.prepare()
    room.reader.says = error
    room.asks.set(room.reader if error is not None else None)
    assert room.heal() == []
    assert len(room.books.claims()) == 1


@pytest.mark.parametrize(
    ("says", "seconds", "asked"),
    [
        (Unavailable("no answer within 15 s"), 15, [1, 1, 1]),  # silent about one claim, it is so about the next
        (Unavailable("the answer is nested more than 64 levels deep"), 0, [3, 3, 3]),
        (Refused(403, "may not read claims"), SLOW_SECONDS + 1, [1, 2, 3]),
        (None, SLOW_SECONDS + 1, [1, 2, 3]),
    ],
)
def test_what_an_api_server_answers_slowly_or_not_holds_up_no_round(
    room: Room, says: Exception | None, seconds: float, asked: list[int]
) -> None:
    for n in range(3):
        room.prepare(f"c-{n}", claimed_vf(vf(n)))
    room.reader.says = says
    room.reader.meanwhile = lambda: room.wait(seconds)
    for count in asked:
        room.heal()
        assert len(room.reader.asked) == count
    room.now += ASK_SECONDS
    room.reader.says, room.reader.meanwhile = None, int
    room.heal()
    assert room.books.claims() == ()


def test_a_claim_that_is_reserved_stays_and_is_asked_about_seldom(room: Room) -> None:
    room.prepare(pods=(), only_pod="")
    room.reader.says = reserved_for(POD)
    for _ in range(3):
        assert room.heal() == []
    assert room.reader.asked == ["nics"]
    assert room.books.claims()[0].pods == (POD,)
    room.now += ASK_SECONDS
    room.heal()
    assert room.reader.asked == ["nics", "nics"]


# --------------------------------------------------------------------------------------------------------------- specs


def test_a_spec_of_no_claim_is_removed_and_those_of_others_stay(room: Room, tmp_path: Path) -> None:
    claim = room.prepare()
    room.reader.says = reserved_for(POD)
    assert room.heal() == []  # from then on no copy is of lost books
    room.books.remove_claim(claim.ref.uid)
    (tmp_path / "cdi/nvidia.json").write_text("{}")
    assert room.heal() == [("spec-remove", "claim-gone")]
    assert [path.name for path in (tmp_path / "cdi").iterdir()] == ["nvidia.json"]


# -------------------------------------------------------------------------------------------------------- after a boot


def owners(books: Ledger, *devices: str) -> list[str | None]:
    """Name the claim that has each device."""
    found = map(books.claim_on, devices)
    return [claim.ref.name if claim is not None else None for claim in found]


def named(snapshot: Snapshot, index: int) -> str:
    return identities(snapshot)(snapshot.by_address[vf(index)])


def test_claims_follow_their_devices_to_new_addresses_and_wait_to_be_prepared(tmp_path: Path) -> None:
    then, now = tiny_snapshot(2), tiny_snapshot(2, boot_id="boot-2", bus="5e")
    moved_to = vf(0).replace("3b:", "5e:")
    with open_books(tmp_path) as books:
        prepare(books, "nics", claimed_vf(vf(0), identity=named(then, 0)))
        prepare(books, "nobody-knows", claimed_vf(vf(1), identity="15b3:101d/ffff/1"))
    with open_books(tmp_path, "boot-2") as books:
        room = Room(books, tmp_path)
        room.reader.says = reserved_for(POD)
        room.snapshot.set(now)
        assert room.heal() == [("claim-move", "renumbered")]
        assert owners(books, moved_to, vf(1), vf(0)) == ["nics", "nobody-knows", None]
        assert {claim.boot_id for claim in books.claims()} == {"boot"}
        assert room.specs.names() == frozenset()  # it would name the character devices of then
        assert room.heal() == []


def test_nothing_moves_within_a_boot_nor_before_the_hardware_is_known(room: Room) -> None:
    other = tiny_snapshot(2, bus="5e")
    prepare(room.books, "nics", claimed_vf(vf(0), identity=named(tiny_snapshot(2), 0)))
    room.reader.says = reserved_for(POD)
    for snapshot in (Snapshot(), other):
        room.snapshot.set(snapshot)
        assert ("claim-move", "renumbered") not in room.heal()
    assert owners(room.books, vf(0)) == ["nics"]


# ---------------------------------------------------------------------------------------------------------- lost books


def test_claims_of_lost_books_are_in_the_new_ones_before_anybody_is_served(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        late = claimed_vf(network={"mtu": 9000}, ifname="rail0", spec=Spec("claim", {"env": ["A=1"]}))
        lost = Room(books, tmp_path).prepare("nics", late)
        Room(books, tmp_path).prepare("half", claimed_vf("0000:3b:00.4"))
    (tmp_path / "ledger.db").unlink()
    (tmp_path / "cdi/nodefabric-claim-uid-half.json").unlink()  # killed between the two files
    with open_books(tmp_path) as books:
        room = Room(books, tmp_path)
        room.reader.says = reserved_for(POD)
        assert room.heal(View()) == [("claim-adopt", "books-lost")] * 2
        half, found = books.claims()
        assert found == replace(lost, since=found.since)
        assert [device.edits for device in found.devices] == [{"env": ["A=1"]}]
        assert half.state is ClaimState.PREPARING
        books.remove_claim(found.ref.uid)
        assert room.heal(View()) == [("spec-remove", "claim-gone")]  # only new books are made of copies


def test_a_claim_whose_spec_is_not_whole_is_not_taken_for_prepared(room: Room) -> None:
    claim = room.prepare()
    room.books.prepare_claim(claim)
    (room.specs_folder / "nodefabric-claim-uid-nics.json").unlink()
    room.reader.says = reserved_for(POD)
    room.heal()
    assert [found.state for found in room.books.claims()] == [ClaimState.PREPARING]
