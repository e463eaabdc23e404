"""What the ledger keeps in memory is what the file holds, whatever was written and however it ended."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.errors import DeviceBusy, LedgerError
from agent.ledger import Ledger
from agent.model.allocation import PodRef
from tests.node import attach, open_books

DEVICES = [f"0000:3b:00.{n}" for n in range(3)]
UNITS = [f"unit-{n}" for n in range(4)]
NAMES = st.sampled_from(["rdma/vf", "rdma/hca"])
STEPS = st.one_of(
    st.tuples(st.just("begin"), st.sampled_from(DEVICES)),
    st.tuples(st.just("finish"), st.sampled_from(DEVICES)),
    st.tuples(st.just("detach"), st.sampled_from(DEVICES)),
    st.tuples(st.just("drop"), st.sampled_from(DEVICES)),
    st.tuples(st.just("grant"), st.tuples(NAMES, st.dictionaries(st.sampled_from(UNITS), st.sampled_from(DEVICES)))),
    st.tuples(st.just("bind"), st.sets(st.sampled_from(UNITS))),
    st.tuples(st.just("release"), st.tuples(st.sets(st.sampled_from(UNITS)), st.floats(0, 40))),
    st.tuples(st.just("move"), st.dictionaries(st.sampled_from(UNITS), st.sampled_from(DEVICES))),
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
            books.finish_detach(row)
        case "grant", (str() as name, dict() as units):
            books.grant(name, units)
        case "bind", set():
            books.bind(value, PodRef("ns", "pod", "uid"))
        case "release", (set() as units, float() as before):
            books.release(units, before)
        case "move", dict():
            books.move_grants(value)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, max_size=25))
def test_a_ledger_tells_the_same_before_and_after_it_is_opened_anew(steps: list[tuple[str, object]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ticks = iter(range(10_000))
        with open_books(Path(folder), clock=lambda: float(next(ticks))) as books:
            for step, value in steps:
                try:
                    take(books, step, value)
                except (DeviceBusy, LedgerError):
                    continue
            told = books.attachments(), books.grants(), [books.granted_resource(device) for device in DEVICES]
        with open_books(Path(folder)) as books:
            again = books.attachments(), books.grants()
            assert again == told[:2]
            for device, resource_name in zip(DEVICES, told[2], strict=True):
                assert resource_name in {g.resource_name for g in again[1] if g.device == device} or (
                    resource_name is None and device not in {g.device for g in again[1]}
                )


def test_what_could_not_be_written_is_not_told(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        begin(books, DEVICES[0])
        with pytest.raises(DeviceBusy):
            begin(books, DEVICES[0])
        (row,) = books.attachments()
        books.finish_attach([row.attachment_id], {})
        with pytest.raises(LedgerError, match="not in state attaching"):
            books.finish_attach([row.attachment_id], {"twice": True})
        assert books.attachments()[0].result == {}
