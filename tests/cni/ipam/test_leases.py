"""Leases are given back once and only once, whoever hangs, dies or comes again meanwhile."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agent.errors import AttachmentError, IpamFailed
from agent.model.allocation import Attachment
from cni.found_vfs import Finder
from cni.grants import GrantedDevice
from cni.ipam.leases import ADD_TURN_SECONDS, FORGET_SECONDS, MAX_OWED, LeaseBook
from cni.ipam.plugins import ADD_SECONDS
from cni.ipam.processes import ORPHAN_SECONDS, Orphans
from cni.node import Node
from tests.cni.desk import NOTES, PLUGINS, Desk, open_desk
from tests.cni.networks import network
from tests.cni.tiny_node import Rig, stub_answer, vf
from tests.live import Live
from tests.waiting import until

HAS_HOST_LOCAL = shutil.which("host-local", path=PLUGINS) is not None
NO_HOST_LOCAL = "the standard plugins are not installed (Debian: containernetworking-plugins)"


@pytest.mark.skipif(not HAS_HOST_LOCAL, reason=NO_HOST_LOCAL)
def test_a_repeated_release_leaves_the_address_with_its_new_owner(desk: Desk) -> None:
    """With the real host-local: a range of one address, which two containers have one after the other."""
    ranges = [[{"subnet": "10.9.0.0/24", "rangeStart": "10.9.0.5", "rangeEnd": "10.9.0.5"}]]
    leases = desk.folder / "leases/rails"

    def row(container_id: str) -> Attachment:
        return desk.row(container_id, "host-local", ranges=ranges, dataDir=str(desk.folder / "leases"))

    first, second = row("c1"), row("c2")
    assert desk.leases.take(first).addresses == ("10.9.0.5/24",)
    with pytest.raises(IpamFailed, match="no IP addresses available"):
        desk.leases.take(second)
    assert desk.leases.give_back(first)
    assert desk.leases.take(second).addresses == ("10.9.0.5/24",)
    for _ in range(3):  # the runtime's second and third DEL, a spooled one, a crash before the row was dropped
        assert desk.leases.give_back(first)
    desk.books.finish_detach(first, lease_owed=True)
    assert desk.leases.settle() == (1, 0)
    assert (leases / "10.9.0.5").read_text().split() == ["c2", "net1"]
    assert desk.leases.check(second) is None
    assert desk.leases.give_back(second)
    assert not (leases / "10.9.0.5").exists()


@pytest.mark.skipif(not HAS_HOST_LOCAL, reason=NO_HOST_LOCAL)
def test_a_lease_that_somebody_freed_is_found_by_check(desk: Desk) -> None:
    data = desk.folder / "leases"
    row = desk.row("c1", "host-local", ranges=[[{"subnet": "10.9.0.0/24"}]], dataDir=str(data))
    answer = {"cniVersion": "1.1.0", "ips": [{"address": desk.leases.take(row).addresses[0]}]}
    desk.books.finish_attach([row.attachment_id], answer)
    (attached,) = desk.books.attachments()
    assert desk.leases.check(attached) is None
    (data / "rails/10.9.0.2").unlink()
    assert "Failed to find address" in str(desk.leases.check(attached))


def test_the_relay_waits_for_an_address_and_kubelet_for_the_relay() -> None:
    relay = (Path(__file__).parents[3] / "cni/shim/relay.c").read_text()
    found = re.search(r'\{"ADD", [A-Za-z_, ]+, [0-9]+, ([0-9]+), ', relay)
    assert found is not None
    relay_seconds = int(found[1]) / 1000
    assert ADD_TURN_SECONDS + ADD_SECONDS < relay_seconds < 4 * 60
    assert ADD_SECONDS < ORPHAN_SECONDS


def test_one_lease_that_is_refused_keeps_no_other(desk: Desk) -> None:
    desk.plugin("stub", "[ $CNI_CONTAINERID != c2 ]")
    for container in ("c1", "c2", "c3"):
        desk.owe(container)
    assert desk.leases.settle() == (2, 0)
    assert desk.owed() == ["c2"]


def test_a_repeated_add_returns_what_is_owed_before_it_asks_again(desk: Desk) -> None:
    desk.plugin("stub", NOTES + stub_answer("10.0.0.2/24"))
    desk.owe("c1")
    desk.leases.take(desk.row("c1"))
    assert desk.said() == ["DEL c1", "ADD c1"]
    assert desk.owed() == []
    assert desk.leases.settle() == (0, 0)


def test_no_late_release_meets_a_lease_that_is_being_taken(desk: Desk) -> None:
    desk.plugin(
        "stub",
        f"{NOTES} [ $CNI_COMMAND = DEL ] && exit; while [ ! -e $(dirname $0)/go ]; do sleep 0.01; done;"
        + stub_answer("10.0.0.2/24"),
    )
    row = desk.row("c1")
    taking = threading.Thread(target=desk.leases.take, args=(row,))
    taking.start()
    until(lambda: desk.said() == ["ADD c1"])
    desk.books.finish_detach(desk.row("c1"), lease_owed=True)
    assert desk.leases.settle() == (0, 0)
    (desk.folder / "go").touch()
    taking.join()
    assert desk.leases.settle() == (0, 0)  # the row that has the interface decides, and its DEL returns all
    assert desk.said() == ["ADD c1"]
    desk.books.finish_detach(row)
    assert desk.leases.settle() == (1, 0)


def test_a_release_waits_for_a_lease_of_the_same_interface_that_is_being_taken(desk: Desk) -> None:
    """Else the plugin might free the one, and the other not be known to it yet."""
    desk.plugin(
        "stub",
        f"{NOTES} [ $CNI_COMMAND = DEL ] && exit; while [ ! -e $(dirname $0)/go ]; do sleep 0.01; done;"
        f"echo leased >>$(dirname $0)/calls; {stub_answer('10.0.0.2/24')}",
    )
    row = desk.row("c1")
    taking = threading.Thread(target=desk.leases.take, args=(row,))
    taking.start()
    until(lambda: desk.said() == ["ADD c1"])
    giving = threading.Thread(target=desk.leases.give_back, args=(row,))
    giving.start()
    giving.join(0.3)
    assert giving.is_alive()
    (desk.folder / "go").touch()
    taking.join()
    giving.join()
    assert desk.said() == ["ADD c1", "leased", "DEL c1"]


def test_a_lease_that_an_add_has_given_back_meanwhile_is_given_back_once(desk: Desk) -> None:
    """`settle` has listed it, and comes to it after others that take long."""
    desk.plugin(
        "stub",
        f"{NOTES} while [ $CNI_CONTAINERID = c1 ] && [ ! -e $(dirname $0)/go ]; do sleep 0.01; done;"
        f"[ $CNI_COMMAND = DEL ] || {stub_answer('10.0.0.2/24')}",
    )
    desk.owe("c1")
    desk.owe("c2")
    desk.trusted(desk.row("c3"))
    settling = threading.Thread(target=desk.leases.settle)
    settling.start()
    until(lambda: desk.said() == ["DEL c1"])
    row = desk.row("c2")
    desk.leases.take(row)
    assert desk.leases.give_back(row)
    desk.books.finish_detach(row)
    (desk.folder / "go").touch()
    settling.join()
    assert desk.said() == ["DEL c1", "DEL c2", "ADD c2", "DEL c2"]
    assert desk.owed() == []


def test_a_lease_that_nobody_takes_back_is_given_up_some_day(desk: Desk) -> None:
    desk.owe("c1", "missing")
    assert desk.leases.settle() == (0, 0)
    desk.now += FORGET_SECONDS + 60
    assert desk.leases.settle() == (0, 1)
    assert desk.owed() == []


def test_who_was_off_for_a_month_tries_for_a_while_before_giving_up(desk: Desk) -> None:
    desk.owe("c1")
    desk.plugin("stub", "exit 1")  # its API server cannot be reached yet
    desk.now += FORGET_SECONDS + 60
    started = LeaseBook(desk.books, clock=lambda: desk.now, uptime=lambda: desk.now)
    assert started.settle() == (0, 0)
    desk.plugin("stub", NOTES)
    assert started.settle() == (1, 0)
    assert desk.owed() == []
    started.close()


def test_the_number_of_owed_leases_is_bounded(desk: Desk) -> None:
    row = desk.row("old", "missing")
    desk.books.finish_detach(row, lease_owed=True)
    many = [(f"c{i}", "net1", "/x", '{"network": null, "cni_path": ""}', desk.now) for i in range(MAX_OWED)]
    desk.books._write(
        lambda: desk.books._db.executemany(
            "INSERT INTO owed_leases (container_id, ifname, netns_path, request, since) VALUES (?, ?, ?, ?, ?)", many
        )
    )
    assert desk.leases.settle()[1] == 1
    assert "old" not in desk.owed()


KILLED = """
import os, signal, sys, threading
from pathlib import Path
from tests.cni.desk import NOTES, open_desk
from tests.waiting import until
with open_desk(Path(sys.argv[1])) as desk:
    threading.Thread(target=desk.leases.take, args=(desk.row("c1"),)).start()
    until((desk.folder / "started").exists)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_lease_that_an_orphaned_plugin_may_still_write_is_given_back_later(tmp_path: Path) -> None:
    with open_desk(tmp_path) as desk:
        desk.plugin(
            "stub",
            "d=$(dirname $0); [ $CNI_COMMAND = DEL ] && { rm $d/lease; exit; }; touch $d/started;"
            " while [ ! -e $d/go ]; do sleep 0.01; done; touch $d/lease; exit 0",
        )
    assert run_killed(tmp_path) == -signal.SIGKILL
    with open_desk(tmp_path) as desk:
        (row,) = desk.books.attachments()
        assert not desk.leases.give_back(row)  # the plugin has not written its lease yet
        desk.books.finish_detach(row, lease_owed=True)
        assert desk.leases.settle() == (0, 0)
        (tmp_path / "go").touch()
        until((tmp_path / "lease").exists)
        until(lambda: desk.leases.settle() == (1, 0))
        assert not (tmp_path / "lease").exists()
    assert list(tmp_path.glob("ipam-*.lock")) == []


def run_killed(folder: Path) -> int:
    """Run an agent that is killed while a plugin of its own is at work."""
    return subprocess.run([sys.executable, "-c", KILLED, folder], cwd=Path(__file__).parents[3], check=False).returncode


def test_a_daemon_that_a_plugin_left_behind_does_not_count_for_ever(tmp_path: Path) -> None:
    now = [0.0]
    earlier = Orphans(tmp_path)
    with earlier.plugin() as (descriptor,):
        later = Orphans(tmp_path, clock=lambda: now[0])
        assert later.may_live()
        now[0] = ORPHAN_SECONDS + 1
        assert not later.may_live()
        os.fstat(descriptor)


def test_the_own_plugins_are_no_orphans(tmp_path: Path) -> None:
    mine = Orphans(tmp_path)
    with mine.plugin():
        assert not mine.may_live()
    mine.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_file_keeps_no_plugin_from_its_work(tmp_path: Path) -> None:
    mine = Orphans(tmp_path / "missing")
    with mine.plugin() as inherited:
        assert inherited == ()
    assert not mine.may_live()


def test_gc_keeps_the_leases_of_interfaces_that_the_runtime_does_not_know_of(rig: Rig) -> None:
    """A chained call makes net1 under the runtime's eth0, and only eth0 is in the runtime's list."""
    pod = rig.pod()
    stub = rig.stub_ipam(
        f"cat >{rig.folder}/in-$CNI_COMMAND; [ $CNI_COMMAND = VERSION ] &&"
        ' { echo \'{"supportedVersions": ["1.1.0"]}\'; exit; }; ' + stub_answer("10.0.0.2/24")
    )
    rig.granted.append(GrantedDevice(vf(0), "rdma/vf", network({"name": "rails", "ipam": stub})))
    rig.add("c1", pod, "eth0", prevResult={"cniVersion": "1.1.0"}, name="cluster")
    rig.collect(("c1", "eth0"), name="cluster")
    sent = json.loads((rig.folder / "in-GC").read_text())
    assert sent["name"] == "rails"
    assert [(a["containerID"], a["ifname"]) for a in sent["cni.dev/valid-attachments"]] == [
        ("c1", "eth0"),
        ("c1", "net1"),
    ]
    assert rig.in_pod(pod) is not None


def test_gc_keeps_the_leases_of_pods_that_nobody_remembers_by_name(rig: Rig) -> None:
    """The books were lost, and the pod's VF was found again: which of the containers it is, no DEL has told yet."""
    pod, file = rig.pod(), rig.folder / "in-GC"
    stub = rig.stub_ipam(
        f"cat >{rig.folder}/in-$CNI_COMMAND; [ $CNI_COMMAND = VERSION ] &&"
        ' { echo \'{"supportedVersions": ["1.1.0"]}\'; exit; }; ' + stub_answer("10.0.0.2/24")
    )
    for index, (container, netns) in enumerate([("c1", pod), ("c2", rig.pod("two"))]):
        rig.granted[:] = [GrantedDevice(vf(index), "rdma/vf", network({"name": "rails", "ipam": stub}))]
        rig.add(container, netns, "eth0", prevResult={"cniVersion": "1.1.0"}, name="cluster")
    first, _ = rig.ledger.attachments()
    rig.ledger.finish_detach(first)
    node = Node(rig.machine, rig.ledger, Live(rig.machine.scan))
    found = Finder(node, netns_folders=(rig.folder,), processes=Path("/none"))
    assert found.in_namespaces([vf(0)], {}, {}) == (vf(0),)
    rig.collect(("c1", "eth0"), ("c2", "eth0"), name="cluster")
    kept = {(a["containerID"], a["ifname"]) for a in json.loads(file.read_text())["cni.dev/valid-attachments"]}
    assert {("c1", "net1"), ("c2", "net1")} <= kept


def test_check_tells_of_a_lease_that_is_gone(rig: Rig) -> None:
    pod = rig.pod()
    rig.add("c1", pod, ipam=rig.ipam())
    rig.check("c1", pod, deviceID=vf(0))
    for lease in rig.leases():
        (rig.folder / "leases/rails" / lease).unlink()
    with pytest.raises(AttachmentError, match="IPAM plugin host-local: CHECK failed"):
        rig.check("c1", pod, deviceID=vf(0))
