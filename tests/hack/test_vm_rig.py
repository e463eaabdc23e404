"""The virtual machine's rig, as far as it can be tested without booting anything."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
from rig import release, session, suite
from rig.errors import Impossible, RigError
from rig.progress import Deadline


@pytest.mark.parametrize(
    ("os_release", "kernel"),
    [
        ('ID=debian\nVERSION_ID="12"\nVERSION_CODENAME=bookworm\n', "bookworm-backports"),
        ('ID=debian\nVERSION_ID="13"\nVERSION_CODENAME=trixie\n', "trixie"),
        ("ID=debian\nVERSION_CODENAME=forky\n", "trixie"),
        ('ID=ubuntu\nVERSION_ID="24.04"\nVERSION_CODENAME=noble\n', "trixie"),
    ],
)
def test_a_known_distribution_names_the_suite_of_its_kernel(os_release: str, kernel: str) -> None:
    assert release.parse(os_release).kernel_suite == kernel


@pytest.mark.parametrize(
    ("os_release", "words"),
    [
        ('PRETTY_NAME="Fedora 44"\nID=fedora\nVERSION_ID=44\n', "Fedora 44 is not supported: Debian 12"),
        ('PRETTY_NAME="Ubuntu 22.04"\nID=ubuntu\nVERSION_ID="22.04"\n', "Ubuntu 22.04 is too old"),
    ],
)
def test_an_unknown_distribution_is_impossible_and_says_what_is_needed(os_release: str, words: str) -> None:
    with pytest.raises(Impossible, match=words):
        release.parse(os_release)


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


def test_drivers_that_cannot_be_built_leave_tests_out_loudly_but_not_in_ci(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = _script(tmp_path, "echo no compiler >&2; exit 1")
    assert suite.extra_modules(tmp_path, {}, Deadline.after(30), program) == {}
    assert "NOT run" in (said := capsys.readouterr().err)
    assert "no compiler" in said
    with pytest.raises(RigError, match="no compiler"):
        suite.extra_modules(tmp_path, {"CI": "true"}, Deadline.after(30), program)


def _script(folder: Path, text: str) -> Path:
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path
