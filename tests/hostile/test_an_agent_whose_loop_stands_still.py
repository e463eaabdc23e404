"""An event loop that stands still: kubelet waits in Allocate, and admits no pod. The agent ends by itself."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from agent.operator import probe
from agent.process.supervision import STUCK_SECONDS
from hack.sim.stage import Stage
from tests.e2e.conftest import RELAY

ROOT = Path(__file__).parents[2]
LATE_SECONDS = 30.0
"""The machine may be busy."""
ENDED_SECONDS = 35.0
"""An agent that is stopped is ended by kubelet within about 30 s."""
AGENT = """
import ctypes, signal, sys

signal.signal(signal.SIGUSR1, lambda *_: ctypes.PyDLL(None).sleep(120))
from hack.sim.agent import main

sys.exit(main(sys.argv[1:]))
"""
"""The agent itself. A signal makes its main thread, which is the loop's, stand still inside a C call that keeps the
interpreter's lock."""


@pytest.fixture
def stage(own_network: None, short_folder: Path) -> Iterator[Stage]:
    """A node on which kubelet and such an agent run."""
    with closing(Stage(short_folder, RELAY)) as made:
        made.build_node("one-nic", with_links=False)
        made.start_kubelet()
        options = ["run", "--config", str(made.folder / "config.yaml"), *made.host, "--log-format", "text"]
        made.spawn("agent", ["-c", AGENT, *options], {"NODE_NAME": "node"})
        made.await_ready()
        yield made


def test_it_ends_and_shows_where_each_thread_stands(stage: Stage) -> None:
    agent = stage.processes["agent"]
    agent.send_signal(signal.SIGUSR1)
    assert agent.wait(timeout=STUCK_SECONDS + LATE_SECONDS) == 1
    text = stage.log("agent")
    assert f"Timeout (0:00:{STUCK_SECONDS:02.0f})!" in text
    threads = re.split(r"^Thread 0x", text, flags=re.MULTILINE)[1:]
    assert len(threads) > 1
    assert any("in <lambda>" in thread and "in run_forever" in thread for thread in threads)
    assert any("process/sockets.py" in thread for thread in threads)


def test_the_liveness_probe_ends_an_agent_that_is_stopped_in_time_and_none_by_one_slow_answer() -> None:
    pod = yaml.safe_load((ROOT / "daemonset/base/daemonset.yaml").read_text())["spec"]["template"]["spec"]
    (liveness,) = [each["livenessProbe"] for each in pod["containers"] if each["name"] == "agent"]
    assert probe.SECONDS < liveness["timeoutSeconds"] <= liveness["periodSeconds"]  # else the failures come later
    at_most = liveness["periodSeconds"] * liveness["failureThreshold"] + liveness["timeoutSeconds"]
    assert at_most + liveness["terminationGracePeriodSeconds"] <= ENDED_SECONDS
    least = liveness["periodSeconds"] * (liveness["failureThreshold"] - 1)
    assert least >= STUCK_SECONDS  # an agent that can tell why it ends does so first
