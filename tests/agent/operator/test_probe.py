"""kubelet's exec probes: the program as it is started in the container, against the agent's socket."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.errors import HardwareError
from agent.operator import admin, probe

PROGRAM = Path(probe.__file__)


def probed(question: str, path: Path | None) -> tuple[int, str]:
    """Start the probe as its container does: without a site folder, and with its own file alone."""
    environment = {probe.SOCKET: str(path)} if path is not None else {}
    command = [sys.executable, "-I", "-S", str(PROGRAM), question]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    return done.returncode, (done.stdout + done.stderr).strip()


class Checks:
    """What is wrong, if anything."""

    health: str | None = None
    ready: str | None = None

    def look(self) -> str | None:
        if self.ready == "raise":
            raise HardwareError("the bus is gone")
        return self.ready


@pytest.fixture
def checks() -> Checks:
    return Checks()


@pytest.fixture
def path(short_folder: Path, checks: Checks) -> Iterator[Path]:
    path = short_folder / "probe.sock"
    with admin.answering_probes(path, {"loop": lambda: checks.health}, {"agent": checks.look}):
        yield path


def test_what_is_wrong_is_told_by_the_probe_that_it_belongs_to(path: Path, checks: Checks) -> None:
    assert probed("readyz", path) == (0, '{"done": "ok"}')
    checks.ready = "kubelet: has no open stream"
    assert probed("healthz", path) == (0, '{"done": "ok"}')
    assert probed("readyz", path) == (1, '{"error": "agent: kubelet: has no open stream", "reason": "NotWell"}')
    checks.health, checks.ready = "the event loop has stood still for 30 s", "raise"
    status, said = probed("healthz", path)
    assert (status, "the event loop has stood still for 30 s" in said) == (1, True)
    status, said = probed("readyz", path)
    assert (status, "HardwareError: the bus is gone" in said) == (1, True)


def test_a_question_that_nobody_knows_fails(path: Path) -> None:
    status, said = probed("metrics", path)
    assert status == 1
    assert "command must be one of healthz, readyz, is 'metrics'" in said


def test_where_no_agent_answers_the_probe_says_so_in_bounded_time(short_folder: Path) -> None:
    nobody = short_folder / "none.sock"
    assert probed("healthz", nobody) == (
        1,
        f"the agent does not answer at {nobody}: [Errno 2] No such file or directory",
    )
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(short_folder / "silent.sock"))
        silent.listen()
        status, said = probed("healthz", short_folder / "silent.sock")
    assert (status, "timed out" in said) == (1, True)


def test_without_a_socket_it_says_how_it_is_called() -> None:
    status, said = probed("healthz", None)
    assert (status, "usage: NODEFABRIC_PROBE_SOCKET=PATH nodefabric-probe healthz|readyz" in said) == (2, True)


def test_a_socket_that_cannot_be_made_ends_nobody(short_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (short_folder / "file").touch()
    with admin.answering_probes(short_folder / "file/probe.sock", {}, {}):
        pass
    assert "probes are not answered" in caplog.text
