"""What the ledger keeps in memory is what the file holds, whatever was written and however it ended."""

from __future__ import annotations

import contextlib
import tempfile
from operator import attrgetter
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.errors import ClaimConflict, DeviceBusy, LedgerError
from agent.ledger import Ledger
from agent.ledger.database import read_books
from agent.model.allocation import ClaimState, PodRef, Spec
from tests.node import attach, bound_slot, claimed_vf, granted, open_books, prepare

DEVICES = [f"0000:3b:00.{n}" for n in range(3)]
UNITS = [f"unit-{n}" for n in range(4)]
SLOTS = [f"slot-rdma:vf-0-{n}" for n in range(2)]
CLAIMS = ["a", "b"]
RESULTS = [f"uid-{name}-0" for name in CLAIMS]
NAMES = st.sampled_from(["rdma/vf", "rdma/hca"])
NICS = st.lists(st.sampled_from(DEVICES), min_size=1, unique=True).map(tuple)
STEPS = st.one_of(
    st.tuples(st.just("begin"), st.sampled_from(DEVICES)),
    st.tuples(st.just("finish"), st.sampled_from(DEVICES)),
    st.tuples(st.just("detach"), st.sampled_from(DEVICES)),
    st.tuples(st.just("drop"), st.sampled_from(DEVICES)),
    st.tuples(st.just("grant"), st.tuples(NAMES, st.dictionaries(st.sampled_from(UNITS), NICS))),
    st.tuples(st.just("bind"), st.sets(st.sampled_from(UNITS))),
    st.tuples(st.just("release"), st.tuples(st.sets(st.sampled_from(UNITS)), st.floats(0, 40))),
    st.tuples(st.just("move"), st.dictionaries(st.sampled_from([*UNITS, *RESULTS]), NICS)),
    st.tuples(st.just("specs"), st.sets(st.sampled_from([*UNITS, *SLOTS, *RESULTS]))),
    st.tuples(st.just("slot"), st.tuples(st.sampled_from(SLOTS), st.sampled_from(["", *DEVICES]))),
    st.tuples(st.just("prepare"), st.tuples(st.sampled_from(CLAIMS), st.sampled_from(DEVICES), st.booleans())),
    st.tuples(st.just("unprepare"), st.sampled_from(CLAIMS)),
    st.tuples(st.just("pods"), st.sampled_from(CLAIMS)),
    st.tuples(st.just("prepared"), st.sampled_from(CLAIMS)),
    st.tuples(st.just("withhold"), st.sampled_from(DEVICES)),
)


def begin(books: Ledger, device: str) -> None:
    attach(books, device, durable=False)


def take(books: Ledger, step: str, value: object) -> None:
    """Take one step, legal or not. What the ledger refuses must leave no trace."""
    row = books.attachment_on(value) if isinstance(value, str) else None
    match step, value:
        case "begin", str():
            begin(books, value)
        case "finish", str() if row is not None:
            books.finish_attach([row.attachment_id], {"cniVersion": "1.0.0", "interfaces": [{"name": "net1"}]})
        case "detach", str() if row is not None:
            books.begin_detach([row.attachment_id])
        case "drop", str() if row is not None:
            books.finish_detach(row, lease_owed=True)
        case "withhold", str():
            books.quarantine(value, "its driver hangs")
        case "grant", (str() as name, dict() as units):
            books.grant(granted(name, units))
        case "bind", set():
            books.bind(value, PodRef("ns", "pod", "uid"))
        case "release", (set() as units, float() as before):
            books.release(units, before)
        case "move", dict():
            books.move(value)
        case "specs", set():
            books.set_specs({key: Spec("vf", {"env": [f"KEY={key}"]}) for key in value})
        case "slot", (str() as key, ""):
            books.unbind(slot for slot in books.bound_slots() if slot.key == key)
        case "slot", (str() as key, str() as device):
            books.bind_slots([bound_slot(key, "rdma/vf", "vf", device, "main", "sandbox", "net1", None, {})])
        case "prepare", (str() as name, str() as device, bool() as exclusive):
            prepare(books, name, claimed_vf(device, key=f"uid-{name}-0", exclusive=exclusive))
        case "unprepare", str():
            books.remove_claim(f"uid-{value}")
        case "pods", str():
            books.set_claim_pods(f"uid-{value}", [PodRef("ns", "pod", "uid"), PodRef("ns", "other")])
        case "prepared", str():
            books.set_claim_state(f"uid-{value}", ClaimState.PREPARED)


def told_by(books: Ledger) -> tuple[Any, ...]:
    """List all that books say, and the slots in the order in which they were bound."""
    listed = books.holds(), books.attachments(), books.quarantines(), books.owed_leases(), books.claims()
    return *listed, books.bound_slots()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(STEPS, max_size=25), min_size=1, max_size=2))
def test_a_ledger_tells_the_same_before_and_after_it_is_opened_anew(boots: list[list[tuple[str, object]]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ticks = iter(range(10_000))
        for number, steps in enumerate(boots):
            with open_books(Path(folder), f"boot-{number}", lambda: float(next(ticks))) as books:
                for step, value in steps:
                    with contextlib.suppress(ClaimConflict, DeviceBusy, LedgerError):
                        take(books, step, value)
                told = told_by(books)
                found = read_books(books.path)
                assert (found.attachments, found.quarantines, found.owed_leases, found.claims) == told[1:5]
                if number == 0:  # what slots were bound to in an earlier boot is in the file until another is bound
                    assert sorted(found.holds, key=attrgetter("since", "key")) == [*told[0]]
                held = [{hold.key: hold for hold in books.holds_on(device)} for device in DEVICES]
            with open_books(Path(folder), f"boot-{number}") as books:
                assert told_by(books) == told
                assert [{hold.key: hold for hold in books.holds_on(device)} for device in DEVICES] == held
            everything = [*told[0], *(hold for claim in told[4] for hold in claim.devices)]
            assert held == [{hold.key: hold for hold in everything if device in hold.devices} for device in DEVICES]
