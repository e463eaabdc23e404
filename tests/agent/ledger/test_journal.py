"""Rows in the journal: what is read after any death, and when there is no room."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from agent.ledger import journal
from agent.ledger.journal import FILE_BYTES, HALF_BYTES, PLACES, Journal, Word


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows"


def put(rows: Journal, key: int, document: object) -> bool:
    return rows.put(Word.of(key, json.dumps(document)))


def spoil(path: Path, offset: int) -> None:
    """Change one byte."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 0xFF
    path.write_bytes(content)


def test_the_newest_word_about_each_row_is_read(path: Path) -> None:
    rows = Journal(path)
    for word in range(5):
        assert put(rows, 3, {"word": word})
    assert put(rows, 8, {"word": "other"})
    assert journal.read(path) == {3: {"word": 4}, 8: {"word": "other"}}
    rows.close()


def test_a_torn_word_leaves_the_one_before(path: Path) -> None:
    rows = Journal(path)
    place = FILE_BYTES - 2 * HALF_BYTES  # the last free one is taken first
    put(rows, 3, {"word": 0})
    put(rows, 3, {"word": 1})
    spoil(path, place + HALF_BYTES + 20)
    assert journal.read(path) == {3: {"word": 0}}
    spoil(path, place + 20)
    assert journal.read(path) == {}
    rows.close()


@pytest.mark.parametrize("words", [1, 2, 3, 4])
def test_a_cleared_row_is_gone_whatever_was_said_of_it(path: Path, words: int) -> None:
    rows = Journal(path)
    for word in range(words):
        put(rows, 3, {"word": word})
    rows.clear(3)
    rows.clear(3)
    assert journal.read(path) == {}
    rows.close()


def test_a_place_that_is_free_again_says_nothing_of_the_former_row(path: Path) -> None:
    rows = Journal(path)
    put(rows, 3, {})
    put(rows, 3, {})
    rows.clear(3)
    put(rows, 4, {"new": True})
    assert journal.read(path) == {4: {"new": True}}
    rows.close()


def test_rows_without_room_are_refused(path: Path) -> None:
    rows = Journal(path)
    assert not put(rows, 1, {"text": "x" * HALF_BYTES})
    assert all(put(rows, key, {}) for key in range(PLACES))
    assert not put(rows, PLACES, {})
    rows.clear(0)
    assert put(rows, PLACES, {})
    assert len(journal.read(path)) == PLACES
    assert path.stat().st_size == FILE_BYTES
    rows.close()


class Failing(Journal):
    """A journal on a disk that breaks when it is told to."""

    broken = False

    def _write(self, word: bytes, offset: int) -> None:
        super()._write(word[: len(word) // 2] if self.broken else word, offset)
        if self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_write_that_fails_takes_no_place(path: Path) -> None:
    rows = Failing(path)
    rows.broken = True
    for key in range(PLACES):
        with pytest.raises(OSError, match="Input/output error"):
            put(rows, key, {"never": "said"})
    assert journal.read(path) == {}
    rows.broken = False
    assert all(put(rows, key, {"word": key}) for key in range(100, 100 + PLACES))
    assert journal.read(path) == {key: {"word": key} for key in range(100, 100 + PLACES)}
    rows.close()


def test_a_newer_word_that_fails_leaves_the_older_one_where_it_can_be_cleared(path: Path) -> None:
    rows = Failing(path)
    assert put(rows, 3, {"word": 0})
    rows.broken = True
    with pytest.raises(OSError, match="Input/output error"):
        put(rows, 3, {"word": 1})
    assert journal.read(path) == {3: {"word": 0}}
    rows.clear(3)
    assert journal.read(path) == {}
    rows.close()


def test_all_its_room_is_on_the_disk_from_the_beginning(path: Path) -> None:
    rows = Journal(path)
    assert path.stat().st_blocks * 512 >= FILE_BYTES
    assert path.stat().st_mode & 0o777 == 0o600
    rows.close()


@pytest.mark.parametrize("content", [b"", b"x" * 100, os.urandom(FILE_BYTES)])
def test_what_is_no_journal_says_nothing(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert journal.read(path) == {}
    assert journal.read(path.with_name("none")) == {}
