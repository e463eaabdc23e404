"""Who this agent is: its version, and the node that it runs on."""

from __future__ import annotations

import os
import socket
from importlib.metadata import PackageNotFoundError, version


def agent_version() -> str:
    """Return the installed version, or a word that says that this is a checkout."""
    try:
        return version("nodefabric")
    except PackageNotFoundError:
        return "checkout"


def node_name() -> str:
    """Return the Kubernetes node name: NODE_NAME (downward API), else the host name."""
    return os.environ.get("NODE_NAME") or socket.gethostname()
