"""The books as another process reads them: a copy of one moment, made without writing a byte.

The agent may be writing meanwhile, or not run at all, or be a newer or an older version.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agent.errors import LedgerError
from agent.ledger import rows, schema
from agent.model.allocation import Attachment, Binding, Claim, Grant, OwedLease, Quarantine
from agent.model.vf_identity import Rail

WAIT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Books:
    """All that the ledger held at one moment."""

    grants: tuple[Grant, ...] = ()
    attachments: tuple[Attachment, ...] = ()
    quarantines: tuple[Quarantine, ...] = ()
    owed_leases: tuple[OwedLease, ...] = ()
    bindings: tuple[Binding, ...] = ()
    """Those of an earlier boot too."""
    claims: tuple[Claim, ...] = ()


def read(path: Path) -> Books:
    """Read a ledger file. One that is not there is empty.

    Raises LedgerError for a file that is damaged, cannot be read, or is of a newer version.
    """
    if not path.exists():
        return Books()
    with _copied(path) as copy:
        return Books(
            tuple(map(rows.grant, copy.execute("SELECT * FROM grants ORDER BY granted_at, unit_id"))),
            tuple(map(rows.attachment, copy.execute("SELECT * FROM attachments ORDER BY attachment_id"))),
            tuple(map(rows.quarantine, copy.execute("SELECT * FROM quarantine ORDER BY device"))),
            tuple(map(rows.owed_lease, copy.execute("SELECT * FROM owed_leases ORDER BY lease_id"))),
            tuple(map(rows.binding, copy.execute("SELECT * FROM bindings ORDER BY unit_id"))),
            rows.claims(
                copy.execute("SELECT * FROM claims ORDER BY namespace, name, claim_uid"),
                copy.execute("SELECT * FROM claim_devices ORDER BY rowid"),
            ),
        )


def read_rails(path: Path) -> tuple[Rail, ...]:
    """Read how a node's rails were numbered last. Raises LedgerError as `read` does, and if there are no books."""
    with _copied(path) as copy:
        return tuple(map(rows.rail, copy.execute("SELECT * FROM rails ORDER BY number, plane")))


@contextlib.contextmanager
def _copied(path: Path) -> Iterator[sqlite3.Connection]:
    try:
        path.stat()
        with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as copy:
            _copy(path, copy)
            copy.row_factory = sqlite3.Row
            schema.bring_up_to_date(copy, path)
            yield copy
    except FileNotFoundError as error:
        raise LedgerError(f"{path} is not there") from error
    except (sqlite3.Error, OSError) as error:
        raise LedgerError(f"{path} cannot be read: {error}: run this as root, with the agent's stateDir") from error


def _copy(path: Path, copy: sqlite3.Connection) -> None:
    source = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=WAIT_SECONDS)
    with contextlib.closing(source):
        source.backup(copy)
