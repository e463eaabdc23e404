"""Leases are given back once and only once, whoever hangs, dies or comes again meanwhile."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.errors import AgentError, AttachmentError, IpamFailed
from agent.model.allocation import LONGEST_PAUSE_SECONDS, Attachment, OwedLease, PodRef
from cni import netconf
from cni.call import MAX_CALLERS, Call, GrantedDevice, InFlight, Node
from cni.call_limits import REFUSALS
from cni.found_vfs import Finder
from cni.ipam.leases import ADD_TURN_SECONDS, FORGET_SECONDS, MAX_OWED, LeaseBook
from cni.ipam.plugins import ADD_SECONDS
from tests.cni.desk import NOTES, PLUGINS, Desk, lives, open_desk, said
from tests.cni.networks import network
from tests.cni.stand_ins import FixedDevices
from tests.cni.tiny_node import Rig, stub_answer, vf
from tests.live import Live
from tests.waiting import until

HAS_HOST_LOCAL = shutil.which("host-local", path=PLUGINS) is not None
NO_HOST_LOCAL = "the standard plugins are not installed (Debian: containernetworking-plugins)"
DAY = 86400.0
BLOCKS = "touch $(dirname $0)/on.$CNI_CONTAINERID; while ! [ -e $(dirname $0)/go ]; do sleep 0.05; done; "
KNOWS_GC = (
    "cat >$(dirname $0)/in-$CNI_COMMAND; [ $CNI_COMMAND = VERSION ] &&"
    ' { echo \'{"supportedVersions": ["1.1.0"]}\'; exit; }; ' + stub_answer("10.0.0.2/24")
)


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


def test_the_relay_waits_for_an_address_and_kubelet_for_the_relay() -> None:
    relay = (Path(__file__).parents[3] / "cni/shim/relay.c").read_text()
    found = re.search(r'\{"ADD", [A-Za-z_, ]+, [0-9]+, ([0-9]+), ', relay)
    assert found is not None
    relay_seconds = int(found[1]) / 1000
    assert ADD_TURN_SECONDS + ADD_SECONDS < relay_seconds < 4 * 60


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


def test_no_release_meets_a_lease_that_is_being_taken(desk: Desk) -> None:
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
    desk.books.finish_detach(desk.row("c1"), lease_owed=True)
    assert desk.leases.settle() == (0, 0)
    giving = threading.Thread(target=desk.leases.give_back, args=(row,))
    giving.start()
    giving.join(0.3)
    assert giving.is_alive()
    (desk.folder / "go").touch()
    taking.join()
    giving.join()
    assert desk.leases.settle() == (0, 0)  # the row that has the interface decides, and its DEL returns all
    assert desk.said() == ["ADD c1", "leased", "DEL c1"]
    desk.books.finish_detach(row)
    assert desk.leases.settle() == (1, 0)


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


def test_gc_keeps_the_leases_of_interfaces_that_the_runtime_does_not_know_of(rig: Rig) -> None:
    """A chained call makes net1 under the runtime's eth0, and only eth0 is in the runtime's list."""
    pod = rig.pod()
    stub = rig.stub_ipam(KNOWS_GC)
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
    stub = rig.stub_ipam(KNOWS_GC)
    for index, (container, netns) in enumerate([("c1", pod), ("c2", rig.pod("two"))]):
        rig.granted[:] = [GrantedDevice(vf(index), "rdma/vf", network({"name": "rails", "ipam": stub}))]
        rig.add(container, netns, "eth0", prevResult={"cniVersion": "1.1.0"}, name="cluster")
    first, _ = rig.ledger.attachments()
    rig.ledger.finish_detach(first)
    node = Node(rig.machine, rig.ledger, Live(rig.machine.scan))
    found = Finder(node, FixedDevices(), netns_folders=(rig.folder,), processes=Path("/none"))
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


def test_a_plugin_is_looked_for_where_the_del_says(rig: Rig) -> None:
    """Distributions of Kubernetes keep plugins in a folder of each version of theirs."""
    pod, other = rig.pod(), rig.folder / "other"
    other.mkdir()
    script = f"echo $CNI_COMMAND $CNI_CONTAINERID >>{rig.folder}/calls; {stub_answer('10.0.0.2/24')}"
    for container_id in ("c1", "c2"):
        rig.add(
            container_id, pod, f"net{container_id[1]}", deviceID=vf(int(container_id[1])), ipam=rig.stub_ipam(script)
        )
    (rig.folder / "stub").rename(other / "stub")
    with rig.call("c1", pod, {}, "net1") as call:
        rig.attachments.delete(replace(call, cni_path=str(other)))
    rig.await_back(1)
    with rig.call("", None, {"cni.dev/valid-attachments": []}) as call:
        rig.attachments.collect(replace(call, cni_path=str(other)))
    rig.await_back(2)
    calls = (rig.folder / "calls").read_text().splitlines()
    assert [call for call in calls if call != "VERSION"] == ["ADD c1", "ADD c2", "DEL c1", "DEL c2"]
    assert rig.ledger.owed_leases() == ()


def test_what_is_owed_from_before_is_given_back_to_the_plugin_of_today(tmp_path: Path) -> None:
    """After an upgrade and a reboot no DEL comes with the new place of a plugin, but ADDs do."""
    other = tmp_path / "other"
    other.mkdir()
    with open_desk(tmp_path) as desk:
        desk.plugin("stub", f"echo $CNI_COMMAND $CNI_CONTAINERID >>{tmp_path}/calls; {stub_answer('10.0.0.2/24')}")
        desk.owe("c1")
        (tmp_path / "stub").rename(other / "stub")
        assert desk.leases.settle() == (0, 0)
        row = desk.row("c2")
        desk.leases.take(replace(row, request={**row.request, "cni_path": str(other)}))
        assert desk.leases.settle() == (1, 0)
        assert desk.said() == ["ADD c2", "DEL c1"]


# ------------------------------------------------------------------------------ plugins that hang


def test_a_plugin_that_hangs_keeps_no_other_plugins_leases(tmp_path: Path) -> None:
    with open_desk(tmp_path, seconds=2) as desk:
        desk.plugin("hangs", NOTES + "sleep 1000")
        desk.plugin("stub", NOTES)
        for container in ("h1", "h2", "h3"):
            desk.owe(container, "hangs")
        for container in ("c1", "c2", "c3"):
            desk.owe(container)
        assert desk.leases.settle() == (3, 0)
        assert desk.owed() == ["h1", "h2", "h3"]
        # It was asked for one lease, not for three times its limit; and for another one the next time.
        assert [line for line in desk.said() if "h" in line] == ["DEL h1"]
        assert desk.leases.settle() == (0, 0)  # the network is refused for a while
        assert [line for line in desk.said() if "h" in line] == ["DEL h1"]
        desk.now += REFUSALS.first + 1
        assert desk.leases.settle() == (0, 0)
        assert [line for line in desk.said() if "h" in line] == ["DEL h1", "DEL h2"]
        assert "did not end within 2 s" in desk.books.owed_leases()[0].problem


@contextmanager
def waiting_for(desk: Desk, rows: Sequence[Attachment], started: int, act: str) -> Iterator[list[threading.Thread]]:
    """Have so many plugins at work that do not end before the file `go` is there, and let them end."""
    threads = [threading.Thread(target=getattr(desk.leases, act), args=(row,)) for row in rows]
    (desk.folder / "go").unlink(missing_ok=True)
    before = len(list(desk.folder.glob("on.*")))
    for thread in threads:
        thread.start()
    try:
        until(lambda: len(list(desk.folder.glob("on.*"))) == before + started)
        yield threads
    finally:
        (desk.folder / "go").touch()
        for thread in threads:
            thread.join()


def test_who_waits_too_long_for_its_turn_owes_its_lease(desk: Desk) -> None:
    desk.plugin("stub", BLOCKS)
    with waiting_for(desk, [desk.trusted(desk.row(f"c{number}")) for number in range(8)], 2, "give_back"):
        late = desk.row("late")
        assert not desk.leases.give_back(late, turn_seconds=0.1)
    assert desk.leases.give_back(late)


def test_a_network_whose_plugin_hangs_delays_neither_another_of_the_same_type_nor_a_release(desk: Desk) -> None:
    desk.plugin("stub", f"grep -q '\"hangs\"' && {{ {BLOCKS} }}; {stub_answer('10.0.0.2/24')}")
    rows = [desk.trusted(desk.row(f"h{number}", network_name="hangs")) for number in range(8)]
    with waiting_for(desk, rows, 2, "take"):
        of_another = desk.row("c1")
        assert desk.leases.take(of_another).addresses == ("10.0.0.2/24",)
        assert desk.leases.give_back(of_another, turn_seconds=0)
        with waiting_for(desk, [desk.row(f"g{number}", network_name="hangs") for number in range(4)], 2, "give_back"):
            # Of five places it has four now, and there is one for whatever comes from others.
            assert desk.leases.take(of_another).addresses == ("10.0.0.2/24",)
            assert desk.leases.give_back(of_another, turn_seconds=0)


def test_a_network_of_the_same_name_with_other_addresses_is_another(tmp_path: Path) -> None:
    """Whoever writes networks in a namespace of his own may call one as that of others, and let it hang."""
    with open_desk(tmp_path, seconds=0.5) as desk:
        desk.plugin("stub", f"grep -q hangs && exec sleep 1000; {stub_answer('10.0.0.2/24')}")
        assert not desk.leases.give_back(desk.row("c1", range="hangs"))
        assert not desk.leases.give_back(desk.row("c2", range="hangs"))
        assert desk.leases.give_back(desk.row("c3", range="192.168.1.0/24"))


def call_of(desk: Desk) -> Call:
    """Ask for the status of the network that `desk.row` makes."""
    conf = {"cniVersion": "1.1.0", "name": "rails", "type": "nodefabric", "ipam": {"type": "stub"}}
    return Call("", "", None, "", PodRef("", "", ""), "", str(desk.folder), netconf.from_document(conf))


def test_a_plugin_that_does_not_tell_its_status_in_time_is_believed_to_be_well_unless_it_has_hung(
    tmp_path: Path,
) -> None:
    """Else the runtime would call the whole node not ready."""
    with open_desk(tmp_path, seconds=1) as desk:
        desk.plugin("stub", "sleep 1000")
        desk.leases.status(call_of(desk))
        assert not desk.leases.give_back(desk.row("c1"))
        with pytest.raises(IpamFailed, match=r"VERSION did not end within 0\.4 s"):
            desk.leases.status(call_of(desk))
        desk.now += REFUSALS.longest
        desk.leases.status(call_of(desk))


def test_status_asks_no_further_plugin_where_as_many_are_at_work_as_may_be(desk: Desk) -> None:
    desk.plugin("stub", f"{NOTES} [ $CNI_COMMAND = ADD ] || exit 1; {BLOCKS} {stub_answer('10.0.0.2/24')}")
    rows = [desk.trusted(desk.row(f"c{number}", network_name=f"n{number}")) for number in range(4)]
    with waiting_for(desk, rows, 4, "take"):
        desk.leases.status(call_of(desk))
        assert sorted(desk.said()) == ["ADD c0", "ADD c1", "ADD c2", "ADD c3"]
    desk.leases.status(call_of(desk))
    assert desk.said()[4:] == ["VERSION"]


# ------------------------------------------------------------------------------ agents that start again


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


KILLED = """
import sys
from pathlib import Path
from tests.cni.desk import open_desk, said
with open_desk(Path(sys.argv[1])) as desk:
    desk.leases.take(desk.row("c1"))
"""


def test_a_plugin_that_outlived_its_agent_is_killed_at_the_next_start_and_its_lease_given_back(tmp_path: Path) -> None:
    """It was at work for an ADD, and would write its lease later."""
    with open_desk(tmp_path) as desk:
        desk.plugin(
            "stub",
            f"{NOTES} [ $CNI_COMMAND = DEL ] && exit; setsid sleep 1000 & echo $! $$ >{tmp_path}/pids; kill -9 $PPID;"
            f" while [ ! -e {tmp_path}/go ]; do sleep 0.01; done; touch {tmp_path}/lease",
        )
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path], cwd=Path(__file__).parents[3], check=False)
    assert done.returncode == -signal.SIGKILL
    pids = (tmp_path / "pids").read_text().split()
    assert [lives(pid) for pid in pids] == [True, True]
    with open_desk(tmp_path) as desk:
        desk.leases.defer()
        until(lambda: not any(map(lives, pids)))
        (tmp_path / "go").touch()
        desk.leases.resume()
        (row,) = desk.books.attachments()
        assert desk.leases.give_back(row)
        assert desk.said() == ["ADD c1", "DEL c1"]
    assert not (tmp_path / "lease").exists()


def test_no_plugin_is_asked_for_what_is_to_be_given_back_before_pods_are_served(rig: Rig) -> None:
    """Whether the pod ended meanwhile, or is in no books."""
    pod = rig.pod()
    stub = rig.stub_ipam(f"{NOTES}{stub_answer('10.0.0.2/24')}")
    rig.add("c1", pod, ipam=stub)
    rig.restart()
    rig.attachments.leases.defer()
    rig.delete("old", None, ipam=stub, deviceID=vf(1))
    rig.detach("c1", pod, ipam=stub)
    assert rig.attachments.leases.settle() == (0, 0)
    assert said(rig.folder) == ["ADD c1"]
    rig.attachments.leases.resume()
    assert rig.attachments.leases.settle() == (2, 0)
    assert sorted(said(rig.folder)) == ["ADD c1", "DEL c1", "DEL old"]


def test_plugins_are_asked_one_after_the_other_after_a_start(desk: Desk) -> None:
    on = desk.folder / "on"
    on.mkdir()
    for kind in ("one", "two", "three"):
        desk.plugin(kind, f"touch {on}/$$; ls {on} | wc -l >>{desk.folder}/calls; sleep 0.2; rm {on}/$$")
        desk.owe(f"of-{kind}", kind)
    assert desk.leases.settle() == (3, 0)
    assert [int(line) for line in desk.said()] == [1, 1, 1]


OLD = {"type": "ipoib", "master": "ib0"}
"""Of a plugin that left no note of its attachments."""


@pytest.mark.parametrize("conf", [OLD, {"type": "sriov", "deviceID": vf(0)}], ids=["ipoib", "sriov"])
def test_del_of_a_pod_in_no_books_gives_its_addresses_back_once(rig: Rig, conf: dict[str, Any]) -> None:
    stub = rig.stub_ipam(NOTES)
    for pod in (rig.pod(), None, None):  # as kubelet does it
        rig.delete("old", pod, ipam=stub, **conf)
        rig.attachments.leases.settle()
    assert said(rig.folder) == ["DEL old"]


def test_a_plugin_that_fails_leaves_the_addresses_owed_and_the_del_a_success(rig: Rig) -> None:
    stub = rig.stub_ipam(NOTES + 'echo \'{"code": 11, "msg": "no API server"}\'; exit 1')
    rig.delete("old", None, ipam=stub, **OLD)
    assert rig.attachments.leases.settle() == (0, 0)
    (owed,) = rig.ledger.owed_leases()
    assert (owed.container_id, owed.ifname) == ("old", "net1")
    assert owed.problem == "IPAM plugin stub: DEL failed: no API server"
    rig.stub_ipam(NOTES)
    assert rig.settle_later() == (1, 0)
    assert said(rig.folder) == ["DEL old"] * 2


def test_repeated_dels_of_a_pod_in_the_books_ask_the_plugin_no_more(rig: Rig) -> None:
    stub = rig.stub_ipam(NOTES + stub_answer("10.0.0.2/24"))
    conf: dict[str, Any] = {"deviceID": vf(0), "ipam": stub}
    pod = rig.pod()
    rig.add("c1", pod, **conf)
    rig.detach("c1", pod, **conf)
    rig.delete("c1", None, **conf)
    rig.delete("c1", None, **conf)
    assert not rig.ledger.owed_leases()
    assert said(rig.folder) == ["ADD c1", "DEL c1"]


def test_the_del_of_an_add_that_failed_asks_no_plugin(rig: Rig) -> None:
    """The runtime starts the sandbox over and over, and each time there was no address yet."""
    stub = rig.stub_ipam(NOTES)
    pod = rig.pod()
    with pytest.raises(AgentError):
        rig.add("c1", pod, deviceID="0000:7f:00.0", ipam=stub)
    rig.delete("c1", pod, deviceID="0000:7f:00.0", ipam=stub)
    assert not rig.ledger.owed_leases()
    assert said(rig.folder) == []


def test_a_chained_call_gives_back_nothing_in_the_name_of_the_clusters_interface(rig: Rig) -> None:
    """The cluster's own plugin may have leased under this very network, container and interface."""
    rig.delete("old", rig.pod(), "eth0", ipam=rig.stub_ipam(NOTES), prevResult={"cniVersion": "1.1.0"})
    assert not rig.ledger.owed_leases()
    assert said(rig.folder) == []


def test_what_a_row_stands_for_is_given_back_by_its_own_del_alone(rig: Rig) -> None:
    """A chained call has made net1, which a strange call names."""
    stub = rig.stub_ipam(NOTES + stub_answer("10.0.0.2/24"))
    rig.granted.append(GrantedDevice(vf(0), "rdma/vf", network({"name": "rails", "ipam": stub})))
    pod = rig.pod()
    rig.add("c1", pod, "eth0", prevResult={"cniVersion": "1.1.0"})
    rig.delete("c1", pod, "net1", ipam=stub, deviceID=vf(1))
    assert not rig.ledger.owed_leases()
    assert said(rig.folder) == ["ADD c1"]


def test_the_number_of_callers_that_are_remembered_is_bounded() -> None:
    in_flight = InFlight()
    for number in range(MAX_CALLERS + 1):
        in_flight.remember(f"c{number}", "net1")
        in_flight.remember("c1", "net1")
    assert not in_flight.has_called("c0", "net1")
    assert in_flight.has_called("c1", "net1")
    assert len(in_flight._callers) == MAX_CALLERS
