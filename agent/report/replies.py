"""What each address of the endpoints answers: checks, metrics, status document, page. `endpoints` has the sockets."""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus

from agent.errors import AgentError
from agent.model.printable import joined
from agent.report import page
from agent.report.status import Served

SCRAPE_WAIT_SECONDS = 5.0
MOST_WAITING_SCRAPES = 4
TEXT = "text/plain; charset=utf-8"
JSON = "application/json"
CLOSED_POLICY = "default-src 'none'; frame-ancestors 'none'"
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
class Asked:
    """What matters of a GET."""

    path: str
    accept: str = ""
    known_tag: str = ""
    """If-None-Match: the document that the reader has."""
    encodings: str = ""
    host: str = ""
    is_from_here: bool = True
    """Asked on this machine."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: HTTPStatus
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    policy: str = CLOSED_POLICY


class Turns:
    """One scrape at a time. A few wait for their turn; a crowd is turned away at once, and holds up no probe."""

    def __init__(self) -> None:
        self._running = threading.Lock()
        self._waiting = threading.Semaphore(MOST_WAITING_SCRAPES)

    @contextmanager
    def turn(self) -> Iterator[bool]:
        """Wait for a turn, and tell whether there is one."""
        if not self._waiting.acquire(blocking=False):
            yield False
            return
        try:
            has_turn = self._running.acquire(timeout=SCRAPE_WAIT_SECONDS)
        finally:
            self._waiting.release()
        try:
            yield has_turn
        finally:
            if has_turn:
                self._running.release()


def answer(asked: Asked, pages: Pages, scrapes: Turns, *, is_local: bool = False) -> Reply:
    """Build the reply to a GET. `is_local`: the address is of loopback."""
    path = asked.path.partition("?")[0]
    match path:
        case "/healthz":
            return _checked(pages.health, {})
        case "/readyz":
            return _checked(pages.ready, pages.known())
        case "/metrics":
            # Reading the facts costs a ledger query, and a node with many VFs has thousands of counters.
            with scrapes.turn() as has_turn:
                if not has_turn:
                    return text(HTTPStatus.SERVICE_UNAVAILABLE, "another scrape is still running")
                content_type, body = pages.metrics(asked.accept)
            return Reply(HTTPStatus.OK, content_type, body)
    is_private = is_local or not pages.everywhere
    if is_private and not asked.is_from_here:
        return text(HTTPStatus.FORBIDDEN, "for readers on the node alone (endpoints.status in the configuration)")
    # A page of elsewhere whose name was made to point here (DNS rebinding) must not read who holds what.
    if is_private and not names_this_machine(asked.host):
        return text(HTTPStatus.MISDIRECTED_REQUEST, "ask for localhost, or for an address")
    if path == "/status":
        return _status(pages.status(), asked)
    if path == "/" and "text/html" not in asked.accept:
        return text(HTTPStatus.OK, "nodefabric: /metrics /healthz /readyz /status, and a page for browsers here")
    file = pages.files.get(path)
    if file is None:
        return text(HTTPStatus.NOT_FOUND, "not found")
    return Reply(HTTPStatus.OK, file.content_type, file.body, policy=page.POLICY if path == "/" else CLOSED_POLICY)


def _status(found: Served, asked: Asked) -> Reply:
    """Give the document, compressed if the reader can, or say that it has this one already."""
    headers = (("ETag", found.tag), ("Vary", "Accept-Encoding"))
    # Whoever stands between may have marked the tag as weak (RFC 9110, section 13.1.2: compared weakly here).
    if found.tag in {tag.strip().removeprefix("W/") for tag in asked.known_tag.split(",")}:
        return Reply(HTTPStatus.NOT_MODIFIED, JSON, b"", headers)
    if "gzip" in asked.encodings:
        return Reply(HTTPStatus.OK, JSON, found.compressed, (*headers, ("Content-Encoding", "gzip")))
    return Reply(HTTPStatus.OK, JSON, found.plain, headers)


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
    """Tell whether a connection is of this machine, by the IP addresses of its two ends.

    The kernel lets nothing in that only claims to come from an address of its own (accept_local,
    Documentation/networking/ip-sysctl.rst).
    """
    address = ipaddress.ip_address(reader)
    return ((address.version == 6 and address.ipv4_mapped) or address).is_loopback or reader == reached


def names_this_machine(host: str) -> bool:
    """Tell whether a Host header names localhost or an address; an HTTP/1.0 client may send none."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    name = name.strip("[]").lower()
    if not name or name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
