"""The node's Container Device Interface specs: which kinds of device they know.

https://github.com/cncf-tags/container-device-interface, SPEC.md: the runtime reads every .json and
.yaml file of its spec folders; a file names one kind, such as nvidia.com/gpu.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path

SPEC_FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
MAX_SPEC_BYTES = 4 << 20
_KIND_LINE = re.compile(rb'^kind:[ \t]*["\']?([A-Za-z0-9._/-]+)', re.MULTILINE)

log = logging.getLogger(__name__)


def installed_kinds(folders: Sequence[Path] = SPEC_FOLDERS) -> frozenset[str]:
    """List the kinds that the runtime can resolve. A file that cannot be read counts for nothing."""
    return frozenset(kind for folder in folders for kind in _kinds(folder))


def _kinds(folder: Path) -> list[str]:
    try:
        files = sorted(p for p in folder.iterdir() if p.suffix in (".json", ".yaml", ".yml"))
    except OSError:
        return []
    kinds = []
    for file in files:
        kind = _kind(file)
        if kind:
            kinds.append(kind)
    return kinds


def _kind(file: Path) -> str | None:
    try:
        with file.open("rb") as stream:
            text = stream.read(MAX_SPEC_BYTES)
        if file.suffix != ".json":
            # A GPU node's spec is long and PyYAML slow; the kind is a plain line of its own.
            found = _KIND_LINE.search(text)
            return found.group(1).decode() if found else None
        document = json.loads(text)
    except (OSError, ValueError) as error:
        log.debug("%s is not a CDI spec: %s", file, error)
        return None
    kind = document.get("kind") if isinstance(document, dict) else None
    return kind if isinstance(kind, str) else None
