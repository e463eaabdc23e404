"""The agent is killed at a sample of its steps, with real VFs and a PF whose driver takes one setting at a time."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.soak import observe
from tests.soak.agent import Agent
from tests.soak.points import Point, distinct
from tests.soak.small_agent import Options
from tests.vm.adapters import MakePod, MakeVfs, Pf, link, shows, wait_until
from tests.vm.direct import look
from tests.vm.node import RELAY, ROOT

FOLDER = Path("/run/crash")
CONF = {"vlan": 100, "vlanQoS": 3, "trust": "on", "spoofchk": "off", "mac": "02:00:00:00:00:77", "mtu": 1400}
SAMPLE = 7
"""Points of ADD, and as many of DEL."""


class Bench:
    """Two VFs, and agents that may be killed."""

    def __init__(self, pf: Pf, device: str) -> None:
        self.pf, self.device = pf, device
        for name in ("state", "spool", "pods"):
            (FOLDER / name).mkdir(parents=True, exist_ok=True)
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            self._zygote = subprocess.Popen(
                [sys.executable, "-m", "tests.soak.zygote", str(its.fileno())], cwd=ROOT, pass_fds=[its.fileno()]
            )
        self._requests = mine
        self.agent: Agent | None = None
        self.before = look(pf)

    def close(self) -> None:
        if self.agent is not None:
            self.agent.kill()
        self._requests.close()
        self._zygote.wait(60)

    def start(self, *, watched: bool) -> Agent:
        if self.agent is not None:
            self.agent.kill()
        self.agent = Agent(
            self._requests, Options(str(FOLDER), is_real=True, watched=watched), FOLDER / "agent.log", seconds=120
        )
        assert self.agent.lives, (FOLDER / "agent.log").read_text()[-3000:]
        return self.agent

    def relay(self, command: str, netns: str) -> subprocess.Popen[bytes]:
        env = {
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": netns,
            "CNI_IFNAME": "net1",
            "CNI_NETNS": f"/run/netns/{netns}",
            "CNI_PATH": "/nowhere",
            "NODEFABRIC_CNI_SOCKET": str(FOLDER / "cni.sock"),
            "NODEFABRIC_CNI_SPOOL": str(FOLDER / "spool"),
            **({"NODEFABRIC_CNI_WAIT": "120"} if command == "ADD" else {}),
        }
        document = {"cniVersion": "1.1.0", "name": "n", "type": "nodefabric", "deviceID": self.device, **CONF}
        pipe = subprocess.PIPE
        process = subprocess.Popen([RELAY], env=env, stdin=pipe, stdout=pipe)
        assert process.stdin is not None
        process.stdin.write(json.dumps(document).encode())
        process.stdin.close()
        process.stdin = None
        return process

    def finish(self, relay: subprocess.Popen[bytes]) -> None:
        stdout, _ = relay.communicate(timeout=180)
        assert relay.returncode == 0, (stdout, (FOLDER / "agent.log").read_text()[-3000:])

    def killed_at(self, number: int | None, command: str, netns: str) -> tuple[Point, ...]:
        """Run a call whose agent dies at a point, and have the next agent finish it. None: list the points."""
        agent = self.start(watched=True)
        agent.order("arm", at=number)
        relay = self.relay(command, netns)
        if number is None:
            self.finish(relay)
            self.await_rest(command)
            points = agent.points()
            agent.kill()
            return distinct(points)
        agent.await_death(relay, 180)
        if agent.lives:  # what goes on after the answer
            self.await_rest(command, also=lambda: not agent.answers())
        print(f"{command}: killed at {agent.place_of_death or 'no point'}")
        agent.kill()
        self.start(watched=False)
        self.finish(relay)
        return ()

    def await_rest(self, command: str, also: Callable[[], bool] = lambda: False) -> None:
        if command == "DEL":
            wait_until("the VF back", lambda: not observe.Books(FOLDER / "state/ledger.db").rows or also(), 120)

    def expect_attached(self, netns: str) -> None:
        shown = link("net1", netns)
        assert (shown["address"], shown["mtu"]) == (CONF["mac"], CONF["mtu"])
        settings = self.pf.settings(0)
        assert settings["vlan_list"] == [{"vlan": 100, "qos": 3}]
        assert (settings["trust"], settings["spoofchk"]) == (True, False)
        (row,) = observe.Books(FOLDER / "state/ledger.db").rows
        assert (row.device, row.state, row.container_id) == (self.device, "attached", netns)

    def expect_nothing_left(self) -> None:
        wait_until("everything as before", lambda: shows(lambda: look(self.pf), self.before), 120)
        books = observe.Books(FOLDER / "state/ledger.db")
        assert (books.rows, books.quarantine, books.damage) == ((), {}, None)


@pytest.fixture
def bench(pfs: tuple[Pf, ...], vfs: MakeVfs) -> Iterator[Bench]:
    with closing(Bench(pfs[0], vfs(pfs[0], 2)[0])) as made:
        yield made


def sample(points: tuple[Point, ...]) -> list[int]:
    """Choose points after a change, evenly."""
    changes = [point.number for point in points if point.after_change]
    return changes[:: max(1, len(changes) // SAMPLE)]


def test_an_agent_killed_at_a_step_of_add_or_del_loses_no_real_vf(bench: Bench, netns: MakePod) -> None:
    pod = netns()
    adding = sample(bench.killed_at(None, "ADD", pod))
    bench.expect_attached(pod)
    deleting = sample(bench.killed_at(None, "DEL", pod))
    bench.expect_nothing_left()
    assert len(adding) >= 3
    for number in adding:
        bench.killed_at(number, "ADD", pod)
        bench.expect_attached(pod)
        bench.finish(bench.relay("DEL", pod))
        bench.expect_nothing_left()
    for number in deleting:
        agent = bench.start(watched=False)
        bench.finish(bench.relay("ADD", pod))
        agent.kill()
        bench.killed_at(number, "DEL", pod)
        bench.expect_nothing_left()
    print(f"{len(adding)} points of ADD and {len(deleting)} of DEL tried")
