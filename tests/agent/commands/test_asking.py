"""The commands that ask the running agent."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.__main__ import main
from agent.model.device import Snapshot
from agent.operator.admin import AdminServer
from agent.report import status
from agent.report.endpoints import EndpointServer, Pages
from agent.report.events import Events
from agent.report.facts import Facts
from agent.report.status import served


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    """A configuration whose agent answers."""
    events = Events()
    events.note("attach", "0000:3b:00.2", "is net1 of default/a")
    events.note("health", "0000:3b:00.2", "LinkDown (rdma/vf)", warning=True)
    document = status.build(
        Facts(Snapshot()), node="n1", version="1.2", kinds={}, conditions={}, events=events.listed()
    )
    server = EndpointServer.open("127.0.0.1", 0, Pages(lambda _: ("", b""), lambda: served(document)))
    path = tmp_path / "config.yaml"
    path.write_text(f"{{endpoints: {{port: {server.port}}}, stateDir: {tmp_path}/state, runDir: {tmp_path}/run}}")
    try:
        yield path
    finally:
        server.close()


@pytest.mark.parametrize(
    ("command", "expected"), [("status", "node n1  nodefabric 1.2  ready"), ("events", "LinkDown")]
)
def test_an_agent_that_has_refused_the_new_configuration_is_asked_all_the_same(
    config: Path, capsys: pytest.CaptureFixture[str], command: str, expected: str
) -> None:
    config.write_text(config.read_text().removesuffix("}") + ", resources: [{kind: vff}]}")
    assert main([command, "--config", str(config)]) == 0
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize("command", [("release", "0000:3b:00.2", "--reason", "stuck"), ("pause-gpus", "0")])
def test_so_is_one_that_is_to_do_something(
    short_folder: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    path = short_folder / "config.yaml"
    path.write_text(f"{{stateDir: {short_folder}/state, runDir: {short_folder}, resources: [{{kind: vff}}]}}")

    def answer(asked: Mapping[str, Any]) -> str:
        return f"did {asked['command']}, though: no\nline\x1b[2K"

    server = AdminServer(short_folder / "admin.sock", {command[0]: answer})
    server.start()
    try:
        assert main([*command, "--config", str(path)]) == 0
    finally:
        server.close()
    assert capsys.readouterr().out == f"did {command[0]}, though: no\\nline\\x1b[2K\n"


@pytest.mark.parametrize(
    ("command", "status"),
    [(("status",), 3), (("events",), 3), (("release", "0000:3b:00.2", "--reason", "x"), 1), (("pause-gpus", "0"), 3)],
)
def test_a_wrong_configuration_without_an_agent_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...], status: int
) -> None:
    path = tmp_path / "config.yaml"
    folders = f"runDir: {tmp_path}, stateDir: {tmp_path}"
    path.write_text(f"{{endpoints: {{port: 1}}, {folders}, resources: [{{kind: vff}}]}}")
    assert main([*command, "--config", str(path)]) == status
    assert f"{path}: " in capsys.readouterr().err


def test_an_agent_that_waits_for_its_configuration_has_no_status_to_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = Pages(lambda _: ("", b""), lambda: served({"ready": False, "obstacles": {"config": "is wrong"}}))
    server = EndpointServer.open("127.0.0.1", 0, waiting)
    path = tmp_path / "config.yaml"
    path.write_text(f"{{endpoints: {{port: {server.port}}}, stateDir: {tmp_path}/state}}")
    try:
        assert main(["events", "--config", str(path)]) == 3
        assert "waits for its configuration to be repaired, and offers nothing yet: is wrong" in capsys.readouterr().err
        assert main(["status", "--config", str(path)]) == 3  # right by itself, and wrong for this node
        said = capsys.readouterr().out
        assert "waits for its configuration to be repaired, and offers nothing yet: is wrong" in said
        assert "does not run" not in said
    finally:
        server.close()


def test_a_proxy_of_the_shell_is_not_asked(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert main(["status", "--config", str(config)]) == 0


def test_what_does_not_speak_http_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    with socket.create_server(("127.0.0.1", 0)) as other:

        def greet() -> None:
            with other.accept()[0] as connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                connection.recv(1)

        thread = threading.Thread(target=greet)
        thread.start()
        port = other.getsockname()[1]
        path.write_text(f"{{endpoints: {{port: {port}}}, stateDir: {tmp_path}/state, runDir: {tmp_path}/run}}")
        assert main(["events", "--config", str(path)]) == 3
        thread.join()
    assert "does not speak HTTP" in capsys.readouterr().err


def test_events_are_told_newest_first(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", "--config", str(config)]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["AGO", "KIND", "WHAT", "EVENT"]
    assert first.split()[1:4] == ["!", "health", "0000:3b:00.2"]
    assert second.endswith("is net1 of default/a")
    assert main(["events", "--config", str(config), "-o", "json"]) == 0
    events = json.loads(capsys.readouterr().out)["events"]
    assert [event["kind"] for event in events] == ["health", "attach"]
    assert all(abs(time.time() - event["at"]) < 600 for event in events)


def test_without_an_agent_status_tells_the_books_and_events_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"{{endpoints: {{port: 1}}, stateDir: {tmp_path}/state, runDir: {tmp_path}/run}}")
    assert main(["status", "--config", str(path), "-o", "json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert document["obstacles"]["agent"] == f"does not run, and has left no ledger here ({tmp_path}/state/ledger.db)"
    assert (document["ready"], document["hardware"]["nics"]) == (False, [])
    assert main(["status", "--config", str(path)]) == 3
    capsys.readouterr()
    assert main(["events", "--config", str(path)]) == 3
    assert "does not answer" in capsys.readouterr().err
