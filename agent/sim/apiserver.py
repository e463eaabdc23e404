"""A stand-in for the Kubernetes API server, over real HTTP.

Knows two kinds of object, cluster-wide: Node and NodeResourceTopology. Answers GET, and PATCH by
server-side apply: created if absent, a new resourceVersion only if the content changed, a conflict
if another manager's fields are taken without force. Counts writes, and can be told to misbehave.

    python -m agent.sim.apiserver --port-file F [--kubeconfig K] [--node NAME …]
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

APPLY = "application/apply-patch+yaml"
COLLECTIONS = {
    "/api/v1/nodes/": ("v1", "Node"),
    "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies/": (
        "topology.node.k8s.io/v1alpha2",
        "NodeResourceTopology",
    ),
}
MAX_BODY = 3 << 20
"""The API server's own limit on a request."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What to do wrong with the next `times` requests (-1: with all)."""

    status: int = 0
    """Answer with this status instead of doing the work."""
    retry_after: int | None = None
    delay_seconds: float = 0.0
    drop: bool = False
    """Close the connection without an answer."""
    times: int = -1


@dataclass(frozen=True, slots=True)
class Counts:
    reads: int = 0
    applies: int = 0
    """Accepted ones."""
    changes: int = 0
    """Applies that changed the content."""
    failures: int = 0


class ApiState:
    """The objects and the counts; safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[tuple[str, str], dict[str, Any]] = {}
        self._version = 1
        self._counts: dict[str, int] = dict.fromkeys(asdict(Counts()), 0)
        self._fault = Fault(times=0)

    @property
    def counts(self) -> Counts:
        with self._lock:
            return Counts(**self._counts)

    def set_fault(self, fault: Fault | None) -> None:
        """Misbehave from now on, or no longer."""
        with self._lock:
            self._fault = fault or Fault(times=0)

    def take_fault(self) -> Fault | None:
        """Return what to do wrong with this request, and count it."""
        with self._lock:
            fault = self._fault
            if fault.times == 0:
                return None
            if fault.times > 0:
                self._fault = Fault(**(asdict(fault) | {"times": fault.times - 1}))
            if fault.status or fault.drop:
                self._counts["failures"] += 1
            return fault

    def add_node(self, name: str) -> str:
        """Create a Node object and return its UID."""
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
        with self._lock:
            return str(self._store("Node", name, node, "kubelet")["metadata"]["uid"])

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """Return a copy of an object."""
        with self._lock:
            self._counts["reads"] += 1
            found = self._objects.get((kind, name))
            return None if found is None else dict(json.loads(json.dumps(found)))

    def delete(self, kind: str, name: str) -> None:
        """Remove an object, as an administrator would."""
        with self._lock:
            self._objects.pop((kind, name), None)

    def apply(self, kind: str, name: str, document: dict[str, Any], manager: str, force: bool) -> tuple[int, Any]:
        """Apply a whole object; return status and object, or status and message."""
        with self._lock:
            found = self._objects.get((kind, name))
            if found is not None and not force and _manager(found) != manager and _content(found) != _content(document):
                return 409, f"Apply failed with a conflict with {_manager(found)!r}"
            self._counts["applies"] += 1
            if found is not None and _content(found) == _content(document) and _manager(found) == manager:
                return 200, found
            self._counts["changes"] += 1
            return (201 if found is None else 200), self._store(kind, name, document, manager)

    def _store(self, kind: str, name: str, document: dict[str, Any], manager: str) -> dict[str, Any]:
        old = self._objects.get((kind, name), {"metadata": {}})["metadata"]
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._version += 1
        metadata = {
            **document["metadata"],
            "uid": old.get("uid") or str(uuid.uuid4()),
            "creationTimestamp": old.get("creationTimestamp") or now,
            "resourceVersion": str(self._version),
            "managedFields": [{"manager": manager, "operation": "Apply", "time": now}],
        }
        stored = {**document, "metadata": metadata}
        self._objects[kind, name] = stored
        return stored


def _manager(stored: dict[str, Any]) -> str:
    return str(stored["metadata"]["managedFields"][0]["manager"])


def _content(document: dict[str, Any]) -> str:
    system = ("uid", "creationTimestamp", "resourceVersion", "managedFields")
    metadata = {k: v for k, v in document["metadata"].items() if k not in system}
    return json.dumps({**document, "metadata": metadata}, sort_keys=True)


class ApiServerStandIn:
    """A running stand-in on a free loopback port. A context manager."""

    def __init__(self, port: int = 0) -> None:
        self.state = ApiState()
        self._server = _Server(("127.0.0.1", port), self.state)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def kubeconfig(self) -> str:
        """Return a kubeconfig for it (JSON is YAML)."""
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "sim",
            "contexts": [{"name": "sim", "context": {"cluster": "sim", "user": "sim"}}],
            "clusters": [{"name": "sim", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "sim", "user": {}}],
        }
        return json.dumps(document, indent=1)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> ApiServerStandIn:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], state: ApiState) -> None:
        self.state = state
        super().__init__(address, _Connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that went away; anything else is a bug and is shown."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Connection(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path == "/_sim/counts":
            self._reply(200, asdict(self.server.state.counts))
            return
        if self._misbehaves():
            return
        target = _target(path)
        found = self.server.state.get(*target) if target else None
        if found is None:
            self._refuse(404, f"{path} not found")
        else:
            self._reply(200, found)

    def do_PUT(self) -> None:
        """Take `/_sim/fault`: the fields of a Fault, or null to behave again."""
        body = self._body()
        if urlsplit(self.path).path != "/_sim/fault" or body is None:
            self._refuse(405, "only /_sim/fault can be put")
            return
        document = json.loads(body)
        self.server.state.set_fault(None if document is None else Fault(**document))
        self._reply(200, {})

    def do_PATCH(self) -> None:
        body = self._body()
        if body is None or self._misbehaves():
            return
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        target = _target(url.path)
        problem = _apply_problem(target, self.headers.get("Content-Type", ""), query, body)
        if problem is not None or target is None:
            self._refuse(*(problem or (404, "not found")))
            return
        force = query.get("force") == ["true"]
        status, answer = self.server.state.apply(*target, json.loads(body), query["fieldManager"][0], force)
        if status >= 300:
            self._refuse(status, answer)
        else:
            self._reply(status, answer)

    def _misbehaves(self) -> bool:
        fault = self.server.state.take_fault()
        if fault is None:
            return False
        if fault.delay_seconds:
            time.sleep(fault.delay_seconds)
        if fault.drop:
            self.close_connection = True
            return True
        if fault.status:
            extra = {} if fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
            self._refuse(fault.status, "told to fail", extra)
            return True
        return False

    def _body(self) -> bytes | None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY:
            self.close_connection = True
            self._refuse(413, f"a body of at most {MAX_BODY} bytes is needed")
            return None
        return self.rfile.read(int(length))

    def _refuse(self, status: int, message: str, extra: dict[str, str] | None = None) -> None:
        document = {"apiVersion": "v1", "kind": "Status", "status": "Failure", "message": message, "code": status}
        self._reply(status, document, extra)

    def _reply(self, status: int, document: Any, extra: dict[str, str] | None = None) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **(extra or {})}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: tests and the demo own the terminal."""


def _target(path: str) -> tuple[str, str] | None:
    for prefix, (_, kind) in COLLECTIONS.items():
        name = path.removeprefix(prefix)
        if name != path and name and "/" not in name:
            return kind, unquote(name)
    return None


def _apply_problem(
    target: tuple[str, str] | None, content_type: str, query: dict[str, list[str]], body: bytes
) -> tuple[int, str] | None:
    if target is None:
        return 404, "the server could not find the requested resource"
    kind, name = target
    if content_type.partition(";")[0] != APPLY:
        return 415, f"content type {content_type!r} is not {APPLY}"
    if not query.get("fieldManager", [""])[0]:
        return 400, "fieldManager is required for apply"
    try:
        document = json.loads(body)
    except ValueError:
        return 400, "the body is not JSON"
    versions = {k: v for v, k in COLLECTIONS.values()}
    if not isinstance(document, dict) or (document.get("apiVersion"), document.get("kind")) != (versions[kind], kind):
        return 400, f"apiVersion and kind must be {versions[kind]} {kind}"
    if not isinstance(document.get("metadata"), dict) or document["metadata"].get("name") != name:
        return 400, f"metadata.name must be {name}"
    if kind == "NodeResourceTopology" and not isinstance(document.get("zones"), list):
        return 422, "zones: Required value"
    return None


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="agent.sim.apiserver", description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (0: a free one)")
    parser.add_argument("--port-file", type=Path, help="write the port here once it is served")
    parser.add_argument("--kubeconfig", type=Path, help="write a kubeconfig here")
    parser.add_argument("--node", action="append", default=[], help="name of a Node object to create")
    options = parser.parse_args(arguments)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with ApiServerStandIn(options.port) as server:
        for name in options.node:
            server.state.add_node(name)
        if options.kubeconfig:
            _write(options.kubeconfig, server.kubeconfig())
        if options.port_file:
            _write(options.port_file, f"{server.port}\n")
        stop.wait()
    return 0


def _write(path: Path, text: str) -> None:
    """Write a file that a waiting reader sees whole or not at all."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text)
    temporary.rename(path)


if __name__ == "__main__":
    sys.exit(main())
