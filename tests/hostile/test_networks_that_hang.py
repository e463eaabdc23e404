"""Somebody makes many networks whose IPAM plugin never ends: pods of other networks get their addresses."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from agent.errors import AgentError, DeviceBusy, IpamFailed
from agent.model.allocation import Attachment
from cni.call_limits import FRESH_SECONDS, MAX_NETWORKS, REFUSALS, Trust
from tests.cni.conftest import relay_program as relay_program  # a fixture
from tests.cni.desk import Desk, open_desk
from tests.cni.ipam.test_leases import HAS_HOST_LOCAL, NO_HOST_LOCAL
from tests.cni.relay import finish
from tests.cni.test_crowded import Node, network
from tests.cni.test_crowded import node as node  # the fixture
from tests.cni.tiny_node import stub_answer
from tests.waiting import until

SOON = 30.0
"""Far below the 90 s for which an ADD waits for its turn, and far above what a busy machine takes for an ADD."""


@contextmanager
def hanging(node: Node, count: int, namespace: str) -> Iterator[None]:
    """Have pods of a namespace start in as many networks, whose plugin does not end before the test does."""
    with ExitStack() as stack:
        for number in range(count):
            call = stack.enter_context(node.start("ADD", number, network(f"hangs-{namespace}-{number}"), namespace))
            stack.callback(call.kill)
        until(lambda: node.hanging() != [])
        yield
        (node.rig.folder / "go").touch()


def add_and_delete(node: Node, name: str, namespace: str) -> float:
    """Start a pod, and end it. Returns how long its start took."""
    conf, began = network(name), time.monotonic()
    answer = node.run("ADD", 901, conf, namespace)
    took = time.monotonic() - began
    assert [ip["address"] for ip in json.loads(answer.stdout).get("ips", [])] == ["10.0.0.2/24"], answer.stdout
    assert node.run("DEL", 901, conf, namespace).status == 0
    until(lambda: not node.rig.ledger.attachments_of("c901", "net901"))
    return took


def test_a_network_that_has_answered_goes_on_while_fifty_fresh_ones_hang(node: Node) -> None:
    for namespace in ("team", "attacker"):
        add_and_delete(node, "healthy", namespace)
    with hanging(node, 50, "attacker"):
        assert max(add_and_delete(node, "healthy", "team") for _ in range(5)) < SOON
        assert add_and_delete(node, "healthy", "attacker") < SOON  # in the attacker's namespace, too
        assert node.rig.ledger.owed_leases() == ()


def test_a_network_that_nobody_has_used_yet_starts_in_another_namespace(node: Node) -> None:
    with hanging(node, 12, "attacker"):
        assert add_and_delete(node, "new", "team") < SOON
        assert add_and_delete(node, "newer", "team") < SOON


def test_the_del_of_a_pod_whose_add_waits_for_a_plugin_ends_that_add(node: Node) -> None:
    conf = network("hangs-a")
    with ExitStack() as stack:
        at_work, in_line = (stack.enter_context(node.start("ADD", number, conf)) for number in (1, 2))
        for call in (at_work, in_line):
            stack.callback(call.kill)
        until(lambda: len(node.hanging()) == 1)
        began = time.monotonic()
        for number, call in ((1, at_work), (2, in_line)):
            assert node.run("DEL", number, conf).status == 0
            error = finish(call).error
            assert error["code"] == 11
            assert f"DEL of c{number} net{number} came while its ADD was under way" in error["msg"]
        assert time.monotonic() - began < SOON / 2
        until(lambda: node.rig.ledger.attachments() == ())
        (node.rig.folder / "go").touch()


# ---------------------------------------------------------------------------------------------- the plugins' own books


def row_of(desk: Desk, number: int, namespace: str, kind: str = "stub") -> Attachment:
    return desk.row(f"{namespace}{number}", kind, network_name=f"{namespace}-{number}", namespace=namespace)


@contextmanager
def taking(desk: Desk, rows: Sequence[Attachment]) -> Iterator[None]:
    """Ask for addresses meanwhile, whatever becomes of it."""

    def take(row: Attachment) -> None:
        with suppress(AgentError):
            desk.leases.take(row, lambda: is_wanted)

    is_wanted = True
    threads = [threading.Thread(target=take, args=(row,)) for row in rows]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_wanted = False
        for thread in threads:
            thread.join()


def test_networks_that_answered_until_their_api_server_went_away_leave_room_for_other_namespaces(
    tmp_path: Path,
) -> None:
    """Six rails, say."""
    with open_desk(tmp_path, seconds=60) as desk:
        desk.plugin(
            "stub",
            f"[ -e {tmp_path}/away ] || {{ {stub_answer('10.0.0.2/24')}; exit; }}; touch {tmp_path}/on.$$; sleep 20",
        )
        desk.plugin("other", stub_answer("10.0.0.3/24"))
        rails = [row_of(desk, n, "train") for n in range(6)]
        for rail in [*rails, row_of(desk, 0, "team", "other")]:
            desk.leases.take(rail)
        (tmp_path / "away").touch()
        with taking(desk, [row_of(desk, n, "train") for n in range(6)]):
            until(lambda: len(list(tmp_path.glob("on.*"))) == 2)
            began = time.monotonic()
            assert desk.leases.take(row_of(desk, 0, "team", "other")).addresses == ("10.0.0.3/24",)
            assert time.monotonic() - began < 15


def test_who_was_killed_for_time_is_refused_at_once_for_longer_and_longer(tmp_path: Path) -> None:
    with open_desk(tmp_path, seconds=0.5) as desk:
        desk.plugin("stub", "sleep 1000")
        pauses = []
        for _ in range(6):
            with pytest.raises(IpamFailed, match=r"did not end within 0\.5 s, and was killed"):
                desk.leases.take(desk.row("c"))
            with pytest.raises(DeviceBusy, match=r"^network rails .*killed, .*asked again in \d+ s$") as refused:
                desk.leases.take(desk.row("c"))
            pauses.append(float(str(refused.value).split()[-2]))
            desk.now += pauses[-1] + 1
        assert pauses == sorted(pauses)
        assert pauses[0] < pauses[-1] <= REFUSALS.longest
        desk.plugin("stub", stub_answer("10.0.0.2/24"))
        desk.leases.take(desk.row("c"))
        desk.leases.take(desk.row("c"))


def test_a_network_that_never_answered_has_little_time_at_first_and_one_that_did_has_all() -> None:
    now = 0.0
    trust = Trust(lambda: now)
    trust.note_answer("known", "")
    for name in ("known", "fresh"):
        trust.note_kill(name, "")
    assert [trust.seconds(name, "", 125.0) for name in ("known", "fresh", "new")] == [125, 30, 15]
    for _ in range(20):
        trust.note_kill("fresh", "")
    assert trust.seconds("fresh", "", 125.0) == 125


def test_whoever_makes_networks_without_end_is_not_remembered_without_end() -> None:
    trust = Trust()
    for number in range(2 * MAX_NETWORKS):
        trust.note_kill(("fresh", number), "")
        trust.note_answer(("healthy",), "")
    assert trust.has(("healthy",), "")
    remembered = [number for number in range(2 * MAX_NETWORKS) if trust.refused_for(("fresh", number), "")]
    assert len(remembered) == MAX_NETWORKS - 1


def test_who_was_refused_owes_nothing(tmp_path: Path) -> None:
    with open_desk(tmp_path, seconds=0.5) as desk:
        desk.plugin("stub", "sleep 1000")
        asked, refused = desk.row("c1"), desk.row("c2")
        for row in (asked, refused):
            with pytest.raises(AgentError):
                desk.leases.take(row)
        assert not desk.leases.give_back(asked)
        assert desk.leases.give_back(refused)


@pytest.mark.skipif(not HAS_HOST_LOCAL, reason=NO_HOST_LOCAL)
@pytest.mark.parametrize("output", [1, 2])
def test_host_local_that_is_to_read_its_own_output_ends(tmp_path: Path, output: int) -> None:
    """It opens what the network names as resolvConf: a file of so many bytes, where a pipe could be read for ever."""
    ipam: dict[str, Any] = {"ranges": [[{"subnet": "10.9.0.0/24"}]], "dataDir": str(tmp_path / "leases")}
    with (
        open_desk(tmp_path, seconds=FRESH_SECONDS) as desk,
        pytest.raises(IpamFailed, match="token too long"),
    ):
        desk.leases.take(desk.row("c", "host-local", **ipam, resolvConf=f"/proc/self/fd/{output}"))
