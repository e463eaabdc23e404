"""An agent that ended in the midst of an ADD or a DEL, and what the next one makes of its rows."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from agent.model.allocation import AttachmentState, NetnsId, Owner, PodRef
from cni.modes import vf as mode
from cni.modes.mode import Planned, Target
from cni.netconf import from_document
from tests.cni import tiny_node
from tests.cni.tiny_node import ASKED, Rig, open_rig, stub_answer, vf

AGENT = """
import sys
from pathlib import Path
from tests.cni.tiny_node import ASKED, open_rig

with open_rig(Path(sys.argv[1])) as rig:
    pod = Path(sys.argv[2])
    if sys.argv[3] == "ADD":
        rig.add("c1", pod, ipam={"type": "stub"}, **ASKED)
    else:
        rig.delete("c1", pod)
        rig.await_back()
"""


def run_agent(rig: Rig, pod: Path, command: str) -> int:
    """Run one ADD or DEL in a process of its own; a stub of IPAM may kill it."""
    return subprocess.run(
        [sys.executable, "-c", AGENT, rig.folder, pod, command], cwd=Path(__file__).parents[2], check=False
    ).returncode


def begin_add(rig: Rig, pod: Path, *, moved: bool) -> Planned:
    """Do the first steps of an ADD: its row, and the device's move if wanted."""
    planned = mode.plan(rig.machine, rig.machine.scan(), Target(vf(0), "", "c1", "net1", "vf", from_document(ASKED)))
    with open(pod) as netns:
        status = os.fstat(netns.fileno())
        rig.ledger.begin_attach(
            Owner("c1", "net1", PodRef("default", "p"), NetnsId(status.st_dev, status.st_ino)),
            ifname="net1",
            device=vf(0),
            resource_name="",
            undo=planned.undo,
            netns_path=str(pod),
            request={"name": "rails", "network": None},
        )
        if moved:
            mode.enter(rig.machine, planned, netns.fileno())
    return planned


def test_an_agent_killed_during_add_is_cleaned_up_after(rig: Rig) -> None:
    pod, before = rig.pod(), rig.found()
    rig.stub_ipam(f"echo $CNI_COMMAND >>{rig.folder}/calls; [ $CNI_COMMAND = DEL ] || kill -9 $PPID")
    assert run_agent(rig, pod, "ADD") == -signal.SIGKILL
    rig.restart()
    assert rig.in_pod(pod) is not None
    (row,) = rig.ledger.attachments()
    assert row.state is AttachmentState.ATTACHING
    assert rig.attachments.heal(vf(0)) == "half-attaching"
    assert rig.found() == before
    assert rig.ledger.owed_leases() == ()
    assert (rig.folder / "calls").read_text() == "ADD\nDEL\n"


def test_addresses_are_leased_once_the_row_outlives_a_power_cut(rig: Rig) -> None:
    copied, said = rig.folder / "copied", list[str]()
    copied.mkdir()
    copy = f"[ $CNI_COMMAND = DEL ] || cp {rig.folder}/ledger.db {rig.folder}/ledger.db-wal {copied}"
    rig.ledger.probe()  # waits for no disk
    rig.ledger._db.set_trace_callback(said.append)
    rig.add("c1", rig.pod(), ipam=rig.stub_ipam(f"{copy}; {stub_answer('10.0.0.2/24')}"))
    rig.ledger._db.set_trace_callback(None)
    with closing(sqlite3.connect(copied / "ledger.db")) as database:
        assert list(database.execute("SELECT device, state FROM attachments")) == [(vf(0), "attaching")]
    written = next(number for number, statement in enumerate(said) if "INTO attachments" in statement)
    assert [s for s in said[:written] if "synchronous" in s][-1:] == ["PRAGMA synchronous = FULL"]


def test_attachments_outlive_the_agent(own_network: None, tmp_path: Path) -> None:
    tiny_node.create(tmp_path)
    with open_rig(tmp_path) as rig:
        pod, before = rig.pod(), rig.found()
        answer = rig.add("c1", pod, ipam=rig.ipam(), **ASKED)
    with open_rig(tmp_path) as rig:
        assert rig.attachments.heal(vf(0)) is None
        assert rig.add("c1", pod, ipam=rig.ipam(), **ASKED) == answer
        rig.check("c1", pod, deviceID=vf(0))
        rig.delete("c1", pod)
        rig.await_back()
        assert rig.found() == before
        assert rig.leases() == []


@pytest.mark.parametrize("state", ["attaching", "moved", "attached", "detaching"])
@pytest.mark.parametrize("with_namespace", [True, False])
def test_a_del_finishes_a_row_in_each_state(rig: Rig, state: str, with_namespace: bool) -> None:
    """Left by an agent that was killed; the runtime's later DELs come without a namespace."""
    pod, before = rig.pod(), rig.found()
    if state in ("attached", "detaching"):
        rig.add("c1", pod, ipam=rig.ipam(), **ASKED)
        if state == "detaching":
            rig.ledger.begin_detach([row.attachment_id for row in rig.ledger.attachments()])
    else:
        begin_add(rig, pod, moved=state == "moved")
    rig.delete("c1", pod if with_namespace else None)
    rig.await_back()
    assert rig.found() == before
    assert rig.leases() == []
    rig.delete("c1", None)
    rig.delete("c1", None)
    assert rig.ledger.attachments() == ()
