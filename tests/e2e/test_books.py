"""The books lost or damaged while pods run on the real agent, and the commands as an operator runs them beside it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hack.sim.demo import still_attached
from hack.sim.stage import CONFIG, Stage, settled, wait

ROOT = Path(__file__).parents[2]


@pytest.fixture
def small(stage: Stage) -> Stage:
    """A stage that plays."""
    stage.play("h100-8gpu", {**CONFIG, "netnsDirs": [str(stage.folder / "netns")]})
    return stage


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


def leases(stage: Stage) -> list[Path]:
    return list((stage.folder / "leases-rails/rails").glob("192.168.*"))


@pytest.mark.parametrize("how", ["lost", "damaged"])
def test_pods_keep_their_vfs_when_the_books_are_gone_and_are_cleaned_up_after(small: Stage, how: str) -> None:
    machine = small.machine
    before = machine.links.by_device()
    small.run_pod("a", {"rdma/vf": 2})
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
    small.run_pod("b", {"rdma/vf": 1})
    (mine,) = [row["device"] for row in small.status()["attachments"] if row["pod"] == "default/b"]
    assert mine not in held
    small.end_pods("a", "b")
    assert settled(lambda: still_attached(small)) == []
    names = {link.device: link.name for link in machine.links.listed() if link.device}
    assert {d: names.get(d) for d in held} == {d: before[d].name for d in held}
    assert len(leases(small)) == len(held)  # nobody tells the container here: only the runtime could


def test_status_and_release_work_with_and_without_the_agent(small: Stage) -> None:
    small.run_pod("a", {"rdma/vf": 1})
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
    assert found["obstacles"]["agent"].startswith("does not run; this is what its ledger holds")
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
    small.end_pods("a")
