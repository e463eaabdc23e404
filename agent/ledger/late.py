"""Attachments on their way from the journal into the database, which follows as soon as it can."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from agent.errors import LedgerError
from agent.ledger import journal, rows
from agent.ledger.alarm import Alarm
from agent.model.allocation import Attachment

FOLLOW_SECONDS = 0.004
"""How long the database lets the kernel begin with a row's device: on few processors it would be in the way of that.

What an ADD waits for then takes longer than this, and the database is through by the time the device has arrived.
"""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class LateRow:
    """A row as the journal has it and the database does not."""

    row: Attachment
    durable: bool
    """Whether a power cut must not take it."""
    is_new: bool
    """Whether the database has never heard of it."""


@dataclass(frozen=True, slots=True)
class _Foreseen:
    """The *attached* row that is to follow an *attaching* one, and its word for the journal."""

    row: Attachment
    word: journal.Word


class LateRows:
    """What the database lacks, and the thread that hands it on."""

    def __init__(self, follow: Callable[[], object]) -> None:
        """`follow` brings the database up to date, or raises LedgerError."""
        self._follow = follow
        self._guard = threading.Lock()
        self._waiting: dict[int, LateRow] = {}
        self._alarm: Alarm | None = None
        self._lasting: dict[int, str] = {}
        """Of each row that is *attaching* what will not change, as JSON: the end of an ADD says the same once more."""
        self._awaited: dict[int, Callable[[], Attachment]] = {}
        """Of each row that is *attaching* what makes the row that is to follow, until the thread has come to it."""
        self._foreseen: dict[int, _Foreseen] = {}
        self._is_set = self._ending = False
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)
        self._path: Path | None = None
        self._journal: journal.Journal | None = None
        self._stuck = False
        """Whether the database did not take the last rows: then it must be asked before anything is touched."""

    def open(self, path: Path) -> None:
        """Begin an empty journal. Without room for one, every row goes straight into the database."""
        self._path = path
        try:
            self._journal = journal.Journal(path)
            self._alarm = Alarm(FOLLOW_SECONDS)
        except OSError as error:
            log.warning("%s: %s: pods start a little slower", path, error)
            # What an earlier process left there is in the database, and must not be read a second time.
            with contextlib.suppress(OSError):
                os.unlink(path)
            self._end_journal(keep=True)
        else:
            self._thread.start()

    def end(self) -> None:
        """Hand on what there is, and end the thread."""
        if self._alarm is not None and self._thread.is_alive():
            self._ending = True
            if self._alarm.set():
                self._thread.join()

    def close(self) -> None:
        """Close the journal, once the database is closed. What that did not take stays in the file."""
        with self._guard:
            self._end_journal(keep=bool(self._waiting))
            if self._alarm is not None:
                self._alarm.close()
                self._alarm = None

    def put(self, row: Attachment, durable: bool, follower: Callable[[], Attachment] | None = None) -> bool:
        """Write a row into the journal. False if it must go straight into the database. Raises OSError.

        `follower` makes the row that `foreseen` may return later. It is called on another thread, and must not block.
        """
        with self._guard:
            if self._journal is None or self._stuck:
                return False
            key = row.attachment_id
            before, foreseen = self._waiting.get(key), self._foreseen.get(key)
            if foreseen is not None and foreseen.row is row:
                lasting, word = "", foreseen.word
            else:
                lasting = self._lasting.get(key) or rows.lasting_text(row)
                word = _word(lasting, row)
            if not self._journal.put(word):
                return False
            if row.result is None:
                self._lasting[key] = lasting
                if follower is not None:
                    self._awaited[key] = follower
            else:
                self._forget(key)
            self._waiting[key] = LateRow(
                row,
                durable or (before is not None and before.durable),
                is_new=before.is_new if before is not None else row.result is None,
            )
            if self._alarm is not None and not self._is_set:
                self._is_set = self._alarm.set()
        return True

    def forget(self, attachment_ids: Iterable[int]) -> None:
        """Take note that no more is to be said of these as *attaching* rows."""
        with self._guard:
            for attachment_id in attachment_ids:
                self._forget(attachment_id)

    def foreseen(self, attachment_id: int) -> Attachment | None:
        """Return the row that is to follow an *attaching* one, if it was made meanwhile: to `put` it takes less."""
        found = self._foreseen.get(attachment_id)
        return found.row if found is not None else None

    def holds(self, attachment_id: int) -> bool:
        """Tell whether the database lacks this row, or its newest state."""
        return attachment_id in self._waiting

    def waiting(self) -> tuple[LateRow, ...]:
        """List what the database lacks, oldest first."""
        with self._guard:
            return tuple(self._waiting.values())

    def settled(self, late: tuple[LateRow, ...]) -> None:
        """Take note of what the database has now: the caller still keeps others from writing there."""
        with self._guard:
            self._stuck = False
            for one in late:
                key = one.row.attachment_id
                newest = self._waiting.get(key)
                if newest is not one:
                    if newest is not None:
                        self._waiting[key] = LateRow(newest.row, durable=False, is_new=False)
                    continue
                del self._waiting[key]
                self._clear(key)

    def refused(self, late: tuple[LateRow, ...]) -> None:
        """Take note that the database did not take these: the next row must ask it first."""
        self._stuck = bool(late)

    def drop_new(self, attachment_id: int) -> bool:
        """Forget a row that the database has never heard of. The caller keeps the database from writing."""
        with self._guard:
            found = self._waiting.get(attachment_id)
            if found is None or not found.is_new:
                return False
            del self._waiting[attachment_id]
            self._clear(attachment_id)
            return True

    def _forget(self, key: int) -> None:
        for known in (self._lasting, self._awaited, self._foreseen):
            known.pop(key, None)

    def _clear(self, key: int) -> None:
        if self._journal is None:
            return
        try:
            self._journal.clear(key)
        except OSError as error:
            # What is out of date there must not be believed after a crash.
            log.error("%s: %s: rows go straight into the database from now on", self._path, error)
            self._end_journal(keep=False)

    def _end_journal(self, keep: bool) -> None:
        if self._journal is None:
            return
        if not keep:
            assert self._path is not None
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        self._journal.close()
        self._journal = None

    def _work(self) -> None:
        assert self._alarm is not None
        alarm = self._alarm
        while True:
            alarm.wait()
            with self._guard:  # or whoever has just set it would say so after it has gone off, and nobody set it again
                self._is_set, ending = False, self._ending
            self._foresee()
            if self._waiting:
                try:
                    self._follow()
                except LedgerError as error:
                    log.error("%s", error)
            if ending:
                return

    def _foresee(self) -> None:
        """Make the rows that are to follow, while the kernel moves the devices: the end of an ADD then waits less."""
        with self._guard:
            awaited = [(key, self._lasting[key], follower) for key, follower in self._awaited.items()]
            self._awaited.clear()
        for key, lasting, follower in awaited:
            try:
                row = follower()
                made = _Foreseen(row, _word(lasting, row))
            except Exception:  # the thread must live: without it the database would not follow
                log.exception("what is to be said of attachment %d was not made beforehand", key)
                continue
            with self._guard:
                if key in self._lasting:  # else the ADD was through before
                    self._foreseen[key] = made


def _word(lasting: str, row: Attachment) -> journal.Word:
    return journal.Word.of(row.attachment_id, f"{lasting[:-1]}, {rows.changing_text(row)[1:]}")
