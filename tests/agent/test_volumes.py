"""Folders of the host that a container has lost."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from agent.volumes import Volumes


def test_a_folder_that_was_deleted_beneath_the_mount_is_named(
    own_network: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host, seen, other = tmp_path / "host", tmp_path / "seen", tmp_path / "other"
    for folder in (host, seen, other):
        folder.mkdir()
    subprocess.run(["mount", "--bind", host, seen], check=True)
    try:
        volumes = Volumes([seen, other, tmp_path / "missing"])
        assert volumes.lost() is None
        host.rmdir()
        host.mkdir()
        for _ in range(2):
            assert (volumes.lost() or "").endswith(f": {seen}")
        assert len(caplog.records) == 1
        with pytest.raises(FileNotFoundError):
            (seen / "socket").touch()
    finally:
        subprocess.run(["umount", seen], check=True)


def test_a_file_system_that_counts_no_links_has_lost_nothing(own_network: None, tmp_path: Path) -> None:
    host, seen, mounts = tmp_path / "host", tmp_path / "seen", tmp_path / "mountinfo"
    host.mkdir()
    seen.mkdir()
    subprocess.run(["mount", "--bind", host, seen], check=True)
    try:
        host.rmdir()
        mounts.write_text(f"36 35 98:0 / {seen} rw,noatime master:1 - fuse.odd /dev/odd rw\n")
        assert Volumes([seen], mounts).lost() is None
        assert Volumes([seen], tmp_path / "missing").lost() is None
    finally:
        subprocess.run(["umount", seen], check=True)
