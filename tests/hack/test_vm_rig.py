"""The virtual machine's rig, as far as it can be tested without booting anything."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
from rig import session, suite
from rig.errors import RigError
from rig.progress import Deadline


def test_another_run_that_holds_the_cache_is_named(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        lock.write("4711")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RigError, match=f"process 4711 still holds {tmp_path}/lock"):
            session.prepare(session.Order(cache=tmp_path), Deadline.after(0.5))


def test_what_cannot_run_is_skipped_loudly_but_fails_in_ci(capsys: pytest.CaptureFixture[str]) -> None:
    assert suite.skip("there is no root", {}) == 0
    assert "SKIPPED" in capsys.readouterr().err
    assert suite.skip("there is no root", {"CI": "true"}) != 0
    assert "FAILED" in capsys.readouterr().err
