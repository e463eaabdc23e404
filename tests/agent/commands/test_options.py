from __future__ import annotations

import argparse
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agent.commands import options
from agent.commands.options import open_host, show
from agent.hardware.machine import Machine


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("two\nlines", "two\nlines\n"),
        ("Zürich – ▲\n", "Zürich – ▲\n\n"),
        ("eth\x1b]0;x\x07\udcff\x9b2J\nis down", "eth\\x1b]0;x\\x07\\udcff\\x9b2J\nis down\n"),
    ],
)
def test_text_is_shown_as_it_is_and_gives_no_orders_to_the_terminal(
    text: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show(argparse.Namespace(output="text"), {}, text)
    assert capsys.readouterr().out == shown


def api_server_of_a_host(tmp_path: Path) -> str | None:
    (tmp_path / "sys").mkdir()
    host = open_host(argparse.Namespace(open_host=None, root=tmp_path))
    assert isinstance(host, Machine)
    with closing(host):
        return host.api_server


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("fd00::1", "fd00::1"),
        ("cluster.example", "192.0.2.7"),  # as on AKS
        ("no.example", None),
        ("", None),
    ],
)
def test_the_api_server_is_known_by_address_also_where_the_cluster_tells_a_name(
    told: str, expected: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def ask(name: str, *_: Any, **__: Any) -> list[tuple[Any, ...]]:
        if name != "cluster.example":
            raise OSError("no such name")
        return [(2, 1, 6, "", (address, 0)) for address in ("192.0.2.7", "192.0.2.8")]

    monkeypatch.setattr("socket.getaddrinfo", ask)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", told)
    assert api_server_of_a_host(tmp_path) == expected


def test_a_start_does_not_wait_long_for_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    over = threading.Event()
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: over.wait(60) and [])
    monkeypatch.setattr(options, "RESOLVER_SECONDS", 0.01)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "cluster.example")
    assert api_server_of_a_host(tmp_path) is None
    over.set()
