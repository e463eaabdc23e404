"""A stand-in for the Kubernetes API server, over real HTTP.

Knows Node, DaemonSet, Pod, the kinds of resource.k8s.io/v1, and the custom objects of `hack.sim.cluster.definitions`.
Answers GET (also for the metadata alone), PATCH by server-side apply with field managers and conflicts or (of a Node)
by merge, POST, PUT, DELETE with preconditions and of collections, and lists and watches with field selectors, resource
versions, pages, bookmarks and 410. The status of a claim has a path of its own. Refuses what a definition does not
know, and what breaks the rules of `hack.sim.cluster.dra`. Counts all of it, and can be told to misbehave. Lists in
pages even where the real one would answer from its cache with all at once. Source of its answers: Kubernetes 1.36,
staging/src/k8s.io/apiserver/pkg/endpoints/handlers, and apimachinery/pkg/apis/meta/v1/types.go for lists, events and
Status.

    python -m hack.sim.cluster.apiserver --port-file F [--kubeconfig K] [--node NAME …]
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from hack.sim.cluster.api_state import ApiState, Counts, Fault
from hack.sim.cluster.definitions import Definition
from hack.sim.cluster.field_sets import Conflicts
from hack.sim.cluster.kinds import NODE, POD, Target, selected

__all__ = ["ApiServerStandIn", "ApiState", "Counts", "Fault"]

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
MAX_BODY = 3 << 20
"""The API server's own limit on a request."""


class ApiServerStandIn:
    """A running stand-in on a free loopback port. A context manager."""

    def __init__(
        self, port: int = 0, *, known: Iterable[Definition] | None = None, bookmark_seconds: float = 60.0
    ) -> None:
        """`known` are the custom objects that the cluster has definitions for; by default all."""
        self.state = ApiState(known)
        self._server = _Server(("127.0.0.1", port), self.state, bookmark_seconds)
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
    request_queue_size = 512

    def __init__(self, address: tuple[str, int], state: ApiState, bookmark_seconds: float) -> None:
        self.state = state
        self.bookmark_seconds = bookmark_seconds
        super().__init__(address, _Connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that went away; anything else is a bug and is shown."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Connection(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = 30
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path == "/_sim/counts":
            self._reply(200, asdict(self.server.state.counts))
            return
        if self._misbehaves():
            return
        target = self.server.state.kinds.target(url.path)
        if target is not None and not target.name:
            self._collection(target, parse_qs(url.query))
            return
        found = self.server.state.get(target.kind.kind, target.key) if target else None
        if found is None:
            self._refuse(404, f"{url.path} not found")
        elif "as=PartialObjectMetadata" in self.headers.get("Accept", ""):
            whose = {"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata"}
            self._reply(200, {**whose, "metadata": found["metadata"]})
        else:
            self._reply(200, found)

    def do_PUT(self) -> None:
        """Replace an object or its status. Of the stand-in's own: `/_sim/fault`, `/_sim/pod`.

        They take the fields of a Fault, or null to behave again, and the arguments of `put_pod`.
        """
        body = self._body()
        path = urlsplit(self.path).path
        if body is None:
            return
        document = json.loads(body)
        if path == "/_sim/fault":
            self.server.state.set_fault(None if document is None else Fault(**document))
        elif path == "/_sim/pod":
            self.server.state.put_pod(**document)
        else:
            if not self._misbehaves():
                target = self.server.state.kinds.target(path)
                if target is not None and (problem := self.server.state.changed_parameters(target, body.decode())):
                    self._refuse(422, problem)
                    return
                found = self.server.state.replace(target, document, "client") if target and target.name else None
                self._answer(*(found or (404, "not found")))
            return
        self._reply(200, {})

    def do_DELETE(self) -> None:
        """Delete an object, or all of a collection. Of the stand-in's own: `/_sim/pod/NAMESPACE/NAME`."""
        url = urlsplit(self.path)
        path, body, state = url.path.split("/"), self._body(), self.server.state
        if body is None:
            return
        if path[:3] == ["", "_sim", "pod"] and len(path) == 5:
            try:
                state.delete_pod(unquote(path[3]), unquote(path[4]))
            except KeyError:
                self._refuse(404, "there is no such pod")
            else:
                self._reply(200, {})
            return
        if self._misbehaves():
            return
        target = state.kinds.target(url.path)
        if target is None or target.of_status:
            self._refuse(404, f"{url.path} not found")
        elif target.name:
            preconditions = (json.loads(body) if body else {}).get("preconditions")
            self._answer(*state.delete(target.kind.kind, target.key, preconditions))
        else:
            fields = selected(target.kind, parse_qs(url.query).get("fieldSelector", [""])[0])
            self._reply(
                200,
                {
                    "kind": "Status",
                    "status": "Success",
                    "details": {"deleted": state.delete_collection(target, fields)},
                },
            )

    def do_POST(self) -> None:
        """Take an Event in any namespace, or create an object."""
        body = self._body()
        if body is None or self._misbehaves():
            return
        path = urlsplit(self.path).path
        target = self.server.state.kinds.target(path)
        if target is not None and not target.name and target.kind is not POD:
            self._answer(*self.server.state.create(target, json.loads(body), "client"))
            return
        if not path.endswith("/events"):
            self._refuse(405, "this cannot be created here")
            return
        self.server.state.count("created")
        self.server.state.created.append(json.loads(body))
        self._reply(201, json.loads(body))

    def do_PATCH(self) -> None:
        body = self._body()
        if body is None or self._misbehaves():
            return
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        target = self.server.state.kinds.target(url.path)
        if target is not None and (changed := self.server.state.changed_parameters(target, None)):
            self._refuse(422, changed)
            return
        if target is not None and target.kind is NODE and self.headers.get("Content-Type") == MERGE:
            self._answer(*self.server.state.merge(NODE.kind, target.key, json.loads(body), query["fieldManager"][0]))
            return
        problem = self._apply_problem(target, query, body)
        if problem is not None or target is None:
            self._refuse(*(problem or (404, "not found")))
            return
        manager, force = query["fieldManager"][0], query.get("force") == ["true"]
        status, answer = self.server.state.apply(
            target.kind.kind, target.key, json.loads(body), manager, force, target.of_status
        )
        if isinstance(answer, Conflicts):
            self._conflict(answer, json.loads(body)["apiVersion"])
            return
        if status < 300:
            size = len(self.requestline) + len(bytes(self.headers)) + len(body)
            self.server.state.count("applied_bytes", size)
        self._answer(status, answer)

    def _answer(self, status: int, answer: Any) -> None:
        """Tell an object, or why there is none."""
        if status < 300:
            self._reply(status, answer)
        else:
            self._refuse(status, answer)

    def _collection(self, target: Target, query: dict[str, list[str]]) -> None:
        """List or watch objects, all or those whose fields are as asked."""
        try:
            fields = selected(target.kind, query.get("fieldSelector", [""])[0])
        except LookupError as error:
            self._refuse(400, str(error.args[0]))
            return
        if query.get("watch") != ["true"]:
            self._list(target, fields, query)
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        since, seconds = int(query.get("resourceVersion", ["0"])[0]), float(query.get("timeoutSeconds", ["1800"])[0])
        state = self.server.state
        state.count("watches")
        end = state.history.watch(target, fields, since, (seconds, self.server.bookmark_seconds), self._send_chunk)
        if end == "cut":
            self.close_connection = True
            return
        if end == "gone":
            status = {"kind": "Status", "status": "Failure", "reason": "Expired", "code": 410}
            self._send_chunk({"type": "ERROR", "object": {**status, "message": f"too old resource version: {since}"}})
        self.wfile.write(b"0\r\n\r\n")

    def _list(self, target: Target, fields: dict[str, str], query: dict[str, list[str]]) -> None:
        limit, following = int(query.get("limit", ["0"])[0]), query.get("continue", [""])[0]
        if following and "resourceVersion" in query:
            self._refuse(400, "specifying resource version is not allowed when using continue")
            return
        try:
            version, items, more = self.server.state.listed(target, fields, limit, following)
        except LookupError:
            self._refuse(410, "the provided continue parameter is too old", reason="Expired")
            return
        kind = target.kind
        metadata = {"resourceVersion": str(version), **({"continue": more} if more else {})}
        # The server writes items of a list without their kind, unlike objects that are asked for alone.
        bare = [{key: value for key, value in item.items() if key not in ("apiVersion", "kind")} for item in items]
        answer = {"apiVersion": kind.api_version, "kind": f"{kind.kind}List", "metadata": metadata, "items": bare}
        self._reply(200, answer)

    def _send_chunk(self, document: Any) -> None:
        line = json.dumps(document).encode() + b"\n"
        self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        self.wfile.flush()

    def _misbehaves(self) -> bool:
        self.server.state.before()
        fault = self.server.state.take_fault(self.path)
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
        length = self.headers.get("Content-Length", "0" if self.command == "DELETE" else "")
        if not length.isdecimal() or int(length) > MAX_BODY:
            self.close_connection = True
            self._refuse(413, f"a body of at most {MAX_BODY} bytes is needed")
            return None
        return self.rfile.read(int(length))

    def _conflict(self, conflicts: Conflicts, api_version: str) -> None:
        causes = [conflict.cause(api_version) for conflict in conflicts.found]
        count = f"{len(causes)} conflict{'s' if len(causes) > 1 else ''}"
        text = "; ".join(f"{cause['message']}: {cause['field']}" for cause in causes)
        self._refuse(409, f"Apply failed with {count}: {text}", details={"causes": causes}, reason="Conflict")

    def _refuse(self, status: int, message: str, extra: dict[str, str] | None = None, **more: Any) -> None:
        document = {"apiVersion": "v1", "kind": "Status", "status": "Failure", "message": message, "code": status}
        self._reply(status, {**document, **more}, extra)

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

    def _apply_problem(self, target: Target | None, query: dict[str, list[str]], body: bytes) -> tuple[int, str] | None:
        if target is None or not target.name:
            return 404, "the server could not find the requested resource"
        kind, name = target.kind.kind, target.name
        content_type = self.headers.get("Content-Type", "")
        if content_type.partition(";")[0] != APPLY:
            return 415, f"content type {content_type!r} is not {APPLY}"
        if not query.get("fieldManager", [""])[0]:
            return 400, "fieldManager is required for apply"
        try:
            document = json.loads(body)
        except ValueError:
            return 400, "the body is not JSON"
        version = target.kind.api_version
        if not isinstance(document, dict) or (document.get("apiVersion"), document.get("kind")) != (version, kind):
            return 400, f"apiVersion and kind must be {version} {kind}"
        if not isinstance(document.get("metadata"), dict) or document["metadata"].get("name") != name:
            return 400, f"metadata.name must be {name}"
        definition = self.server.state.definitions.get(kind)
        problems = definition.problems(document) if definition is not None else []
        unknown = [problem for problem in problems if problem.endswith("not declared in schema")]
        if unknown:
            # The merge fails before validation, and as an error of the server: fieldmanager/structuredmerge.go.
            return 500, f"failed to create typed patch object (/{name}; {version}, Kind={kind}): {'; '.join(unknown)}"
        return (422, "; ".join(problems)) if problems else None


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="hack.sim.cluster.apiserver", description=__doc__.partition("\n")[0])
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
