from __future__ import annotations

import fcntl
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from agent.errors import InstallFailed
from cni.install import folder
from cni.install.installation import BACKUP, LINKED, MARKER, Installation, install, remove
from tests.cni.killed import kill_at_each_step
from tests.cni.small_disk import disk

RELAY = b"\x7fELF the relay"


@pytest.fixture
def wanted(tmp_path: Path) -> Installation:
    (tmp_path / "relay").write_bytes(RELAY)
    (tmp_path / "bin").mkdir()
    return Installation(tmp_path / "relay", tmp_path / "bin")


def names(target: Path) -> list[str]:
    return sorted(path.name for path in target.iterdir() if path.name not in (LINKED, MARKER))


@pytest.mark.parametrize("before", ["nothing", "another mode", "a link", "half a file of a killed installer"])
def test_the_relay_is_put_under_the_plugins_name_whatever_was_there(
    wanted: Installation, tmp_path: Path, before: str
) -> None:
    victim, relay = tmp_path / "victim", wanted.target / "nodefabric"
    victim.write_bytes(RELAY)
    (wanted.target / "bridge").write_bytes(b"another plugin")
    if before == "another mode":
        install(wanted)
        relay.chmod(0o644)
    elif before == "a link":
        relay.symlink_to(victim)
    elif before.startswith("half"):
        (wanted.target / ".nodefabric-install-abc").write_bytes(b"half")
    assert install(wanted) == ("nodefabric",)
    assert (relay.is_symlink(), relay.read_bytes(), relay.stat().st_mode & 0o7777) == (False, RELAY, 0o755)
    assert names(wanted.target) == ["bridge", "nodefabric"]
    assert victim.read_bytes() == RELAY


def test_removing_takes_away_ours_only_and_once(wanted: Installation, tmp_path: Path) -> None:
    install(wanted)
    (wanted.target / "bridge").write_bytes(b"another plugin")
    assert remove(wanted.target) == ("nodefabric",)
    assert remove(wanted.target) == ()
    assert remove(tmp_path / "absent") == ()
    assert [path.name for path in wanted.target.iterdir()] == ["bridge"]


def test_removing_without_the_marker_leaves_no_link_to_nothing(wanted: Installation) -> None:
    (wanted.target / "sriov").write_bytes(b"another plugin")
    assert install(replace(wanted, replace=("sriov", "rdma"), force=True)) == ("nodefabric", "sriov", "rdma")
    assert [(wanted.target / name).readlink() for name in ("sriov", "rdma")] == [Path(LINKED)] * 2
    (wanted.target / MARKER).unlink()
    assert remove(wanted.target) == ("sriov", "rdma", "nodefabric")
    assert names(wanted.target) == ["sriov"]
    assert (wanted.target / "sriov").read_bytes() == b"another plugin"


def test_a_relay_that_is_no_executable_is_refused(wanted: Installation) -> None:
    wanted.relay.write_bytes(b"#!/bin/sh\n")
    with pytest.raises(InstallFailed, match="not the relay"):
        install(wanted)
    assert list(wanted.target.iterdir()) == []


def test_a_folder_in_the_relays_place_is_named(wanted: Installation) -> None:
    (wanted.target / "nodefabric").mkdir()
    with pytest.raises(InstallFailed, match="Is a directory"):
        install(wanted)
    assert names(wanted.target) == ["nodefabric"]


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_plugin_of_somebody_else_is_not_overwritten_but_by_force_and_put_back(
    wanted: Installation, kind: str
) -> None:
    foreign = wanted.target / "sriov"
    if kind == "file":
        foreign.write_bytes(b"foreign")
        foreign.chmod(0o711)
    else:
        foreign.symlink_to("elsewhere")
    before = foreign.lstat()
    wanted = replace(wanted, replace=("sriov",))
    with pytest.raises(InstallFailed, match="sriov is a plugin of somebody else's"):
        install(wanted)
    assert foreign.lstat() == before
    install(replace(wanted, force=True))
    assert foreign.readlink() == Path(LINKED)
    assert names(wanted.target) == ["nodefabric", "sriov", "sriov" + BACKUP]
    remove(wanted.target)
    assert names(wanted.target) == ["sriov"]
    assert (foreign.lstat().st_ino, foreign.lstat().st_mode) == (before.st_ino, before.st_mode)


def test_a_plugin_that_came_back_by_itself_is_let_be(wanted: Installation) -> None:
    (wanted.target / "sriov").write_bytes(b"old")
    install(replace(wanted, replace=("sriov",), force=True))
    (wanted.target / "sriov").unlink()
    (wanted.target / "sriov").write_bytes(b"new")
    remove(wanted.target)
    assert names(wanted.target) == ["sriov"]
    assert (wanted.target / "sriov").read_bytes() == b"new"


def test_a_plugin_that_is_copied_over_its_link_spoils_no_other_program(wanted: Installation, tmp_path: Path) -> None:
    """As sriov-cni's own image installs it, where its cp is that of coreutils."""
    wanted = replace(wanted, replace=("sriov",), force=True)
    install(wanted)
    (tmp_path / "sriov").write_bytes(b"another program")
    subprocess.run(["cp", "-f", tmp_path / "sriov", wanted.target], check=True)
    assert (wanted.target / "sriov").read_bytes() == b"another program"
    assert (wanted.target / "nodefabric").read_bytes() == RELAY
    assert install(wanted) == (LINKED,)
    assert (wanted.target / "sriov").read_bytes() == RELAY


def test_another_instances_installation_is_taken_over_by_force(wanted: Installation) -> None:
    install(wanted)
    install(replace(wanted, instance="other", force=True))
    assert json.loads((wanted.target / MARKER).read_text())["instance"] == "other"


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"instance": 1, "replaced": 2}', b"\xff", b"[" * 100_000])
def test_a_marker_that_cannot_be_understood_needs_force(wanted: Installation, content: bytes) -> None:
    (wanted.target / MARKER).write_bytes(content)
    with pytest.raises(InstallFailed, match="cannot be understood"):
        install(wanted)
    assert install(replace(wanted, force=True))


def test_a_marker_cannot_make_us_remove_anything_but_links_of_ours(wanted: Installation) -> None:
    (wanted.target / "sriov").write_bytes(b"foreign")
    (wanted.target / "bridge").write_bytes(b"foreign")
    (wanted.target / MARKER).write_text('{"instance": "nodefabric", "replaced": ["sriov", "bridge", "../x"]}')
    assert remove(wanted.target) == ()
    assert names(wanted.target) == ["bridge", "sriov"]


def test_two_installers_wait_for_each_other_and_one_gives_up(wanted: Installation) -> None:
    fd = os.open(wanted.target, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with (
            pytest.raises(InstallFailed, match="another installer is at work"),
            folder.locked(wanted.target, remedy="", seconds=0.1),
        ):
            pass
    finally:
        os.close(fd)
    assert install(wanted)


def test_a_full_disk_leaves_what_was_there(own_network: None, wanted: Installation, tmp_path: Path) -> None:
    with disk(tmp_path / "small", "size=64k"):
        small = replace(wanted, target=tmp_path / "small")
        install(small)
        wanted.relay.write_bytes(RELAY + b"x" * 100_000)
        with pytest.raises(InstallFailed, match="No space left on device"):
            install(small)
        assert (small.target / "nodefabric").read_bytes() == RELAY
        assert names(small.target) == ["nodefabric"]


def test_a_read_only_folder_is_told(own_network: None, wanted: Installation, tmp_path: Path) -> None:
    with (
        disk(tmp_path / "small", "ro"),
        pytest.raises(InstallFailed, match="Read-only file system: mount the runtime's plugin folder"),
    ):
        install(replace(wanted, target=tmp_path / "small"))


def test_an_installer_that_is_killed_at_any_step_leaves_whole_plugins(tmp_path: Path) -> None:
    """And the next one finishes its work."""
    here = Installation(Path("relay"), Path("bin"), replace=("sriov", "rdma"), force=True)
    relay, foreign = RELAY + b"2" * 70_000, b"foreign"

    def prepare(place: Path) -> None:
        (place / "relay").write_bytes(relay)
        (place / "bin").mkdir()
        (place / "bin/nodefabric").write_bytes(RELAY)
        (place / "bin/sriov").write_bytes(foreign)

    for place in kill_at_each_step(tmp_path, lambda: install(here), prepare):
        target = place / "bin"
        assert (target / "nodefabric").read_bytes() in (RELAY, relay)
        assert (target / "sriov").read_bytes() in (RELAY, relay, foreign)
        wanted = Installation(place / "relay", target, replace=("sriov", "rdma"), force=True)
        removed_at_once = place / "removed"
        subprocess.run(["cp", "-a", target, removed_at_once], check=True)
        remove(removed_at_once)
        assert {name: (removed_at_once / name).read_bytes() for name in names(removed_at_once)} == {"sriov": foreign}
        install(wanted)
        assert names(target) == ["nodefabric", "rdma", "sriov", "sriov" + BACKUP]
        assert (target / "sriov").read_bytes() == relay
        assert (target / ("sriov" + BACKUP)).read_bytes() == foreign


def test_a_removal_that_is_killed_at_any_step_can_be_done_again(tmp_path: Path) -> None:
    def prepare(place: Path) -> None:
        (place / "relay").write_bytes(RELAY)
        (place / "bin").mkdir()
        (place / "bin/sriov").write_bytes(b"foreign")
        install(Installation(place / "relay", place / "bin", replace=("sriov", "rdma"), force=True))

    for place in kill_at_each_step(tmp_path, lambda: remove(Path("bin")), prepare):
        assert (place / "bin/sriov").read_bytes() in (RELAY, b"foreign")
        remove(place / "bin")
        assert {path.name: path.read_bytes() for path in (place / "bin").iterdir()} == {"sriov": b"foreign"}
