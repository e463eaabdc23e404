"""kubelet's exec probes: asks the agent over a socket of its container's own whether it is well, and ready.

    python3 -I -S agent/operator/probe.py healthz|readyz

A program by itself, which imports nothing of the agent and little else: it is started every few seconds. The same
questions over HTTP are for people: any user of the host can take a port while the agent starts again, and kubelet
would end each agent that it does not find there.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence

SOCKET = "NODEFABRIC_PROBE_SOCKET"
"""The variable that names the socket, to the agent and to the probe. Without it there is none."""
WELL = b'{"done"'
SECONDS = 4.0
_MAX_ANSWER = 64 << 10


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Ask, show the answer, and return 0 if all is well, else 1."""
    question = arguments[0] if len(arguments) == 1 else ""
    path = environ.get(SOCKET, "")
    if not question or not path:
        sys.stderr.write(f"usage: {SOCKET}=PATH nodefabric-probe healthz|readyz\n")
        return 2
    try:
        answer = ask(path, question)
    except OSError as error:
        sys.stdout.write(f"the agent does not answer at {path}: {error}\n")
        return 1
    sys.stdout.write(answer.decode(errors="replace") or f"the agent ended the connection at {path}\n")
    return 0 if answer.startswith(WELL) else 1


def ask(path: str, question: str) -> bytes:
    """Ask the agent. Returns its answer, one line of JSON with `done` or `error`. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(SECONDS)
        connection.connect(path)
        connection.sendall(b'{"command": "%s"}\n' % question.encode())
        answer = b""
        while len(answer) < _MAX_ANSWER and (more := connection.recv(4096)):
            answer += more
        return answer


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
