"""A small API server for the demo: keeps what it is given, lists and watches ResourceSlices, and knows no rules.

What is valid, who owns which field and who may write it is nothing to it: the tests have a stand-in for that. Source of
its lists, watches and Status objects: Kubernetes 1.36, staging/src/k8s.io/apimachinery/pkg/apis/meta/v1/types.go.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

NODES = "/api/v1/nodes"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
Document = Mapping[str, Any]


class Objects:
    """Documents by their paths, and all that has happened to them. May be used from any thread."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._found: dict[str, Document] = {}
        self._events: list[tuple[str, str, Document]] = []
        """Type, path, and the object as it was then. How many there are is the resource version."""

    def get(self, path: str) -> Document | None:
        """Return an object; None if there is none."""
        return self._found.get(path)

    def put(self, path: str, document: Document) -> Document:
        """Write an object's fields over those that it has; with a path that ends in /status, those of its status."""
        key = path.removesuffix("/status")
        with self._news:
            before = self._found.get(key, {"metadata": {"uid": str(uuid.uuid4())}})
            uid = before["metadata"]["uid"]
            metadata = {**before["metadata"], **document.get("metadata", {}), "uid": uid}
            status = {**before.get("status", {}), **document.get("status", {})}
            content = before if key != path else {**before, **document}
            found = {**content, "metadata": metadata, **({"status": status} if status else {})}
            return self._happen("MODIFIED" if key in self._found else "ADDED", key, found)

    def delete(self, path: str) -> Document | None:
        """Remove an object, and return it; None if there is none."""
        with self._news:
            if (found := self._found.get(path)) is not None:
                self._happen("DELETED", path, found)
                del self._found[path]
            return found

    def _happen(self, kind: str, path: str, document: Document) -> Document:
        """Keep an object under a new version. The lock is held."""
        metadata = {**document["metadata"], "resourceVersion": str(len(self._events) + 1)}
        self._found[path] = found = {**document, "metadata": metadata}
        self._events.append((kind, path, found))
        self._news.notify_all()
        return found

    def slices(self, fields: Mapping[str, str]) -> tuple[int, list[Document]]:
        """List the slices that say so in their spec, and tell the resource version."""
        with self._news:
            found = [one for path, one in sorted(self._found.items()) if _is_slice(path, one, fields)]
            return len(self._events), found

    def slice_events(self, since: int, fields: Mapping[str, str], seconds: float) -> tuple[int, list[Document]]:
        """Wait until something has happened since a version; what of it is about such slices, and the version now."""
        with self._news:
            if len(self._events) == since:
                self._news.wait(seconds)
            news = self._events[since:]
            told = ({"type": kind, "object": one} for kind, path, one in news if _is_slice(path, one, fields))
            return len(self._events), list(told)


class SmallApiServer:
    """The server on a free loopback port, until `close`."""

    def __init__(self, objects: Objects) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Connection, objects))
        self._server.daemon_threads, self._server.block_on_close = True, False
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="API server", daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def kubeconfig(self) -> str:
        """Write a kubeconfig for it (JSON is YAML)."""
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "demo",
            "contexts": [{"name": "demo", "context": {"cluster": "demo", "user": "demo"}}],
            "clusters": [{"name": "demo", "cluster": {"server": self.url}}],
            "users": [{"name": "demo", "user": {}}],
        }
        return json.dumps(document)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Connection(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, objects: Objects, *arguments: Any) -> None:
        self._objects = objects
        super().__init__(*arguments)

    def do_GET(self) -> None:
        path, query = self._asked()
        if path != SLICES:
            self._reply(self._objects.get(path))
        elif query.get("watch") == "true":
            self._watch(int(query["resourceVersion"]), float(query["timeoutSeconds"]), _fields(query))
        else:
            version, items = self._objects.slices(_fields(query))
            self._reply({"metadata": {"resourceVersion": str(version)}, "items": items})

    def do_PATCH(self) -> None:
        """Server-side apply; each field here has one writer."""
        path, _ = self._asked()
        document = self._body()
        is_there = self._objects.get(path.removesuffix("/status")) is not None
        self._reply(self._objects.put(path, document) if is_there or not path.endswith("/status") else None)

    def do_DELETE(self) -> None:
        path, query = self._asked()
        self._body()
        if path != SLICES:
            self._reply(self._objects.delete(path))
            return
        for found in self._objects.slices(_fields(query))[1]:
            self._objects.delete(f"{SLICES}/{found['metadata']['name']}")
        self._reply({"kind": "Status", "status": "Success"})

    def _watch(self, since: int, seconds: float, fields: Mapping[str, str]) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            since, events = self._objects.slice_events(since, fields, left)
            self._send(events)
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, events: Sequence[Document]) -> None:
        for event in events:
            line = json.dumps(event).encode() + b"\n"
            self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        self.wfile.flush()

    def _asked(self) -> tuple[str, Mapping[str, str]]:
        url = urlsplit(self.path)
        return url.path, dict(parse_qsl(url.query))

    def _body(self) -> Document:
        length = int(self.headers.get("Content-Length", 0))
        document: Document = json.loads(self.rfile.read(length)) if length else {}
        return document

    def _reply(self, document: Document | None) -> None:
        body = json.dumps(document or {"kind": "Status", "status": "Failure", "message": "there is none"}).encode()
        self.send_response(404 if document is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the demo owns the terminal."""


def _fields(query: Mapping[str, str]) -> Mapping[str, str]:
    """Read a field selector: `spec.driver=a,spec.nodeName=b`."""
    return dict(each.split("=", 1) for each in query.get("fieldSelector", "").split(",") if each)


def _is_slice(path: str, document: Document, fields: Mapping[str, str]) -> bool:
    """Tell whether an object is a slice whose fields, which are directly in its spec, are these."""
    says = {f"spec.{name}": value for name, value in document.get("spec", {}).items()}
    return path.startswith(f"{SLICES}/") and all(says.get(name) == value for name, value in fields.items())
