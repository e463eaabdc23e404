"""Uevents of a simulated node: the kernel itself sends them on, to all who listen in the namespace.

Whoever owns a network namespace may hand the kernel a message for its listeners (since Linux 4.18;
lib/kobject_uevent.c, uevent_net_rcv_skb). So what watches a simulated node is what watches a real one.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from pathlib import Path

NETLINK_KOBJECT_UEVENT = 15
_HEADER = struct.Struct("=IHHII")
_ANY_TYPE = 0x10
_NLM_F_REQUEST = 1

log = logging.getLogger(__name__)


def emit(action: str, path: str, subsystem: str) -> None:
    """Let the kernel say something of a device; `path` is below /sys. Where it may not, nothing is said.

    Nothing is said in the machine's own namespace either: other programs would hear it too.
    """
    if is_the_machines_own():
        return
    texts = (f"{action}@{path}", f"ACTION={action}", f"DEVPATH={path}", f"SUBSYSTEM={subsystem}")
    body = b"".join(f"{text}\0".encode() for text in texts)
    header = _HEADER.pack(_HEADER.size + len(body), _ANY_TYPE, _NLM_F_REQUEST, 0, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_KOBJECT_UEVENT) as out:
            out.sendto(header + body, (0, 0))
    except OSError as error:
        log.debug("the kernel does not pass on %s of %s: %s", action, path, error)


def is_the_machines_own() -> bool:
    """Tell whether this process is in the network namespace of the machine, where `emit` says nothing."""
    try:
        return os.path.samefile("/proc/self/ns/net", "/proc/1/ns/net")
    except OSError:  # an ordinary user, who is root in a namespace of his own
        return False


def devpath(root: Path, entry: Path) -> str:
    """Return the kernel's path of what a link of the node's sysfs leads to."""
    return "/" + os.path.relpath(os.path.realpath(entry), os.path.realpath(root / "sys"))
