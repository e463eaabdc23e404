"""Claims in the books: a device that one has alone is in no other hands, whoever comes first."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from agent.errors import ClaimConflict, DeviceBusy
from agent.ledger import Ledger
from agent.ledger.database import read_books
from agent.model.allocation import Claim, ClaimRef, ClaimState, Hold, PodRef
from tests.node import POD, VF, attach, bound_slot, claimed, granted, open_books, owner

OTHER_VF = "0000:3b:00.3"
HCA = "0000:3b:00.0"
OTHER_POD = PodRef("default", "worker", "uid-2")
SLOT = "slot-rdma:vf-0-0"


def of_vf(device: str = VF, request: str = "nic") -> Hold:
    """Say that a claim has a VF."""
    return claimed(
        request=request,
        pool="node-1",
        device_name=f"vf-{device.replace(':', '-').replace('.', '-')}",
        resource_name="rdma/vf",
        kind="vf",
        device=device,
        key="",
        identity="15b3:1018/0c42a1/0",
        network={"mtu": 9000},
        ifname="rail0",
        edits={"env": ["A=1"]},
    )


def of_share(share_id: str = "s1") -> Hold:
    """Say that a claim has a share of an HCA."""
    return claimed("share", "node-1", "hca-1", "rdma/hca", "hca", HCA, "n", share_id, exclusive=False)


def claim(name: str = "c", *devices: Hold, pod: PodRef = POD) -> Claim:
    """Say a claim of a pod."""
    ref = ClaimRef(f"uid-{name}", "default", name)
    found = devices or (of_vf(),)
    holds = tuple(replace(hold, key=f"{ref.uid}-{i}-{hold.request}", claim_uid=ref.uid) for i, hold in enumerate(found))
    return Claim(ref, ClaimState.PREPARING, holds, (pod,), pod.uid)


def alone(books: Ledger) -> dict[str, str]:
    """Tell which devices claims have alone, and which claims."""
    held = ((d, books.claim_on(d)) for d in (VF, OTHER_VF, HCA))
    return {device: found.ref.name for device, found in held if found is not None}


def test_claims_are_found_by_the_uid_of_a_pod_and_by_its_name_if_there_is_none(books: Ledger) -> None:
    mine = books.prepare_claim(claim())
    shared = books.prepare_claim(replace(claim("s", of_share(), pod=OTHER_POD), only_pod="", pods=(POD, OTHER_POD)))
    assert books.claims_for(POD) == (mine, shared)
    assert books.claims_for(OTHER_POD) == (shared,)
    assert books.claims_for(replace(POD, uid="")) == (mine, shared)
    assert books.claims_for(replace(POD, uid="of its namesake")) == ()


# ------------------------------------------------------------------------------------------------ one device, one hand


@contextmanager
def refused(books: Ledger, text: str) -> Iterator[None]:
    """Expect a conflict, and that nothing was written."""
    before = books.claims(), books.holds(), books.bound_slots(), books.attachments()
    with pytest.raises((ClaimConflict, DeviceBusy), match=text):
        yield
    assert (books.claims(), books.holds(), books.bound_slots(), books.attachments()) == before


BINDING = bound_slot(SLOT, "rdma/vf", "vf", VF, "worker", "c1", "eth0", OTHER_POD, {})
STEPS: Mapping[str, Callable[[Ledger], object]] = {
    "claim": lambda books: books.prepare_claim(claim()),
    "another claim": lambda books: books.prepare_claim(claim("another", of_vf(OTHER_VF), of_vf())),
    "no claim": lambda books: books.remove_claim("uid-c"),
    "unit": lambda books: books.grant(granted("rdma/vf", {OTHER_VF: OTHER_VF, VF: VF})),
    "no unit": lambda books: books.release([VF]),
    "slot": lambda books: books.bind_slots([BINDING]),
    "another slot": lambda books: books.bind_slots([replace(BINDING, key=f"{SLOT}1")]),
    "no slot": lambda books: books.unbind(books.bound_slots()),
}


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        *(("claim", second, "claimed by default/c ") for second in ("another claim", "unit", "slot")),
        ("unit", "claim", rf"granted to a pod not known yet \({VF} of rdma/vf\)"),
        ("slot", "claim", rf"granted to default/worker \({SLOT} of rdma/vf\)"),
        ("slot", "another slot", rf"granted to default/worker \({SLOT} of rdma/vf\)"),
    ],
)
def test_who_comes_second_for_a_device_is_refused_and_told_the_first_until_that_lets_go(
    books: Ledger, first: str, second: str, text: str
) -> None:
    STEPS[first](books)
    with refused(books, f"{VF} is not free: it is {text}"):
        STEPS[second](books)
    STEPS[f"no {first}"](books)
    STEPS[second](books)


def test_one_claim_cannot_have_a_device_twice(books: Ledger) -> None:
    with refused(books, "another request of this one"):
        books.prepare_claim(claim("c", of_vf(), of_vf(request="other")))


def test_claims_share_what_may_be_shared_and_none_has_it_alone_then(books: Ledger) -> None:
    books.prepare_claim(claim("a", of_share("s1")))
    books.prepare_claim(claim("b", of_share("s2")))
    with refused(books, "it is claimed by default/a "):
        books.prepare_claim(claim("c", of_vf(HCA)))
    assert alone(books) == {}
    books.remove_claim("uid-a")
    books.remove_claim("uid-b")
    books.prepare_claim(claim("c", of_vf(HCA)))
    with refused(books, "claimed by default/c "):
        books.prepare_claim(claim("a", of_share("s1")))


def test_who_only_looks_takes_nothing_from_nobody(books: Ledger) -> None:
    books.prepare_claim(claim("c"))
    books.prepare_claim(claim("looks", replace(of_vf(), admin=True)))
    books.prepare_claim(claim("looks-too", replace(of_vf(), admin=True, exclusive=False)))
    books.remove_claim("uid-c")
    assert alone(books) == {}
    books.grant(granted("rdma/vf", {VF: VF}))


def test_a_device_in_a_pod_is_prepared_for_that_pods_claims_alone(books: Ledger) -> None:
    row = attach(books, VF, owner())
    books.begin_detach([row.attachment_id])
    with refused(books, r"attached to default/trainer \(sandbox c1, from which it is on its way back\)"):
        books.prepare_claim(claim("c", pod=OTHER_POD))
    books.prepare_claim(claim("c", pod=POD))


def attach_for(books: Ledger, pod: PodRef, claim_uid: str = "") -> None:
    attach(books, VF, owner("c9", "eth0", pod), claim_uid=claim_uid)


def test_a_prepared_device_comes_into_no_other_pod(books: Ledger) -> None:
    books.prepare_claim(claim())
    with pytest.raises(DeviceBusy, match=f"{VF} is prepared for claim default/c, which is not of pod default/work"):
        attach_for(books, OTHER_POD)
    assert books.attachments() == ()


def test_a_claim_brings_its_device_only_while_it_is_prepared(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        for before in (None, ClaimState.PREPARING, ClaimState.UNPREPARING):
            if before is not None:
                books.prepare_claim(claim())
                books.set_claim_state("uid-c", before)
            with pytest.raises(DeviceBusy, match=f"is {before or 'gone'}, so nothing of it comes into a pod"):
                attach_for(books, POD, "uid-c")
        assert books.attachments() == ()
        books.set_claim_state("uid-c", ClaimState.PREPARED)
        attach_for(books, POD, "uid-c")
        (row,) = books.attachments()
    with open_books(tmp_path) as books:
        assert books.attachments() == (row,)
        assert row.claim_uid == "uid-c"


def test_the_file_itself_refuses_two_claims_with_one_device(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        books.prepare_claim(claim("a"))
        books.prepare_claim(claim("b", of_vf(OTHER_VF)))
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as db, pytest.raises(sqlite3.IntegrityError):
        db.execute("UPDATE hold_devices SET device = ?", (VF,))


# ---------------------------------------------------------------------------------------------------------- a reboot


def test_claims_whose_devices_have_changed_places_are_written_in_one_step(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        books.prepare_claim(claim("a"))
        books.prepare_claim(claim("b", of_vf(OTHER_VF)))
    with open_books(tmp_path, "boot-2") as books:
        a, b = books.claims()
        books.move({a.devices[0].key: (OTHER_VF,), b.devices[0].key: (VF,), "unknown": (VF,)})
        assert alone(books) == {VF: "b", OTHER_VF: "a"}
        assert {found.boot_id for found in books.claims()} == {"boot"}
        renewed = books.claims()
        with refused(books, "another slot or claim"):
            books.move({b.devices[0].key: (OTHER_VF,)})
    assert read_books(tmp_path / "ledger.db").claims == renewed
