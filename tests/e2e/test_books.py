"""The books lost, damaged, full or read by others, while pods run on the real agent."""

from __future__ import annotations

import json
import signal
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.sim.demo import still_attached
from hack.sim.stage import CONFIG, Stage, settled, wait
from tests.e2e.test_pods import allocatable

ROOT = Path(__file__).parents[2]


@pytest.fixture
def small(stage: Stage) -> Stage:
    """A stage that plays."""
    stage.build_node("h100-8gpu")
    configure(stage)
    stage.write_conflist()
    stage.start_kubelet("--seed", "7")
    stage.start_agent()
    stage.await_ready()
    return stage


def configure(stage: Stage, **more: Any) -> Path:
    return stage.write_config({**CONFIG, "netnsDirs": [str(stage.folder / "netns")], **more})


def nodefabric(stage: Stage, *arguments: str) -> tuple[int, str, str]:
    """Run a command as an operator does."""
    done = subprocess.run(
        [sys.executable, "-m", "hack.sim.agent", *arguments, "--config", str(stage.folder / "config.yaml")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def with_containers(stage: Stage) -> dict[str, Any] | None:
    """Return the status once it tells of each grant whose it is."""
    status = stage.status()
    return status if status["grants"] and all(grant["container"] for grant in status["grants"]) else None


def leases(stage: Stage) -> list[Path]:
    return list((stage.folder / "leases-rails/rails").glob("192.168.*"))


@pytest.mark.parametrize("how", ["lost", "damaged"])
def test_pods_keep_their_vfs_when_the_books_are_gone_and_are_cleaned_up_after(small: Stage, how: str) -> None:
    machine = small.machine
    before = machine.links.by_device()
    small.create_pod("a", {"rdma/vf": 2})
    small.await_pod("a")
    held = {row["device"] for row in small.status()["attachments"]}
    small.end("agent", signal.SIGKILL)
    for file in (small.folder / "state").glob("ledger.db*"):
        file.unlink()
    if how == "damaged":
        (small.folder / "state/ledger.db").write_bytes(b"no database" * 1000)
    small.start_agent()
    small.await_ready()
    found = 'nodefabric_reconcile_actions_total{action="adopt",reason="found-in-pod"} 2.0'
    wait("rows for the VFs", lambda: found in small.fetch("/metrics") or None)
    rows = small.status()["attachments"]
    assert {(row["device"], row["pod"], row["state"]) for row in rows} == {(d, "default/a", "attached") for d in held}
    # Another pod gets others.
    small.create_pod("b", {"rdma/vf": 1})
    small.await_pod("b")
    (mine,) = [row["device"] for row in small.status()["attachments"] if row["pod"] == "default/b"]
    assert mine not in held
    small.delete_pod("a")
    small.delete_pod("b")
    small.await_no_pod("a", "b")
    assert settled(lambda: still_attached(small)) == []
    names = {link.device: link.name for link in machine.links.listed() if link.device}
    assert {d: names.get(d) for d in held} == {d: before[d].name for d in held}
    assert leases(small) == []


def test_books_that_are_damaged_under_the_running_agent_are_written_anew(small: Stage) -> None:
    path = small.folder / "state/ledger.db"
    small.create_pod("a", {"rdma/vf": 2})
    small.await_pod("a")
    # CNI names the pod of a grant, and kubelet its container later: at the latest in the reconciler's next round.
    before = wait("grants with their container", lambda: with_containers(small), seconds=240)
    assert "damage" not in before["obstacles"]
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with path.open("r+b") as file:
        file.write(b"\xa5" * path.stat().st_size)
    told = wait("a word about the damage", lambda: small.status()["obstacles"].get("damage"), seconds=120)
    (copy,) = [each for each in path.parent.glob("ledger.db.damaged-*") if not each.name.endswith(("-wal", "-shm"))]
    assert told == (
        f"{path} was damaged, and is replaced; what was damaged is kept as {copy}: see to the disk, then remove that"
    )
    after = small.status()
    assert after["ready"]
    assert after["attachments"] == before["attachments"]
    assert after["grants"] == before["grants"]
    assert "found-in-pod" not in small.fetch("/metrics")
    small.create_pod("b", {"rdma/vf": 1})
    small.await_pod("b")
    small.end("agent", signal.SIGKILL)
    small.start_agent()
    small.await_ready()
    assert len(small.status()["attachments"]) == 3
    small.delete_pod("a")
    small.delete_pod("b")
    small.await_no_pod("a", "b")
    assert settled(lambda: still_attached(small)) == []
    assert leases(small) == []


def test_status_and_release_work_with_and_without_the_agent(small: Stage) -> None:
    small.create_pod("a", {"rdma/vf": 1})
    small.await_pod("a")
    (row,) = small.status()["attachments"]
    device = row["device"]
    status, shown, _ = nodefabric(small, "status")
    assert status == 0
    assert device in shown
    status, _, said = nodefabric(small, "release", device, "--reason", "a test")
    assert (status, "whose network namespace lives" in said) == (4, True)
    status, _, said = nodefabric(small, "release", "0000:00:00.0", "--reason", "a test")
    assert (status, "is in no pod and not in quarantine" in said) == (1, True)
    small.end("agent", signal.SIGKILL)
    status, shown, _ = nodefabric(small, "status", "--output", "json")
    found = json.loads(shown)
    assert (status, found["ready"]) == (3, False)
    assert found["obstacles"]["agent"].startswith("does not run; this is what its books hold")
    assert [a["device"] for a in found["attachments"]] == [device]
    node = ("--simulate", str(small.folder / "node"))
    status, _, said = nodefabric(small, "release", device, "--reason", "a test", *node)
    assert (status, "whose network namespace lives" in said) == (4, True)
    status, shown, said = nodefabric(small, "release", device, "--reason", "a test", "--force", *node)
    assert (status, shown) == (0, f"{device} is back, and free\n")
    assert "TAKEN" in said
    assert leases(small) == []
    small.start_agent()
    small.await_ready()
    assert small.status()["attachments"] == []
    small.delete_pod("a")
    small.await_no_pod("a")


def test_the_running_agent_releases_by_force(small: Stage) -> None:
    small.create_pod("a", {"rdma/vf": 1})
    small.await_pod("a")
    (row,) = small.status()["attachments"]
    status, shown, _ = nodefabric(small, "release", row["device"], "--reason", "a test", "--force", "-o", "json")
    assert status == 0
    assert json.loads(shown) == {"device": row["device"], "done": f"{row['device']} is back, and free"}
    assert small.status()["attachments"] == []
    assert 'nodefabric_reconcile_actions_total{action="release",reason="forced"} 1.0' in small.fetch("/metrics")
    assert "by force of the operator: a test" in small.log("agent")
    small.delete_pod("a")
    small.await_no_pod("a")


def test_a_port_that_is_taken_keeps_no_pod_from_its_network(stage: Stage) -> None:
    stage.build_node("h100-8gpu")
    configure(stage)
    stage.write_conflist()
    stage.start_kubelet()
    with closing(socket.create_server(("127.0.0.1", stage.port))):
        process = stage.start_agent()
        wait("a word about the port", lambda: "Address already in use" in stage.log("agent") or None)
        wait("the VFs with kubelet", lambda: allocatable(stage, "rdma/vf") or None)
        stage.create_pod("a", {"rdma/vf": 1})
        stage.await_pod("a")
        assert process.poll() is None
    stage.await_ready()
    assert len(stage.status()["attachments"]) == 1


def test_a_disk_that_is_full_for_a_while_is_told_and_lived_through(stage: Stage) -> None:
    disk = stage.folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "test", disk], check=True)
    try:
        stage.build_node("h100-8gpu")
        configure(stage, stateDir=str(disk / "state"), rescanSeconds=1)
        stage.write_conflist()
        stage.start_kubelet()
        process = stage.start_agent()
        stage.await_ready()
        stage.create_pod("a", {"rdma/vf": 1})
        stage.await_pod("a")
        filler = disk / "filler"
        with filler.open("ab", buffering=0) as file:
            for size in (4096, 1):
                try:
                    while file.write(b"\0" * size) == size:
                        pass
                except OSError:
                    continue
        # The write-ahead log may have room in the file itself for a while.
        found = wait("a word about the disk", lambda: full(stage), seconds=90)
        assert "free space or repair the disk" in found
        assert process.poll() is None
        stage.delete_pod("a")
        filler.unlink()
        wait("the disk to be usable", lambda: "ledger" not in stage.status()["obstacles"] or None, seconds=90)
        stage.await_no_pod("a")
        assert settled(lambda: still_attached(stage)) == []
    finally:
        stage.end("agent")
        subprocess.run(["umount", "--lazy", disk], check=True)


def full(stage: Stage) -> str | None:
    """Make the agent write until it says that it cannot."""
    told: str | None = stage.status()["obstacles"].get("ledger")
    return told


def test_a_config_names_the_folders_of_namespaces(stage: Stage) -> None:
    path = configure(stage)
    assert yaml.safe_load(path.read_text())["netnsDirs"] == [str(stage.folder / "netns")]
