"""containerd's configuration as it puts it together: a file, and the files that it imports.

Files are read breadth first, each once, and what comes later counts. containerd 1 takes a plugin's section
as a whole from the last file that has it, so that an import about registries undoes what the main file says
about CDI; containerd 2 merges them key by key (https://github.com/containerd/containerd/pull/9982).
"""

from __future__ import annotations

import glob
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

MAIN = PurePosixPath("/etc/containerd/config.toml")
SECTIONS = ("io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri", "cri")
"""The CRI plugin in versions 3, 2 and 1 of the configuration."""
MOST_FILES = 100
MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class File:
    """One file of the configuration."""

    path: str
    """On the host."""
    document: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Cdi:
    """What the configuration says of CDI."""

    enabled: bool | None = None
    """None: nothing."""
    file: str = str(MAIN)
    """The file that decides it, or in which it would have to be said."""


def read(root: Path, main: PurePosixPath = MAIN) -> tuple[tuple[File, ...], str]:
    """Return the files below `root` in containerd's order, and what containerd would refuse to start with.

    No files and no problem: there is no main file, and all is as the version has it.
    """
    found: list[File] = []
    waiting = [main]
    seen: set[PurePosixPath] = set()
    while waiting:
        path = waiting.pop(0)
        if path in seen:
            continue
        seen.add(path)
        if len(seen) > MOST_FILES:
            return tuple(found), f"{main} imports more than {MOST_FILES} files"
        try:
            with _below(root, path).open("rb") as file:
                document = tomllib.loads(file.read(MOST_BYTES).decode())
        except FileNotFoundError:
            if path == main:
                return (), ""
            return tuple(found), f"{path} is imported and is not there"
        except OSError as error:
            if path == main:
                return (), ""  # for others' eyes only: unseen
            return tuple(found), f"{path}: {error.strerror}"
        except ValueError as error:
            return tuple(found), f"{path}: {error}"
        found.append(File(str(path), document))
        waiting += _imports(root, path, document.get("imports"))
    return tuple(found), ""


def cdi(files: tuple[File, ...], *, merges: bool) -> Cdi:
    """Find `enable_cdi` of the CRI plugin. `merges`: by key, as containerd 2 does it."""
    found = Cdi()
    for file in files:
        plugins = file.document.get("plugins")
        for name in SECTIONS:
            section = plugins.get(name) if isinstance(plugins, dict) else None
            if not isinstance(section, dict):
                continue
            said = section.get("enable_cdi")
            if isinstance(said, bool):
                found = Cdi(said, file.path)
            elif not merges:
                found = Cdi(None, file.path)
            break
    return found


def _imports(root: Path, parent: PurePosixPath, listed: Any) -> list[PurePosixPath]:
    found: list[PurePosixPath] = []
    for text in listed if isinstance(listed, list) else ():
        if not isinstance(text, str) or not text:
            continue
        path = PurePosixPath(os.path.normpath(parent.parent / text))
        if "*" in text:
            pattern = os.path.join(glob.escape(str(root)), path.relative_to("/"))
            matches = sorted(glob.glob(pattern, include_hidden=True))
            found += [PurePosixPath("/", os.path.relpath(match, root)) for match in matches]
        else:
            found.append(path)
    return found


def _below(root: Path, path: PurePosixPath) -> Path:
    return root / path.relative_to("/")
