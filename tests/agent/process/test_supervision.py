"""Work that goes on after an error nobody expected; a loop that stands still; folders that a container has lost."""

from __future__ import annotations

import asyncio
import logging
import subprocess
from pathlib import Path

import pytest

from agent.process.supervision import STUCK_SECONDS, Heartbeat, Volumes, supervised
from tests.awaiting import until


def test_what_fails_begins_anew_and_the_log_tells_why(caplog: pytest.LogCaptureFixture) -> None:
    runs: list[int] = []
    told: list[str | None] = []

    async def run() -> None:
        runs.append(len(told))
        if len(runs) < 3:
            raise KeyError("0000:3b:00.2")

    with caplog.at_level(logging.ERROR):
        asyncio.run(supervised(run, "recent events", told.append, again_seconds=0))
    assert runs == [0, 2, 4]
    assert told == ["failed unexpectedly, and begins again within 0 s: see the log", None] * 2
    assert [record.message for record in caplog.records] == ["recent events failed, and begin again in 0 s"] * 2
    assert "0000:3b:00.2" in caplog.text


def test_who_cancels_it_ends_it() -> None:
    async def run() -> None:
        await asyncio.Event().wait()

    async def cancelled() -> None:
        task = asyncio.create_task(supervised(run, "node events"))
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())


def test_a_loop_that_stands_still_is_told_after_a_while() -> None:
    now = [0.0]
    heart = Heartbeat(lambda: now[0])
    now[0] = 1000.0
    assert heart.stopped() is None

    async def beat_once() -> None:
        task = asyncio.create_task(heart.run())
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(beat_once())
    now[0] += STUCK_SECONDS
    assert heart.stopped() is None
    now[0] += 5
    assert heart.stopped() == "the event loop has stood still for 20 s"


def test_the_watchdog_hears_each_beat_and_the_end() -> None:
    heard: list[float | None] = []

    async def beat_twice() -> None:
        task = asyncio.create_task(Heartbeat(watchdog=heard.append).run())
        await until(lambda: len(heard) > 1)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(beat_twice())
    assert heard == [STUCK_SECONDS, STUCK_SECONDS, None]


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
