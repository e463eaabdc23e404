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
MOUNT_WORDS = (
    f"HOST or HOST:CONTAINER: absolute, without `..`, HOST below {', '.join(HOST_FOLDERS)} but not /usr/lib/ssl,"
    " CONTAINER below one of these or /opt, and neither the folder of the image's own libraries nor its loader or glibc"
)
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


@dataclass(frozen=True, slots=True)
class Mount:
    """A file or folder of the host, bound into the container, read-only."""

    host_path: str
    path: str


def parse_mount(text: str) -> Mount:
    """Read `HOST` or `HOST:CONTAINER`. Raises ValueError for paths that no container may get, or have hidden."""
    host_path, colon, path = text.partition(":")
    found = Mount(host_path, path if colon else host_path)
    if not (_is_below(found.host_path, HOST_FOLDERS) and _is_below(found.path, _CONTAINER_FOLDERS)):
        raise ValueError(text)
    if _SYSTEM.fullmatch(found.path) or _KEYS.fullmatch(found.host_path):
        raise ValueError(text)
    return found


def _is_below(path: str, folders: tuple[str, ...]) -> bool:
    """Whether a path is normal, and inside one of these folders, or one of those that may be mounted whole."""
    if not _PATH.fullmatch(path) or posixpath.normpath(path) != path or path.startswith("//"):
        return False
    return path in WHOLE_FOLDERS or any(path.startswith(f"{folder}/") for folder in folders)
