"""Who this agent is: its version, and the node that it runs on."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version


def agent_version() -> str:
    """Return the installed version, or a word that says that this is a checkout."""
    try:
        return version("nodefabric")
    except PackageNotFoundError:
        return "checkout"


def node_name(environ: Mapping[str, str] = os.environ, host_name: Callable[[], str] = socket.gethostname) -> str:
    """Return the Kubernetes node name: NODE_NAME (downward API), else the host's name, as kubelet writes it."""
    return environ.get("NODE_NAME") or host_name().strip().lower()
