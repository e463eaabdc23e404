from __future__ import annotations

import gzip
import json
import os
import re
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import pytest

from agent.errors import ConfigError, LedgerError
from agent.hardware.netns import run_in
from agent.report import endpoints, page
from agent.report.endpoints import Check, EndpointServer, Pages, names_this_machine
from agent.report.status import Served, served
from tests import descriptors, sandbox


def up(accept: str) -> tuple[str, bytes]:
    return "text/plain; version=0.0.4", b"up 1\n"


def pages(
    metrics: Callable[[str], tuple[str, bytes]] = up,
    status: Callable[[], Served] = lambda: served({}),
    health: Mapping[str, Check] | None = None,
    ready: Mapping[str, Check] | None = None,
    known: Mapping[str, str] | None = None,
) -> Pages:
    return Pages(metrics, status, health or {}, ready or {}, page.load(), known=lambda: known or {})


@contextmanager
def serving(shown: Pages, address: str = "127.0.0.1") -> Iterator[EndpointServer]:
    with closing(EndpointServer.open(address, 0, shown)) as server:
        yield server


def ask(
    server: EndpointServer, path: str, method: str = "GET", *, to: str = "127.0.0.1", **headers: str
) -> tuple[HTTPResponse, bytes]:
    with closing(HTTPConnection(to, server.port, timeout=10)) as connection:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response, response.read()


REBOUND, HERE = {"Host": "rebound.example:80"}, {"Host": "localhost:80"}
PRIVATE = ("/", "/status", "/page/main.js")
SECURE = {"X-Content-Type-Options": "nosniff", "Server": "nodefabric"}


@pytest.mark.parametrize(
    ("asked", "with_headers", "status", "headers"),
    [
        ("GET /metrics?collect=all", {}, 200, {"Content-Type": "text/plain; version=0.0.4", **SECURE}),
        ("HEAD /metrics", {}, 200, {"Content-Length": "5"}),
        *((f"{method} /metrics", {}, 405, {"Allow": "GET, HEAD"}) for method in ("POST", "PUT", "DELETE", "OPTIONS")),
        ("BREW /metrics", {}, 501, {"Content-Type": "text/plain; charset=utf-8"}),
        *((f"GET {path}", {}, 404, {}) for path in ("/x", "/metrics/", "/../etc/passwd", "/%2e%2e/etc/passwd")),
        *((f"GET {path}", REBOUND, 421, {}) for path in PRIVATE),
        *((f"GET {path}", HERE, 200, {}) for path in PRIVATE),
        ("GET /metrics", {"Host": "nodefabric.example"}, 200, {}),
    ],
)
def test_each_request_has_its_answer(
    asked: str, with_headers: dict[str, str], status: int, headers: dict[str, str]
) -> None:
    method, path = asked.split()
    with serving(pages()) as server:
        response, body = ask(server, path, method, **with_headers)
    assert response.status == status
    assert headers.items() <= dict(response.headers).items()
    assert response.headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert bool(body) == (method != "HEAD")


def test_checks_have_a_line_each_and_fail_with_any_but_those_that_make_nothing_unready() -> None:
    def broken() -> None:
        raise LedgerError("disk full")

    checks: dict[str, Check] = {"ledger": lambda: None, "kubelet": lambda: "rdma/vf has\nno open stream\x1b[2K"}
    known = {"kernel-events": "uevents cannot\nbe heard"}
    with serving(pages(health={"ledger": broken}, ready=checks, known=known)) as server:
        ready, alive = ask(server, "/readyz"), ask(server, "/healthz")
        del checks["kubelet"]
        well = ask(server, "/readyz")
    end = b"kernel-events: uevents cannot be heard\n"
    assert (ready[0].status, ready[1]) == (503, b"ledger: ok\nkubelet: rdma/vf has no open stream\\x1b[2K\n" + end)
    assert (alive[0].status, alive[1]) == (503, b"ledger: LedgerError: disk full\n")
    assert (well[0].status, well[1]) == (200, b"ledger: ok\n" + end)


def test_the_document_is_compressed_for_those_who_can_read_it_and_not_sent_to_those_who_have_it() -> None:
    document = {"units": ["0000:3b:00.1"] * 100}
    with serving(pages(status=lambda: served(document))) as server:
        response, body = ask(server, "/status", Accept_Encoding="br, gzip")
        plain, whole = ask(server, "/status")
        tag = plain.headers["ETag"]
        again, nothing = ask(server, "/status", If_None_Match=tag)
        weak, _ = ask(server, "/status", If_None_Match=f'"other", W/{tag}')
        other, _ = ask(server, "/status", If_None_Match='"other"')
    assert response.headers["Content-Encoding"] == "gzip"
    assert json.loads(gzip.decompress(body)) == json.loads(whole) == document
    assert (plain.headers["Content-Encoding"], plain.headers["Content-Type"]) == (None, "application/json")
    assert len(body) < len(whole) / 4
    assert (again.status, nothing, again.headers["ETag"]) == (304, b"", tag)
    assert (weak.status, other.status) == (304, 200)


def test_a_browser_gets_the_page_and_a_terminal_a_list() -> None:
    with serving(pages()) as server:
        shown, html = ask(server, "/", Accept="text/html,application/xhtml+xml")
        _, text = ask(server, "/", Accept="*/*")
        files = {path: ask(server, path) for path in page.load() if path != "/"}
    assert html.startswith(b"<!DOCTYPE html>")
    assert b"/metrics" in text
    assert {response.status for response, _ in files.values()} == {200}
    assert files["/page/main.js"][0].headers["Content-Type"].startswith("text/javascript")
    policy = shown.headers["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert "require-trusted-types-for 'script'" in policy
    assert re.findall(r"[a-z-]+-src ([^;]*)", policy) == ["'none'", "'self'", "'self'", "'self'", "'self'"]


def test_the_page_names_no_other_place() -> None:
    for path, file in page.load().items():
        found = set(re.findall(rb"""https?://[\w./-]*|["'(]//[\w.-]+""", file.body))
        assert found <= {b"http://www.w3.org/2000/svg"}, path


@pytest.fixture
def elsewhere(own_network: None) -> Iterator[int]:
    """Give the network namespace of another machine, on a link to this one: 10.77.0.2, and 10.77.0.1 here."""
    with ExitStack() as stack:
        with sandbox.network():
            other = os.open(sandbox.OWN_NETNS, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, other)
        peer = ("peer", "name", "out0", "netns", f"/proc/{os.getpid()}/fd/{other}")
        run("ip", "link", "add", "node0", "type", "veth", *peer)
        run("ip", "address", "add", "10.77.0.1/24", "dev", "node0")
        run("ip", "link", "set", "node0", "up")
        run_in(other, lambda: run("ip", "address", "add", "10.77.0.2/24", "dev", "out0"))
        run_in(other, lambda: run("ip", "link", "set", "out0", "up"))
        yield other


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "10.77.0.1"])
def test_who_holds_what_is_told_on_the_node_alone_unless_said_otherwise(elsewhere: int, address: str) -> None:
    def outcomes(server: EndpointServer, to: str) -> list[int]:
        paths = ("/metrics", "/healthz", "/readyz", "/status", "/", "/page/main.js", "/nosuch")
        return [ask(server, path, to=to)[0].status for path in paths]

    with serving(pages(), address) as server:
        assert outcomes(server, "10.77.0.1") == [200, 200, 200, 200, 200, 200, 404]
        if address != "10.77.0.1":
            assert outcomes(server, "127.0.0.1") == [200, 200, 200, 200, 200, 200, 404]
        assert ask(server, "/status", to="10.77.0.1", Host="rebound.example")[0].status == 421
        assert run_in(elsewhere, lambda: outcomes(server, "10.77.0.1")) == [200, 200, 200, 403, 403, 403, 403]
        _, told = run_in(elsewhere, lambda: ask(server, "/status", to="10.77.0.1"))
    assert told == b"for readers on the node alone (endpoints.status in the configuration)\n"
    with serving(replace(pages(), everywhere=True), address) as server:
        assert run_in(elsewhere, lambda: outcomes(server, "10.77.0.1")) == [200, 200, 200, 200, 200, 200, 404]
        by_name = run_in(elsewhere, lambda: ask(server, "/status", to="10.77.0.1", Host="node1.example:9808"))
        assert by_name[0].status == 200


def test_names_of_this_machine_are_known() -> None:
    ours = ("", "localhost", "localhost:9808", "127.0.0.1:9808", "[::1]:9808", "10.0.0.7", "node.localhost:80")
    assert all(names_this_machine(host) for host in ours)
    assert not any(
        names_this_machine(host) for host in ("example.org", "127.0.0.1.example.org:9808", "localhost.evil:1")
    )


def test_garbage_gets_plain_text() -> None:
    with serving(pages()) as server, socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"\x16\x03\x01 nonsense more words here\r\n\r\n")
        assert b"<html" not in connection.recv(4096).lower()


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyError("inner detail"), 500, b"internal error; the agent's log tells more\n"),
        (LedgerError("disk full"), 503, b"LedgerError: disk full\n"),
    ],
)
def test_an_error_of_ours_is_told_and_any_other_only_logged(
    caplog: pytest.LogCaptureFixture, error: Exception, status: int, said: bytes
) -> None:
    def broken() -> Any:
        raise error

    with serving(pages(status=broken)) as server:
        response, body = ask(server, "/status")
    assert (response.status, body) == (status, said)
    assert ("inner detail" in caplog.text) == (status == 500)


@contextmanager
def crowd_of(server: EndpointServer, count: int, sends: bytes = b"", reads: int = 0) -> Iterator[list[socket.socket]]:
    connections = []
    try:
        for _ in range(count):
            connections.append(socket.create_connection(("127.0.0.1", server.port), timeout=10))
            connections[-1].sendall(sends)
            assert len(connections[-1].recv(reads)) == reads
        yield connections
    finally:
        for connection in connections:
            connection.close()


def test_a_crowd_of_silent_connections_is_bounded_let_go_and_does_not_stop_the_close() -> None:
    with serving(pages()) as server:
        before = threading.active_count()
        with crowd_of(server, 2 * endpoints.MAX_CONNECTIONS) as crowd:
            assert crowd[0].recv(1) == b""
            assert threading.active_count() - before <= endpoints.MAX_CONNECTIONS
            server.close()
            assert [connection.recv(1) for connection in crowd[1 : endpoints.MAX_CONNECTIONS]] == [b""] * (
                endpoints.MAX_CONNECTIONS - 1
            )


def test_a_head_that_trickles_or_is_too_long_is_cut() -> None:
    with serving(pages()) as server, crowd_of(server, 2, b"GET / HTTP/1.0\r\nX: ") as (slow, long):
        stop = threading.Event()

        def trickle() -> None:
            with suppress(OSError):
                while not stop.wait(0.1):
                    slow.send(b"y")

        thread = threading.Thread(target=trickle)
        thread.start()
        with suppress(ConnectionError):  # the rest of it was not read
            long.sendall(b"y" * 2 * endpoints.MAX_REQUEST)
            assert long.recv(1) == b""
        assert slow.recv(1) == b""
        stop.set()
        thread.join()
        assert ask(server, "/healthz")[0].status == 200


def test_those_who_send_nothing_or_read_nothing_keep_no_probe_out() -> None:
    much = b"x" * (32 << 20)  # more than the kernel takes on a socket's way
    with serving(pages(metrics=lambda accept: ("text/plain", much))) as server:
        with crowd_of(server, endpoints.MAX_CONNECTIONS):
            assert [ask(server, "/healthz")[0].status for _ in range(40)] == [200] * 40
        with crowd_of(server, endpoints.MAX_CONNECTIONS, b"GET /metrics HTTP/1.0\r\n\r\n", reads=1):
            assert [ask(server, "/healthz")[0].status for _ in range(40)] == [200] * 40


def test_a_crowd_of_scrapes_keeps_no_probe_out() -> None:
    gate = threading.Event()

    def slow(accept: str) -> tuple[str, bytes]:
        assert gate.wait(20)
        return "text/plain", b"up 1\n"

    scrapes = b"GET /metrics HTTP/1.0\r\n\r\n"
    with serving(pages(metrics=slow)) as server, crowd_of(server, endpoints.MAX_CONNECTIONS, scrapes) as crowd:
        refused = select.select(crowd, [], [], 10)[0]
        assert refused
        assert all(b" 503 " in connection.recv(100) for connection in refused)
        assert ask(server, "/healthz")[0].status == 200
        gate.set()


def test_a_taken_port_is_named_with_the_remedy_and_free_again_after_close() -> None:
    with serving(pages()) as server, pytest.raises(ConfigError, match=rf"{server.port}.*choose another"):
        EndpointServer.open("127.0.0.1", server.port, pages())
    EndpointServer.open("127.0.0.1", server.port, pages()).close()


def test_readers_for_whom_no_descriptor_is_left_cost_no_time_and_are_answered_later() -> None:
    with serving(pages()) as server, socket.socket() as reader:
        reader.settimeout(30)
        (thread,) = (each for each in threading.enumerate() if each.name == "endpoints")
        clock = time.pthread_getcpuclockid(thread.ident or 0)
        with descriptors.none_left():
            reader.connect(("127.0.0.1", server.port))
            used, began = time.clock_gettime(clock), time.monotonic()
            time.sleep(1)
            used, passed = time.clock_gettime(clock) - used, time.monotonic() - began
        assert used < 0.1 * passed
        reader.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert reader.recv(100).startswith(b"HTTP/1.0 200 OK")


def test_readers_for_whom_no_thread_is_left_take_no_place_from_others() -> None:
    with serving(pages()) as server:
        former = threading.stack_size(1 << 46)  # more than there is, so no thread can be started
        try:
            with crowd_of(server, endpoints.MAX_CONNECTIONS + 1) as crowd:
                assert [connection.recv(1) for connection in crowd] == [b""] * len(crowd)
        finally:
            threading.stack_size(former)
        assert ask(server, "/healthz")[0].status == 200
