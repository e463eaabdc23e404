"""HTTP for probes, Prometheus and people: /metrics, /healthz, /readyz, /status, and the status page at /.

Read-only, on loopback unless told otherwise; who holds what is told on the node itself alone, unless told otherwise,
too, since nobody has to log in. Runs on threads of its own, so that a busy event loop
still answers and a slow reader cannot delay kubelet: at most MAX_CONNECTIONS at a time, each cut
off after CONNECTION_SECONDS. Where all are taken, the oldest that waits for its reader gives way: a crowd
that sends nothing, or reads nothing, keeps no probe out. Checks and suppliers are called on these threads.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from agent.errors import AgentError, ConfigError
from agent.model.printable import one_line
from agent.report.replies import Asked, Pages, Reply, Turns, answer, is_from_here, text

MAX_CONNECTIONS = 16
CONNECTION_SECONDS = 10.0
GIVE_WAY_SECONDS = 1.0
POLL_SECONDS = 0.1
ACCEPT_PAUSE_SECONDS = 0.1

HEADERS = (
    ("Cache-Control", "no-store"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
)


log = logging.getLogger(__name__)


class EndpointServer:
    """The open endpoints. Use `EndpointServer.open`; close it when done."""

    def __init__(self, server: _Server, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread

    @classmethod
    def open(cls, address: str, port: int, pages: Pages) -> EndpointServer:
        """Listen and serve. Port 0 takes a free one; `port` tells which.

        Raises ConfigError if the address cannot be had.
        """
        try:
            server = _Server((address, port), pages)
        except OSError as error:
            problem = f"endpoints: cannot listen on {address} port {port}: {error.strerror or error}; choose another"
            raise ConfigError("the configuration", [problem]) from error
        thread = threading.Thread(target=server.serve_forever, args=(POLL_SECONDS,), name="endpoints", daemon=True)
        thread.start()
        return cls(server, thread)

    @property
    def port(self) -> int:
        """The port really listened on."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening and cut what is still open. Returns at once; blocking at most a poll interval."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(HTTPServer):
    """Serves each connection on a thread, with bounds in number and time."""

    allow_reuse_address = True
    request_queue_size = 32

    def __init__(self, address: tuple[str, int], pages: Pages) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.pages = pages
        self.is_local = ipaddress.ip_address(address[0]).is_loopback
        self.scrapes = Turns()
        self._slots = threading.Semaphore(MAX_CONNECTIONS)
        self._lock = threading.Lock()
        self._open: dict[socket.socket, float] = {}
        """Connection → when it is cut; the oldest first."""
        self._answering: set[socket.socket] = set()
        """Those that wait for us, not for their reader."""
        self._is_short = False
        super().__init__(address, _Connection)

    def server_bind(self) -> None:
        """Bind without HTTPServer's reverse look-up of the own name, which can wait for a resolver."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def get_request(self) -> tuple[socket.socket, Any]:
        """Take a connection. Out of descriptors or memory whoever waits goes on waiting, and we rest before we look."""
        try:
            taken = super().get_request()
        except OSError as error:
            if not self._is_short:
                log.error("readers of the endpoints have to wait: %s", error)
            self._is_short = True
            time.sleep(ACCEPT_PAUSE_SECONDS)
            raise
        self._is_short = False
        return taken

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False) and not self._made_room():
            self.shutdown_request(request)
            return
        with self._lock:
            self._open[request] = time.monotonic() + CONNECTION_SECONDS
        thread = threading.Thread(target=self._serve, args=(request, client_address), name="endpoints", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no thread for this one; its place is the next one's
            log.error("a reader of the endpoints cannot be served: %s", error)
            self._end(request)

    def _made_room(self) -> bool:
        """Cut the oldest connection that waits for its reader, and take its place."""
        with self._lock:
            oldest = next((each for each in self._open if each not in self._answering), None)
            if oldest is None:
                return False
            del self._open[oldest]
            _shut(oldest)
        return self._slots.acquire(timeout=GIVE_WAY_SECONDS)

    @contextmanager
    def answering(self, connection: socket.socket) -> Iterator[None]:
        """Keep a connection's place while its reply is made."""
        with self._lock:
            self._answering.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._answering.discard(connection)

    def _serve(self, request: socket.socket, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except OSError as error:
            log.debug("a reader of the endpoints went away: %s", error)
        finally:
            self._end(request)

    def _end(self, request: socket.socket) -> None:
        """Close a connection, and give its place to another one."""
        with self._lock:
            self._open.pop(request, None)
        self.shutdown_request(request)
        self._slots.release()

    def service_actions(self) -> None:
        """Cut connections that are past their time; called at each poll."""
        self._cut(time.monotonic())

    def server_close(self) -> None:
        super().server_close()
        self._cut(float("inf"))

    def _cut(self, now: float) -> None:
        with self._lock:
            for connection, deadline in self._open.items():
                if deadline <= now:
                    _shut(connection)


def _shut(connection: socket.socket) -> None:
    """Wake the thread that reads from it or writes to it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        log.debug("a connection was gone before it was cut: %s", error)


class _Connection(BaseHTTPRequestHandler):
    """One request; HTTP/1.0, so the connection ends with the reply."""

    server: _Server
    timeout = CONNECTION_SECONDS

    def do_GET(self) -> None:
        asked = Asked(
            self.path,
            accept=self.headers.get("Accept", ""),
            known_tag=self.headers.get("If-None-Match", ""),
            encodings=self.headers.get("Accept-Encoding", ""),
            host=self.headers.get("Host", ""),
            is_from_here=is_from_here(self.client_address[0], self.connection.getsockname()[0]),
        )
        with self.server.answering(self.connection):
            try:
                reply = answer(asked, self.server.pages, self.server.scrapes, is_local=self.server.is_local)
            except AgentError as error:
                reply = text(HTTPStatus.SERVICE_UNAVAILABLE, one_line(f"{error.reason}: {error}"))
            except Exception:
                log.exception("the endpoint failed", extra={"path": self.path})
                reply = text(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; the agent's log tells more")
        self._send(reply)

    do_HEAD = do_GET

    def _refuse(self) -> None:
        self._send(text(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD"), (("Allow", "GET, HEAD"),))

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that is not HTTP or has an unknown method, without the library's HTML page."""
        self.close_connection = True
        self._send(text(HTTPStatus(code), HTTPStatus(code).phrase.lower()))

    def _send(self, reply: Reply, more: tuple[tuple[str, str], ...] = ()) -> None:
        self.send_response(reply.status)
        length = () if reply.status is HTTPStatus.NOT_MODIFIED else (("Content-Length", str(len(reply.body))),)
        headers = (
            *(("Content-Type", reply.content_type), *length),
            *(("Content-Security-Policy", reply.policy), *HEADERS, *reply.headers, *more),
        )
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD" and reply.body:
            self.wfile.write(reply.body)

    def version_string(self) -> str:
        return "nodefabric"

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("endpoint request: %s", format % args, extra={"peer": self.client_address[0]})
