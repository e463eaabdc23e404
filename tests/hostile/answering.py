"""An HTTP server on loopback whose answers a test writes itself, and the agent's real client for it."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from agent.cluster.apiserver import READ_SECONDS, ApiServer

Answer = Callable[["Asked"], None]


class Asked(BaseHTTPRequestHandler):
    """One request. An answer writes with `send`, or byte by byte into `wfile`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.answer(self)

    do_PATCH = do_GET
    do_PUT = do_GET
    do_POST = do_GET
    do_DELETE = do_GET

    def send(self, body: bytes, status: int = 200) -> None:
        """Send a whole answer."""
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        super().__init__(("127.0.0.1", 0), Asked)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that give up are what is tested."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


@contextlib.contextmanager
def asking(folder: Path, answer: Answer, at_once: int = 1, read_seconds: float = READ_SECONDS) -> Iterator[ApiServer]:
    """Open the agent's client for a server that answers like this."""
    server = _Server(answer)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    path = folder / "kubeconfig"
    cluster = {"name": "x", "cluster": {"server": f"http://127.0.0.1:{server.server_address[1]}"}}
    context = {"name": "x", "context": {"cluster": "x", "user": "x"}}
    user: dict[str, Any] = {"name": "x", "user": {}}
    path.write_text(json.dumps({"current-context": "x", "clusters": [cluster], "contexts": [context], "users": [user]}))
    client = ApiServer.from_kubeconfig(path, at_once, read_seconds)
    try:
        yield client
    finally:
        client.close()
        server.shutdown()
        server.server_close()
        thread.join()
