from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from agent.errors import InstallFailed
from cni.install import install, remove

RELAY = b"\x7fELF the relay"


@pytest.fixture
def relay(tmp_path: Path) -> Path:
    path = tmp_path / "relay"
    path.write_bytes(RELAY)
    return path


def test_the_relay_is_put_under_the_plugins_name_and_can_be_executed(relay: Path, tmp_path: Path) -> None:
    target = tmp_path / "opt" / "cni" / "bin"
    assert install(relay, target)
    assert (target / "nodefabric").read_bytes() == RELAY
    assert (target / "nodefabric").stat().st_mode & 0o7777 == 0o755
    assert [path.name for path in target.iterdir()] == ["nodefabric"]


def test_installing_the_same_again_touches_nothing(relay: Path, tmp_path: Path) -> None:
    install(relay, tmp_path / "bin")
    before = (tmp_path / "bin" / "nodefabric").stat()
    assert not install(relay, tmp_path / "bin")
    assert (tmp_path / "bin" / "nodefabric").stat() == before


def test_another_version_replaces_the_file_while_the_old_one_stays_usable_to_who_runs_it(
    relay: Path, tmp_path: Path
) -> None:
    install(relay, tmp_path / "bin")
    with (tmp_path / "bin" / "nodefabric").open("rb") as running:
        relay.write_bytes(RELAY + b" 2")
        assert install(relay, tmp_path / "bin")
        assert running.read() == RELAY
    assert (tmp_path / "bin" / "nodefabric").read_bytes() == RELAY + b" 2"


def test_a_running_relay_can_be_replaced(tmp_path: Path) -> None:
    sleeper = Path("/bin/sleep")
    install(sleeper, tmp_path / "bin")
    process = subprocess.Popen([tmp_path / "bin" / "nodefabric", "30"])
    try:
        relay = tmp_path / "relay"
        relay.write_bytes(RELAY)
        assert install(relay, tmp_path / "bin")
    finally:
        process.kill()
        process.wait()


def test_wrong_mode_is_put_right(relay: Path, tmp_path: Path) -> None:
    install(relay, tmp_path / "bin")
    (tmp_path / "bin" / "nodefabric").chmod(0o644)
    assert install(relay, tmp_path / "bin")
    assert os.access(tmp_path / "bin" / "nodefabric", os.X_OK)


def test_a_link_is_replaced_and_its_target_left_alone(relay: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    victim = tmp_path / "victim"
    victim.write_bytes(RELAY)
    (tmp_path / "bin" / "nodefabric").symlink_to(victim)
    assert install(relay, tmp_path / "bin")
    assert not (tmp_path / "bin" / "nodefabric").is_symlink()
    assert victim.read_bytes() == RELAY


def test_leftovers_of_a_killed_installation_are_removed(relay: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / ".nodefabric-install-abc").write_bytes(b"half")
    (tmp_path / "bin" / "bridge").write_bytes(b"another plugin")
    install(relay, tmp_path / "bin")
    assert sorted(path.name for path in (tmp_path / "bin").iterdir()) == ["bridge", "nodefabric"]


def test_removing_takes_away_ours_only_and_once(relay: Path, tmp_path: Path) -> None:
    install(relay, tmp_path / "bin")
    (tmp_path / "bin" / "bridge").write_bytes(b"another plugin")
    assert remove(tmp_path / "bin")
    assert not remove(tmp_path / "bin")
    assert not remove(tmp_path / "absent")
    assert [path.name for path in (tmp_path / "bin").iterdir()] == ["bridge"]


def test_a_missing_relay_or_one_that_is_no_executable_is_refused(relay: Path, tmp_path: Path) -> None:
    with pytest.raises(InstallFailed, match="--relay"):
        install(tmp_path / "absent", tmp_path / "bin")
    relay.write_bytes(b"#!/bin/sh\n")
    with pytest.raises(InstallFailed, match="not the relay"):
        install(relay, tmp_path / "bin")
    assert not (tmp_path / "bin").exists()


def test_a_folder_that_cannot_be_written_is_named(relay: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InstallFailed, match="file"):
        install(relay, tmp_path / "file" / "bin")
    (tmp_path / "bin" / "nodefabric").mkdir(parents=True)
    with pytest.raises(InstallFailed, match="Is a directory"):
        install(relay, tmp_path / "bin")
    assert [path.name for path in (tmp_path / "bin").iterdir()] == ["nodefabric"]
