"""What a killed agent, a lost DEL, a reboot or lost books leave is found and put right, and nothing else is touched."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from agent.model.allocation import AttachmentState, VfSettings
from tests.agent.reconcile.scene import reconcile_once
from tests.cni.reconciled import reconciler_of
from tests.cni.tiny_node import ASKED, PF_NETDEV, Rig, open_rig, stub_answer, vf
from tests.waiting import until


def test_a_namespace_that_lives_on_unseen_keeps_its_device(rig: Rig) -> None:
    """Its path may be hidden from the agent; a process in it is enough."""
    pod = rig.pod()
    rig.add("c1", pod)
    with open(pod) as held:
        rig.remove(pod)
        assert rig.attachments.heal(vf(0)) is None
        assert rig.machine.links.find("net1", held.fileno()) is not None
    until(lambda: rig.attachments.heal(vf(0)) == "owner-gone")


def test_a_path_that_is_used_again_by_another_namespace_is_another_owner(rig: Rig) -> None:
    pod, before = rig.pod(), rig.found()
    rig.add("c1", pod, trust="on")
    rig.remove(pod)
    assert rig.pod() == pod
    until(lambda: rig.attachments.heal(vf(0)) == "owner-gone")
    assert rig.found() == before


def test_healing_and_others_dels_leave_alone_what_an_add_is_working_on(rig: Rig) -> None:
    pod = rig.pod()
    ipam = rig.stub_ipam(
        f"[ $CNI_COMMAND = DEL ] && exit; touch {rig.folder}/asked; while [ ! -e {rig.folder}/go ]; do sleep 0.01;"
        f" done; {stub_answer('10.0.0.2/24')}"
    )
    thread = threading.Thread(target=lambda: rig.add("c1", pod, ipam=ipam))
    thread.start()
    until((rig.folder / "asked").exists)
    assert rig.attachments.heal(vf(0)) is None
    rig.delete("other", pod)
    (rig.folder / "go").touch()
    thread.join()
    assert rig.in_pod(pod) is not None
    assert [row.state for row in rig.ledger.attachments()] == [AttachmentState.ATTACHED]


# ------------------------------------------------------------ reboots, and books that are lost


def test_a_reboot_voids_attachments_and_returns_their_leases(own_network: None, tmp_path: Path) -> None:
    with open_rig(tmp_path, boot_id="yesterday") as rig:
        rig.add("c1", rig.pod("one"), ipam=rig.ipam())
        rig.add("c2", rig.pod("two"), deviceID=vf(1), ipam=rig.ipam())
        for pod in ("one", "two"):
            rig.remove(tmp_path / f"{pod}.netns")
    with open_rig(tmp_path, boot_id="today") as rig:
        until(lambda: rig.machine.find_netdev(vf(1)) is not None)
        assert rig.attachments.heal(vf(0)) == "rebooted"
        # The start waits for the devices, not for plugins that may hang.
        assert (len(rig.leases()), len(rig.ledger.owed_leases())) == (4, 1)
        assert rig.attachments.leases.settle()[0] == 1
        assert len(rig.leases()) == 2
        # And an ADD does not wait for anybody who lived before.
        rig.add("c3", rig.pod("three"), deviceID=vf(1))
        assert rig.leases() == []
        assert [row.owner.container_id for row in rig.ledger.attachments()] == ["c3"]


def test_nothing_is_reset_on_a_device_that_has_the_address_after_a_reboot(own_network: None, tmp_path: Path) -> None:
    with open_rig(tmp_path, boot_id="yesterday") as rig:
        pod = rig.pod()
        rig.add("c1", pod, ipam=rig.ipam(), **ASKED)
        rig.ledger.quarantine(vf(1), "clean-up failed")
        rig.remove(pod)
        until(lambda: rig.machine.find_netdev(vf(0)) is not None)
    with open_rig(tmp_path, boot_id="today") as rig:
        # Another device is there now, under a name of its own, as the administrator has set it up.
        found = rig.home()
        subprocess.run(["ip", "link", "set", found.name, "name", "other7", "mtu", "1300"], check=True)
        rig.machine.vf_control.apply(PF_NETDEV, 0, VfSettings(vlan=77, trust=True))
        before = rig.found()
        reconciler, counted = reconciler_of(rig, "today")
        asyncio.run(reconcile_once(reconciler))
        assert rig.found() == before
        assert rig.ledger.attachments() == ()
        assert rig.leases() == []
        assert rig.ledger.quarantines() == ()
        assert counted == [("detach", "rebooted"), ("quarantine-end", "rebooted"), ("lease-return", "owed")]
        asyncio.run(reconcile_once(reconciler))
        assert rig.found() == before


# -------------------------------------------------------------------------------- rows of a version that wrote nulls


AGENT = """
import sys
from pathlib import Path
from tests.cni.tiny_node import ASKED, open_rig

with open_rig(Path(sys.argv[1])) as rig:
    rig.add("c1", Path(sys.argv[2]), ipam={"type": "stub"}, **ASKED)
"""


def test_an_agent_killed_during_add_is_cleaned_up_after(rig: Rig) -> None:
    pod, before = rig.pod(), rig.found()
    rig.stub_ipam(f"echo $CNI_COMMAND >>{rig.folder}/calls; [ $CNI_COMMAND = DEL ] || kill -9 $PPID")
    agent = [sys.executable, "-c", AGENT, str(rig.folder), str(pod)]
    assert subprocess.run(agent, cwd=Path(__file__).parents[2], check=False).returncode == -signal.SIGKILL
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


@pytest.mark.parametrize("state", ["attached", "detaching"])
@pytest.mark.parametrize("with_namespace", [True, False])
def test_a_del_finishes_a_row_in_each_state(rig: Rig, state: str, with_namespace: bool) -> None:
    """Left by an agent that was killed; the runtime's later DELs come without a namespace."""
    pod, before = rig.pod(), rig.found()
    rig.add("c1", pod, ipam=rig.ipam(), **ASKED)
    if state == "detaching":
        rig.ledger.begin_detach([row.attachment_id for row in rig.ledger.attachments()])
    rig.detach("c1", pod if with_namespace else None)
    assert rig.found() == before
    assert rig.leases() == []
    rig.delete("c1", None)
    rig.delete("c1", None)
    assert rig.ledger.attachments() == ()
