"""A plugin that would end the agent: not asked at a start, one lease at a time then, and later and later."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
from pathlib import Path

from agent.model.allocation import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, OwedLease
from cni.ipam.leases import ASKED, LeaseBook
from cni.ipam.processes import Orphans
from cni.ipam.program import EXPECTED_BYTES, Room
from tests.agent.books import open_books
from tests.cni.desk import NOTES, Desk, open_desk
from tests.cni.test_attachment_killed import run_agent
from tests.cni.tiny_node import Rig, stub_answer, vf
from tests.waiting import until

ROOT = Path(__file__).parents[3]
DAY = 86400.0


# ------------------------------------------------------- types that lease nothing


def test_what_the_version_before_wrote_of_no_ipam_plugin_is_settled_without_asking_it(desk: Desk) -> None:
    desk.plugin("ptp", NOTES)
    rows = [desk.row(container, "ptp") for container in ("c1", "c2", "c3")]
    desk.books.finish_attach([rows[0].attachment_id], {"cniVersion": "1.0.0"})
    attached = next(row for row in desk.books.attachments() if row.result is not None)
    assert desk.leases.give_back(rows[0])
    desk.books.finish_detach(rows[1], lease_owed=True)
    desk.books.finish_detach(rows[2], lease_owed=True)
    assert desk.leases.settle() == (2, 0)
    assert desk.leases.check(attached) is None
    assert (desk.said(), desk.owed()) == ([], [])


def test_gc_asks_no_plugin_that_leases_nothing(rig: Rig) -> None:
    """A row of the version before has the network's name."""
    stub = rig.stub_ipam(f"echo $CNI_COMMAND >>{rig.folder}/calls; {stub_answer('10.0.0.2/24')}")
    rig.add("c1", rig.pod(), ipam=stub)
    (row,) = rig.ledger.attachments()
    (rig.folder / "stub").rename(rig.folder / "bridge")
    network = {**row.request["network"], "ipam": {"type": "bridge"}}
    rig.ledger.name_owner(row, row.owner, {**row.request, "network": network})
    rig.collect(("c1", "net1"))
    assert (rig.folder / "calls").read_text().split() == ["ADD"]


# ---------------------------------------------------------------- later and later


def tries_of(since: float, until_then: float, every: float = 60.0) -> list[float]:
    """List when a lease is tried that is looked at each minute, and that fails each time."""
    lease, tries, now = OwedLease(1, "c1", "net1", "", {}, since), [], since
    while now < until_then:
        if lease.is_due(now):
            tries.append(now - since)
            lease = OwedLease(1, "c1", "net1", "", {}, since, tried_at=now)
        now += every
    return tries


def test_a_lease_is_tried_later_and_later_up_to_some_hours() -> None:
    tries = tries_of(1e9, 1e9 + 3 * DAY)
    pauses = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert pauses[:6] == [60, 60, 120, 240, 480, 960]
    assert pauses[-1] == LONGEST_PAUSE_SECONDS
    assert len(tries) < 25


def test_a_clock_that_is_set_back_delays_no_lease() -> None:
    lease = OwedLease(1, "c1", "net1", "", {}, since=1e9, tried_at=1e9 + 60)
    assert not lease.is_due(1e9 + 61)
    assert lease.is_due(1e9)
    assert OwedLease(1, "c1", "net1", "", {}, since=1e9, tried_at=1e9 - DAY).is_due(1e9)


def test_the_pause_outlives_the_agent(tmp_path: Path) -> None:
    now = [1e9]
    with open_desk(tmp_path) as desk:
        desk.plugin("stub", NOTES + "exit 1")
        row = desk.row("c1")
    for _ in range(60):
        with open_books(tmp_path, clock=lambda: now[0]) as books:
            if books.attachments():
                books.finish_detach(row, lease_owed=True)
            leases = LeaseBook(books, clock=lambda: now[0], uptime=lambda: 0.0)
            assert leases.settle() == (0, 0)
            leases.close()
        now[0] += FIRST_PAUSE_SECONDS
    tries = len((tmp_path / "calls").read_text().splitlines())
    assert 5 < tries < 10


# ------------------------------------------------------- an agent that ended in it


KILLED = """
import sys
from pathlib import Path
from tests.cni.desk import NOTES, open_desk
with open_desk(Path(sys.argv[1])) as desk:
    desk.leases.settle()
"""


def test_a_lease_whose_plugin_ended_the_agent_is_not_tried_at_once_again(tmp_path: Path) -> None:
    with open_desk(tmp_path) as desk:
        desk.plugin("stub", NOTES + "kill -9 $PPID")
        desk.owe("c1")
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    with open_desk(tmp_path) as desk:
        desk.plugin("stub", NOTES)
        (lease,) = desk.books.owed_leases()
        assert lease.tried_at > 0
        assert lease.problem == ASKED
        until(lambda: not Orphans(tmp_path).may_live())
        assert desk.leases.settle() == (0, 0)
        desk.now += LONGEST_PAUSE_SECONDS
        until(lambda: desk.leases.settle() == (1, 0))
    assert (tmp_path / "calls").read_text().splitlines() == ["DEL c1"] * 2


def test_an_agent_that_ended_in_a_del_frees_the_vf_at_its_start_and_owes_the_lease(rig: Rig) -> None:
    pod, before = rig.pod(), rig.found()
    rig.stub_ipam(f"[ $CNI_COMMAND = ADD ] && {stub_answer('10.0.0.2/24')}")
    assert run_agent(rig, pod, "ADD") == 0
    rig.stub_ipam("kill -9 $PPID")
    assert run_agent(rig, pod, "DEL") == -signal.SIGKILL
    rig.restart()
    rig.stub_ipam(f"touch {rig.folder}/asked")
    rig.attachments.leases.defer()
    assert rig.attachments.heal(vf(0)) == "half-detaching"
    assert rig.found() == before
    assert [lease.container_id for lease in rig.ledger.owed_leases()] == ["c1"]
    assert not (rig.folder / "asked").exists()
    rig.attachments.leases.resume()
    until(lambda: rig.attachments.leases.settle() == (1, 0))
    assert (rig.folder / "asked").exists()


def test_a_lease_of_a_pod_that_ended_meanwhile_is_given_back_as_soon_as_pods_are_served(rig: Rig) -> None:
    pod = rig.pod()
    rig.add("c1", pod, ipam=rig.ipam())
    rig.restart()
    rig.attachments.leases.defer()
    rig.delete("c1", pod, ipam=rig.ipam())
    rig.await_back()
    assert rig.leases() != []
    assert rig.attachments.leases.settle() == (0, 0)
    rig.attachments.leases.resume()
    assert rig.attachments.leases.settle() == (1, 0)
    assert rig.leases() == []


def test_a_pod_in_no_books_is_no_reason_to_ask_a_plugin_before_pods_are_served(rig: Rig) -> None:
    stub = rig.stub_ipam(f"touch {rig.folder}/asked")
    rig.attachments.leases.defer()
    rig.delete("old", None, ipam=stub, deviceID=vf(0))
    assert [lease.container_id for lease in rig.ledger.owed_leases()] == ["old"]
    assert rig.attachments.leases.settle() == (0, 0)
    assert not (rig.folder / "asked").exists()
    rig.attachments.leases.resume()
    assert rig.attachments.leases.settle() == (1, 0)


def test_a_pod_gets_addresses_before_old_ones_are_given_back(desk: Desk) -> None:
    desk.plugin("stub", NOTES + stub_answer("10.0.0.2/24"))
    desk.leases.defer()
    assert desk.leases.take(desk.row("c1")).addresses == ("10.0.0.2/24",)


def test_plugins_are_asked_one_after_the_other_after_a_start(desk: Desk) -> None:
    on = desk.folder / "on"
    on.mkdir()
    for kind in ("one", "two", "three"):
        desk.plugin(kind, f"touch {on}/$$; ls {on} | wc -l >>{desk.folder}/calls; sleep 0.2; rm {on}/$$")
        desk.owe(f"of-{kind}", kind)
    assert desk.leases.settle() == (3, 0)
    assert [int(line) for line in desk.said()] == [1, 1, 1]


# ------------------------------------------------- what earlier agents left behind


def test_plugins_that_outlived_their_agent_are_killed_at_the_next_start(tmp_path: Path) -> None:
    with open_desk(tmp_path) as desk:
        desk.plugin(
            "stub", f"setsid sleep 1000 & echo $! >{tmp_path}/pid; echo $$ >>{tmp_path}/pid; kill -9 $PPID; wait"
        )
        desk.owe("c1")
    subprocess.run([sys.executable, "-c", KILLED, tmp_path], cwd=ROOT, check=False)
    pids = (tmp_path / "pid").read_text().split()
    assert len(pids) == 2
    with open_desk(tmp_path) as desk:
        desk.leases.defer()
        until(lambda: not any(map(_runs, pids)))
        until(lambda: not Orphans(tmp_path).may_live())  # what it held is closed last


def _runs(pid: str) -> bool:
    try:
        return Path("/proc", pid, "cmdline").read_bytes() != b""
    except OSError:
        return False


# ------------------------------------------------------------------- memory


def test_who_finds_no_memory_for_its_plugin_owes_its_lease(desk: Desk) -> None:
    desk.plugin("stub", f"touch {desk.folder}/on; while ! [ -e {desk.folder}/go ]; do sleep 0.05; done")
    desk.plugin("other", NOTES)
    leases = LeaseBook(desk.books, room=Room(EXPECTED_BYTES))
    thread = threading.Thread(target=leases.give_back, args=(desk.row("c1"),))
    thread.start()
    until((desk.folder / "on").exists)
    late = desk.row("late", "other")
    assert not leases.give_back(late, turn_seconds=0.1)
    (desk.folder / "go").touch()
    thread.join()
    assert leases.give_back(late)
    leases.close()


def test_a_network_is_not_said_to_be_unfit_for_want_of_memory_at_the_moment(rig: Rig) -> None:
    stub = rig.stub_ipam(f"touch {rig.folder}/asked; exit 1")
    room = Room(EXPECTED_BYTES)
    leases = LeaseBook(rig.ledger, room=room)
    with room.place(0), rig.call("", None, {"ipam": stub}) as call:
        leases.status(call)
    assert not (rig.folder / "asked").exists()
    leases.close()
