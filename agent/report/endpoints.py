"""HTTP for Prometheus and people: /metrics, /healthz, /readyz, /status, and the status page at /.

Read-only, on loopback unless told otherwise; status and page are shown on the node itself alone, unless told otherwise,
too, since nobody has to log in. Runs on threads of its own, so that a busy event loop still answers and a slow reader
cannot delay kubelet. So many are served at once, and none for longer than REQUEST_SECONDS to ask and REPLY_SECONDS to
take the reply: a crowd that sends nothing, or reads nothing, keeps a scrape waiting for some seconds at most. Checks
and suppliers are called on these threads.
"""

from __future__ import annotations

import io
import ipaddress
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, Self

from agent.errors import AgentError, ConfigError
from agent.model.printable import joined, one_line
from agent.process import sockets
from agent.report import page
from agent.report.status import Served

MAX_CONNECTIONS = 64
MAX_REQUEST = 64 << 10
REQUEST_SECONDS = 2.0
REPLY_SECONDS = 3.0
POLL_SECONDS = 0.1
ACCEPT_PAUSE_SECONDS = 0.1
SCRAPE_WAIT_SECONDS = 2.0
"""A crowd of scrapes holds every place for no longer than one that sends nothing."""
TEXT = "text/plain; charset=utf-8"
JSON = "application/json"
CLOSED_POLICY = "default-src 'none'; frame-ancestors 'none'"

HEADERS = (
    ("Cache-Control", "no-store"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
)


log = logging.getLogger(__name__)
Check = Callable[[], str | None]
"""Returns None if all is well, or what is wrong."""


@dataclass(frozen=True)
class Pages:
    """What the endpoints show."""

    metrics: Callable[[str], tuple[str, bytes]]
    """Accept header → content type and text."""
    status: Callable[[], Served]
    """The status document."""
    health: Mapping[str, Check] = field(default_factory=dict)
    """Must hold for the process to be worth keeping: the kubelet restarts it otherwise."""
    ready: Mapping[str, Check] = field(default_factory=dict)
    """Must hold for the agent to do all of its work."""
    files: Mapping[str, page.File] = field(default_factory=dict)
    """The status page: address → file."""
    everywhere: bool = False
    """Whether status and page are for all who reach the address; else for those on this machine."""
    known: Callable[[], Mapping[str, str]] = dict
    """What is wrong and makes nothing unready; /readyz says it too."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: HTTPStatus
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    policy: str = CLOSED_POLICY


def run_checks(checks: Mapping[str, Check]) -> dict[str, str | None]:
    """Run each check: name → None, or what is wrong. A check that fails with an error of ours is wrong by that."""
    results: dict[str, str | None] = {}
    for name, check in checks.items():
        try:
            results[name] = check()
        except AgentError as error:
            results[name] = f"{error.reason}: {error}"
    return results


def _checked(checks: Mapping[str, Check], known: Mapping[str, str]) -> Reply:
    results = run_checks(checks)
    told = {**{name: wrong or "ok" for name, wrong in results.items()}, **known}
    lines = [f"{name}: {' '.join(text.split())}" for name, text in told.items()]
    failed = any(wrong is not None for wrong in results.values())
    return text(HTTPStatus.SERVICE_UNAVAILABLE if failed else HTTPStatus.OK, joined(lines) or "ok")


def text(status: HTTPStatus, text: str) -> Reply:
    return Reply(status, TEXT, f"{text}\n".encode())


def is_from_here(reader: str, reached: str) -> bool:
    """Return whether a connection is of this machine, by the IP addresses of its two ends.

    The kernel lets nothing in that only claims to come from an address of its own (accept_local,
    Documentation/networking/ip-sysctl.rst).
    """
    address = ipaddress.ip_address(reader)
    return ((address.version == 6 and address.ipv4_mapped) or address).is_loopback or reader == reached


def names_this_machine(host: str) -> bool:
    """Return whether a Host header names localhost or an address; an HTTP/1.0 client may send none."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    name = name.strip("[]").lower()
    if not name or name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class EndpointServer(ThreadingHTTPServer):
    """Serves each connection on a thread, so many at once; those behind wait in the kernel's queue.

    Use `EndpointServer.open`; close it when done.
    """

    request_queue_size = 128

    def __init__(self, address: tuple[str, int], pages: Pages) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.pages = pages
        self.is_local = ipaddress.ip_address(address[0]).is_loopback
        self.scraping = threading.Lock()
        self._is_closing = False
        self._places = threading.Semaphore(MAX_CONNECTIONS)
        self._thread = threading.Thread(target=self.serve_forever, args=(POLL_SECONDS,), name="endpoints", daemon=True)
        super().__init__(address, _Connection)

    @classmethod
    def open(cls, address: str, port: int, pages: Pages) -> Self:
        """Listen and serve. Port 0 takes a free one; `port` tells which.

        Raises ConfigError if the address cannot be had.
        """
        try:
            server = cls((address, port), pages)
        except OSError as error:
            problem = f"endpoints: cannot listen on {address} port {port}: {error.strerror or error}; choose another"
            raise ConfigError("the configuration", [problem]) from error
        server._thread.start()
        return server

    @property
    def port(self) -> int:
        """The port really listened on."""
        return int(self.server_address[1])

    def close(self) -> None:
        """Stop listening. Blocks for a poll interval at most; who is being answered then ends by its time."""
        self._is_closing = True
        self.shutdown()
        self.server_close()
        self._thread.join()

    def server_bind(self) -> None:
        """Bind without HTTPServer's reverse look-up of the own name, which can wait for a resolver."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def get_request(self) -> tuple[socket.socket, Any]:
        """Take a connection. Without a descriptor or memory for it, readers wait, and we rest before we look again."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(ACCEPT_PAUSE_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        while not self._places.acquire(timeout=POLL_SECONDS):
            if self._is_closing:
                self.shutdown_request(request)
                return
        try:
            super().process_request(request, client_address)
        except RuntimeError as error:  # no thread for this one; its place is the next one's
            self._places.release()
            log.error("a reader of the endpoints cannot be served: %s", error)
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if isinstance(error, (OSError, ValueError)):
            log.debug("a reader of the endpoints ended early: %s", error)
        else:
            log.error("a reader of the endpoints met an unexpected error", exc_info=error)


class _Connection(BaseHTTPRequestHandler):
    """One request; HTTP/1.0, so the connection ends with the reply."""

    server: EndpointServer

    def handle(self) -> None:
        """Answer when the whole head is there. Raises ValueError, and OSError, of which TimeoutError."""
        head = sockets.receive(self.connection, (b"\r\n\r\n", b"\n\n"), MAX_REQUEST, REQUEST_SECONDS)
        self.connection.settimeout(REPLY_SECONDS)
        self.rfile = io.BytesIO(head)
        self.handle_one_request()

    def do_GET(self) -> None:
        try:
            reply = self._reply(self.server.pages)
        except AgentError as error:
            reply = text(HTTPStatus.SERVICE_UNAVAILABLE, one_line(f"{error.reason}: {error}"))
        except Exception:
            log.exception("the endpoint failed", extra={"path": self.path})
            reply = text(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; the agent's log tells more")
        self._send(reply)

    do_HEAD = do_GET

    def _reply(self, pages: Pages) -> Reply:
        path, accept = self.path.partition("?")[0], self.headers.get("Accept", "")
        match path:
            case "/healthz":
                return _checked(pages.health, {})
            case "/readyz":
                return _checked(pages.ready, pages.known())
            case "/metrics":
                # Reading the facts costs a ledger query, and a node with many VFs has thousands of counters.
                if not self.server.scraping.acquire(timeout=SCRAPE_WAIT_SECONDS):
                    return text(HTTPStatus.SERVICE_UNAVAILABLE, "another scrape is still running")
                try:
                    content_type, body = pages.metrics(accept)
                finally:
                    self.server.scraping.release()
                return Reply(HTTPStatus.OK, content_type, body)
        if self.server.is_local or not pages.everywhere:
            if not is_from_here(self.client_address[0], self.connection.getsockname()[0]):
                said = "for readers on the node alone (endpoints.status in the configuration)"
                return text(HTTPStatus.FORBIDDEN, said)
            # A page of elsewhere whose name was made to point here (DNS rebinding) must not read who holds what.
            if not names_this_machine(self.headers.get("Host", "")):
                return text(HTTPStatus.MISDIRECTED_REQUEST, "ask for localhost, or for an address")
        if path == "/status":
            return self._status(pages.status())
        if path == "/" and "text/html" not in accept:
            return text(HTTPStatus.OK, "nodefabric: /metrics /healthz /readyz /status, and a page for browsers here")
        file = pages.files.get(path)
        if file is None:
            return text(HTTPStatus.NOT_FOUND, "not found")
        policy = page.POLICY if path == "/" else CLOSED_POLICY
        return Reply(HTTPStatus.OK, file.content_type, file.body, policy=policy)

    def _status(self, found: Served) -> Reply:
        """Give the document, compressed if the reader can, or say that it has this one already."""
        headers = (("ETag", found.tag), ("Vary", "Accept-Encoding"))
        # Whoever stands between may have marked the tag as weak (RFC 9110, section 13.1.2: compared weakly here).
        if found.tag in {tag.strip().removeprefix("W/") for tag in self.headers.get("If-None-Match", "").split(",")}:
            return Reply(HTTPStatus.NOT_MODIFIED, JSON, b"", headers)
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            return Reply(HTTPStatus.OK, JSON, found.compressed, (*headers, ("Content-Encoding", "gzip")))
        return Reply(HTTPStatus.OK, JSON, found.plain, headers)

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
