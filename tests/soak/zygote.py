"""Forks small agents off a process that has everything imported, and nothing begun: no thread, no channel.

Run as `python -m tests.soak.zygote DESCRIPTOR`, in the network namespace of the node. Each request on the
descriptor is one datagram with a JSON object: `Options`, accompanied by the agent's connection, the
descriptor for its epitaph and its log; or the number of an agent that has ended, whose status is answered.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import threading

import cni.server  # noqa: F401 -- so that no agent has to
from tests.soak.small_agent import Options, live


def main(descriptor: int) -> None:
    """Serve until the other end closes the connection."""
    gc.freeze()  # what is there already stays shared
    with socket.socket(fileno=descriptor) as requests:
        while True:
            data, received, _, _ = socket.recv_fds(requests, 1 << 16, 3)
            if not data:
                return
            document = json.loads(data)
            if "wait" in document:
                _, status = os.waitpid(document["wait"], 0)
                requests.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())
                continue
            orders, epitaph, log = received
            assert threading.active_count() == 1
            pid = os.fork()
            if pid == 0:
                requests.close()
                os.dup2(log, 2)
                os.close(log)
                status = 1
                try:
                    live(Options(**document), socket.socket(fileno=orders), epitaph)
                    status = 0
                finally:
                    os._exit(status)
            for passed in received:
                os.close(passed)
            requests.send(json.dumps(pid).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
