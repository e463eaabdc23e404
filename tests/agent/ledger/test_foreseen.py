"""Results made while the kernel works, before anybody knows that they come so."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.ledger import Ledger
from agent.model.allocation import Attachment
from tests.agent.books import VF, attach, open_books, owner
from tests.agent.ledger.on_disk import busy, die, in_database, seen, until_empty


def until_foreseen(books: Ledger, row: Attachment) -> Mapping[str, Any]:
    deadline = time.monotonic() + 30
    while (found := books.foreseen(row)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


def test_a_result_that_was_foreseen_is_kept_as_any_other(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    threads: list[str] = []

    def foresee() -> Mapping[str, Any]:
        threads.append(threading.current_thread().name)
        return {"cniVersion": "1.0.0", "interfaces": [{"name": "net1"}]}

    with open_books(folder) as books:
        row = attach(books, VF, owner(), foresee)
        answer = until_foreseen(books, row)
        assert seen(books.attachments()) == [(VF, "attaching")]
        with busy(folder):
            books.finish_attach([row.attachment_id], answer)
            die(folder, tmp_path / "grave")
        expected = books.attachments()
        assert books.foreseen(row) is None
    assert threads == ["ledger"]
    assert seen(expected) == [(VF, "attached")]
    assert expected[0].result == {"cniVersion": "1.0.0", "interfaces": [{"name": "net1"}]}
    with open_books(tmp_path / "grave") as books:
        assert books.attachments() == expected


def test_a_result_that_comes_otherwise_than_foreseen_is_what_is_kept(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        row = attach(books, VF, owner(), lambda: {"foreseen": True})
        until_foreseen(books, row)
        books.finish_attach([row.attachment_id], {"foreseen": False})
        until_empty(tmp_path)
    with open_books(tmp_path) as books:
        assert [row.result for row in books.attachments()] == [{"foreseen": False}]


def test_what_was_foreseen_of_a_row_that_goes_is_forgotten(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        row = attach(books, VF, owner(), dict)
        until_foreseen(books, row)
        books.finish_detach(row)
        assert books.foreseen(row) is None
        again = attach(books, VF, owner("c2"))
        books.finish_attach([again.attachment_id], {"of": "c2"})
        assert books.foreseen(again) is None
        assert [row.result for row in books.attachments()] == [{"of": "c2"}]


def test_a_result_that_cannot_be_foreseen_does_not_keep_the_database_from_following(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def foresee() -> Mapping[str, Any]:
        raise KeyError("nothing")

    with open_books(tmp_path) as books:
        row = attach(books, VF, owner(), foresee)
        until_empty(tmp_path)
        assert in_database(tmp_path) == [(VF, "attaching")]
        assert books.foreseen(row) is None
        books.finish_attach([row.attachment_id], {})
        until_empty(tmp_path)
        assert in_database(tmp_path) == [(VF, "attached")]
    assert caplog.messages == [f"what is to be said of attachment {row.attachment_id} was not made beforehand"]
