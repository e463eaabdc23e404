"""IPAM plugins that are none, that run away, or that the agent dies of: other pods do not notice."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cni.ipam.leases import ASKED
from hack.sim.runtime import make_netns, remove_netns
from hack.sim.stage import CONFIG, Stage, settled, wait
from tests.waiting import until

ANSWER = '{"cniVersion": "1.0.0", "ips": [{"address": "10.9.0.5/24"}]}'


class Runtime:
    """Calls the plugin as a container runtime does, for sandboxes with a namespace each."""

    def __init__(self, stage: Stage, pf: str) -> None:
        self._stage = stage
        self._pf = pf
        self._sandboxes: dict[str, Path] = {}

    def call(self, command: str, sandbox: str, ipam: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Call for a VF of the PF. Returns the exit status, and what was printed."""
        if sandbox not in self._sandboxes:
            self._sandboxes[sandbox] = self._stage.folder / "netns" / sandbox
            make_netns(self._sandboxes[sandbox])
        conf = {"name": "rails", "pf": [self._pf]} | ({"ipam": ipam} if ipam is not None else {})
        return self._stage.call(command, conf, sandbox, self._sandboxes[sandbox])

    def plugin(self, script: str) -> dict[str, Any]:
        """Install an IPAM plugin that nobody knows, and return what names it."""
        file = self._stage.folder / "cni/ours"
        fresh = file.with_suffix(".new")
        fresh.write_text(f"#!/bin/sh\nhere={self._stage.folder}\n{script}\n")
        fresh.chmod(0o755)
        fresh.rename(file)
        return {"type": "ours"}

    def close(self) -> None:
        """Remove the namespaces."""
        for path in self._sandboxes.values():
            remove_netns(path)


@pytest.fixture
def runtime(stage: Stage) -> Iterator[Runtime]:
    """An agent whose VFs no resource offers."""
    machine = stage.build_node("h100-8gpu")
    snapshot = machine.scan()
    pf = next(n.name for d in snapshot.devices if d.is_vf and (n := snapshot.pf_netdev(d)) is not None)
    stage.run({**CONFIG, "resources": [{"name": "nvidia.com/gpu", "kind": "gpu"}], "networks": []})
    with closing(Runtime(stage, pf)) as made:
        yield made


def owed(stage: Stage) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = stage.status()["owedLeases"]
    return found


def test_a_plugin_that_calls_itself_is_killed_with_all_it_started_and_the_agent_serves(
    stage: Stage, runtime: Runtime
) -> None:
    """By its own path, since it finds itself by no other. It would stop by itself at 200."""
    ours = runtime.plugin(
        "[ $CNI_COMMAND = DEL ] && exit; echo $$ >>$here/pids; n=${DEPTH:-0}; [ $n -ge 200 ] && exec sleep 1000;"
        " DEPTH=$((n + 1)) setsid --wait $here/cni/ours"
    )
    status, answer = runtime.call("ADD", "c1", ours)
    assert status == 1
    assert "IPAM plugin ours: ADD ran " in answer["msg"]
    assert "processes at once, and 32 are allowed, and was killed with all that it had started" in answer["msg"]
    pids = (stage.folder / "pids").read_text().split()
    assert len(pids) < 200
    until(lambda: not any(Path("/proc", pid).exists() for pid in pids))
    assert runtime.call("ADD", "c2")[0] == 0
    assert runtime.call("DEL", "c1", ours)[0] == 0
    assert stage.processes["agent"].poll() is None


def test_an_agent_that_was_killed_during_a_del_serves_first_and_gives_the_lease_back_later(
    stage: Stage, runtime: Runtime
) -> None:
    ours = runtime.plugin(
        f"[ $CNI_COMMAND = ADD ] && {{ echo '{ANSWER}'; exit; }}; touch $here/asked;"
        " while ! [ -e $here/go ]; do sleep 0.05; done; touch $here/returned"
    )
    assert runtime.call("ADD", "c1", ours)[0] == 0
    assert runtime.call("DEL", "c1", ours)[0] == 0
    until((stage.folder / "asked").exists)
    stage.end("agent", signal.SIGKILL)
    (stage.folder / "asked").unlink()
    stage.start_agent()
    stage.await_ready()
    # The plugin hangs, and everything is served.
    until((stage.folder / "asked").exists)
    assert settled(lambda: [row["device"] for row in stage.status()["attachments"]]) == []
    assert [lease["container"] for lease in owed(stage)] == ["c1"]
    assert runtime.call("ADD", "c2")[0] == 0
    (stage.folder / "go").touch()
    wait("the lease to be given back", lambda: owed(stage) == [] or None)
    assert (stage.folder / "returned").exists()


def test_an_agent_that_dies_of_an_ipam_plugin_serves_all_the_same(stage: Stage, runtime: Runtime) -> None:
    """Each death is noted before, so that after a start there is time until the next."""
    ours = runtime.plugin(f"[ $CNI_COMMAND = ADD ] && {{ echo '{ANSWER}'; exit; }}; kill -9 $PPID")
    assert runtime.call("ADD", "c1", ours)[0] == 0
    assert runtime.call("DEL", "c1", ours)[0] == 0
    assert stage.processes["agent"].wait(30) == -signal.SIGKILL
    stage.start_agent()
    assert stage.processes["agent"].wait(30) == -signal.SIGKILL
    # It had all that it serves by then.
    assert stage.log("agent").count("registered with kubelet") == 2
    stage.start_agent()
    stage.await_ready()
    assert [(lease["container"], lease["problem"]) for lease in owed(stage)] == [("c1", ASKED)]
    assert runtime.call("ADD", "c2")[0] == 0
    assert stage.status()["attachments"] != []
    assert stage.processes["agent"].poll() is None
