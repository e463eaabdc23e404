"""Files and folders of the host that the containers of a resource get, read-only: a provider's libraries. Pure."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass

LIBRARY_FOLDERS = ("/usr/lib", "/usr/lib64", "/usr/local/lib")
WHOLE_FOLDERS = ("/etc/libibverbs.d", "/opt/amazon", "/opt/cray")
"""Those that may also be mounted whole: where libibverbs looks for providers, and libraries of EFA and Slingshot."""
HOST_FOLDERS = (*LIBRARY_FOLDERS, *WHOLE_FOLDERS)
"""Only root writes there, so a link that the runtime follows leads nowhere that root has not chosen."""
_CONTAINER_FOLDERS = (*LIBRARY_FOLDERS, "/etc/libibverbs.d", "/opt")
MOUNT_WORDS = "HOST or HOST:CONTAINER, two absolute paths"
"""What is wanted, for people."""
_SYSTEM = re.compile(
    r"/usr/lib(?:64|32)?/(?:[^/]+-linux-[^/]+|systemd|modules|firmware)"
    r"|/usr/(?:local/)?lib.*/(?:ld-[^/]+|ld64\.so[^/]*|lib(?:c|m|dl|rt|pthread|resolv)\.so[^/]*)"
)
"""What the programs of an image need themselves: its folder of libraries, and the parts of glibc, which belong to each
other and to the loader."""
_KEYS = re.compile(r"/usr/lib(?:64)?/ssl(?:/.*)?")
"""On Debian its entries are links to /etc/ssl, with the host's private keys."""
_PATH = re.compile(r"/[!-9;-~]+")
"""Printable ASCII without spaces and colons."""
_NORMAL = "must be absolute, without `..`, `//`, spaces and a `/` at its end"


@dataclass(frozen=True, slots=True)
class Mount:
    """A file or folder of the host, bound into the container, read-only."""

    host_path: str
    path: str


def parse_mount(text: str) -> Mount:
    """Read `HOST` or `HOST:CONTAINER`. Raises ValueError, with the reason, for a path that is not allowed."""
    host_path, colon, path = text.partition(":")
    found = Mount(host_path, path if colon else host_path)
    for why in (_wrong_options(path), _wrong_host(found.host_path), _wrong_target(found.path)):
        if why:
            raise ValueError(why)
    return found


def _wrong_options(path: str) -> str:
    options = path if path in ("ro", "rw") else path.partition(":")[2]
    return f"mounts are always read-only; leave out :{options}" if options else ""


def _wrong_host(path: str) -> str:
    if not _is_normal(path):
        return f"the host's path {_NORMAL}"
    if path in LIBRARY_FOLDERS:
        return "name a file or folder below it"
    if not _is_below(path, HOST_FOLDERS):
        return f"this folder of the host is not allowed; allowed are {', '.join(HOST_FOLDERS)}"
    return "it leads to the host's private keys on Debian, so it is not allowed" if _KEYS.fullmatch(path) else ""


def _wrong_target(path: str) -> str:
    if not _is_normal(path):
        return f"the container's path {_NORMAL}"
    if not _is_below(path, _CONTAINER_FOLDERS):
        return f"the container's path must be below {', '.join(_CONTAINER_FOLDERS)}"
    if _SYSTEM.fullmatch(path):
        return f"{path} would hide the image's own libraries; name another path for the container: HOST:/opt/…"
    return ""


def _is_normal(path: str) -> bool:
    return bool(_PATH.fullmatch(path)) and posixpath.normpath(path) == path and not path.startswith("//")


def _is_below(path: str, folders: tuple[str, ...]) -> bool:
    """Whether a path is inside one of these folders, or one of those that may be mounted whole."""
    return path in WHOLE_FOLDERS or any(path.startswith(f"{folder}/") for folder in folders)
