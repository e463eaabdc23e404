"""A plugin or a network that hangs delays nobody else's leases."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.errors import IpamFailed
from agent.model.allocation import Attachment, PodRef
from cni import netconf
from cni.call import Call
from cni.ipam.leases import MAX_AT_WORK
from cni.turns import FIRST_REFUSAL_SECONDS, LONGEST_REFUSAL_SECONDS
from tests.cni.desk import NOTES, Desk, open_desk
from tests.cni.tiny_node import stub_answer
from tests.waiting import until


def test_a_plugin_that_hangs_keeps_no_other_plugins_leases(tmp_path: Path) -> None:
    with open_desk(tmp_path, seconds=3) as desk:
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
        desk.now += FIRST_REFUSAL_SECONDS + 1
        assert desk.leases.settle() == (0, 0)
        assert [line for line in desk.said() if "h" in line] == ["DEL h1", "DEL h2"]
        assert "did not end within 3 s" in desk.books.owed_leases()[0].problem


def test_many_that_go_at_once_do_not_each_wait_for_a_plugin_that_hangs(tmp_path: Path) -> None:
    """At a start after a crash, say: nobody is served before all of them have been looked at."""
    with open_desk(tmp_path, seconds=3) as desk:
        desk.plugin("hangs", NOTES + "sleep 1000")
        desk.plugin("stub", NOTES)
        rows = [desk.row(f"h{n}", "hangs") for n in range(3)]
        assert [desk.leases.give_back(row) for row in rows] == [False] * 3
        assert desk.said() == ["DEL h0"]
        assert desk.leases.give_back(desk.row("c1"))
        desk.plugin("hangs", NOTES)
        desk.now += LONGEST_REFUSAL_SECONDS
        assert desk.leases.give_back(rows[1])


def test_few_plugins_are_at_work_at_once_however_many_go(desk: Desk) -> None:
    """They share the agent's memory, and one that talks to the API server takes tens of megabytes."""
    on = desk.folder / "on"
    on.mkdir()
    for kind in ("one", "another"):
        desk.plugin(kind, f"touch {on}/$$; ls {on} | wc -l >>{desk.folder}/calls; sleep 0.1; rm {on}/$$")
    rows = [desk.row(f"{kind}{number}", kind) for number in range(2 * MAX_AT_WORK) for kind in ("one", "another")]
    done: list[bool] = []
    threads = [threading.Thread(target=lambda row=row: done.append(desk.leases.give_back(row))) for row in rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [True] * len(rows)
    assert len(desk.said()) == len(rows)
    assert max(map(int, desk.said())) <= MAX_AT_WORK


BLOCKS = "touch $(dirname $0)/on.$CNI_CONTAINERID; while ! [ -e $(dirname $0)/go ]; do sleep 0.05; done; "


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


def test_however_many_networks_hang_one_that_does_not_finds_a_place(tmp_path: Path) -> None:
    """Such as all those whose addresses come from an API server, while it is away."""
    with open_desk(tmp_path, seconds=1, add_seconds=60) as desk:
        desk.plugin("stub", f"{BLOCKS} {stub_answer('10.0.0.2/24')}")
        desk.plugin("other", stub_answer("10.0.0.3/24"))
        rows = [desk.row(f"d{number}", network_name=f"n{number % 4}", namespace="team") for number in range(8)]
        with waiting_for(desk, rows, 1, "take"):
            assert desk.leases.take(desk.row("c", "other")).addresses == ("10.0.0.3/24",)
        rows = [desk.row(f"e{number}", network_name=f"n{number}", namespace="team") for number in range(4)]
        with waiting_for(desk, rows, 2, "take"):
            pass  # they have answered, and are like any other


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
        desk.now += LONGEST_REFUSAL_SECONDS
        desk.leases.status(call_of(desk))


def test_a_plugin_that_says_that_it_can_lease_nothing_is_told_of(tmp_path: Path) -> None:
    with open_desk(tmp_path, status_seconds=30) as desk:
        desk.plugin(
            "stub",
            """[ $CNI_COMMAND = VERSION ] && { echo '{"supportedVersions": ["1.1.0"]}'; exit; }
            echo '{"code": 50, "msg": "the range is empty"}'; exit 1""",
        )
        with pytest.raises(IpamFailed, match="STATUS failed: the range is empty"):
            desk.leases.status(call_of(desk))


def test_status_asks_no_further_plugin_where_as_many_are_at_work_as_may_be(desk: Desk) -> None:
    desk.plugin("stub", f"{NOTES} [ $CNI_COMMAND = ADD ] || exit 1; {BLOCKS} {stub_answer('10.0.0.2/24')}")
    rows = [desk.trusted(desk.row(f"c{number}", network_name=f"n{number}")) for number in range(4)]
    with waiting_for(desk, rows, 4, "take"):
        desk.leases.status(call_of(desk))
        assert sorted(desk.said()) == ["ADD c0", "ADD c1", "ADD c2", "ADD c3"]
    desk.leases.status(call_of(desk))
    assert desk.said()[4:] == ["VERSION"]


def test_an_address_may_take_longer_than_its_release(tmp_path: Path) -> None:
    with open_desk(tmp_path, seconds=1, add_seconds=60) as desk:
        desk.plugin("stub", f"[ $CNI_COMMAND = ADD ] || exec sleep 1000; sleep 2; {stub_answer('10.0.0.2/24')}")
        row = desk.row("c1")
        assert desk.leases.take(row).addresses == ("10.0.0.2/24",)
        assert not desk.leases.give_back(row)
