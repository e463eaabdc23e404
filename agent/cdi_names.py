"""Which devices of a kind the node's CDI specs name.

A spec of NVIDIA's toolkit describes every driver file of the host: some hundred kilobytes of YAML, of
which only the names matter here. So a file is read once, as a stream, until it is another one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from agent.cdi import MAX_SPEC_BYTES, OWN_PREFIX, SPEC_FOLDERS

_SUFFIXES = (".json", ".yaml", ".yml")

log = logging.getLogger(__name__)

Stamp = tuple[str, int, int, int]
Spec = tuple[str, frozenset[str]]


@dataclass
class SpecNames:
    """Reads the spec folders, and remembers the files that stay as they are. Not for two threads at once."""

    folders: Sequence[Path] = SPEC_FOLDERS
    _seen: dict[Stamp, Spec] = field(default_factory=dict)

    def of_kind(self, kind: str) -> frozenset[str]:
        """List the names of the devices of a kind. A file that cannot be read counts for nothing."""
        found: dict[Stamp, Spec] = {}
        for file, stamp in self._files():
            found[stamp] = self._seen.get(stamp) or read_spec(file)
        self._seen = found
        return frozenset(name for spec_kind, names in found.values() if spec_kind == kind for name in names)

    def _files(self) -> Iterator[tuple[Path, Stamp]]:
        for folder in self.folders:
            try:
                files = sorted(
                    p for p in folder.iterdir() if p.suffix in _SUFFIXES and not p.name.startswith(OWN_PREFIX)
                )
            except OSError:
                continue
            for file in files:
                try:
                    now = file.stat()
                except OSError:
                    continue
                yield file, (str(file), now.st_ino, now.st_mtime_ns, now.st_size)


def read_spec(file: Path) -> Spec:
    """Read a spec's kind and the names of its devices; no kind if it is no spec."""
    try:
        with file.open("rb") as stream:
            text = stream.read(MAX_SPEC_BYTES)
        return _of_json(json.loads(text)) if file.suffix == ".json" else _of_yaml(text)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        log.debug("%s is not a CDI spec: %s", file, error)
        return "", frozenset()


def _of_json(document: Any) -> Spec:
    if not isinstance(document, dict) or not isinstance(document.get("kind"), str):
        return "", frozenset()
    devices = document.get("devices")
    names = (d.get("name") for d in devices if isinstance(d, dict)) if isinstance(devices, list) else ()
    return document["kind"], frozenset(name for name in names if isinstance(name, str))


def _of_yaml(text: bytes) -> Spec:
    """Pick the kind and the devices' names out of the stream: no tree is made of the rest."""
    kind, names = "", set()
    depth, keys = 0, [""]
    is_key = True
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            depth += 1
            keys.append("")
            is_key = isinstance(event, yaml.MappingStartEvent)
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            depth -= 1
            keys.pop()
            is_key = True  # a value has ended; in a sequence no scalar is asked about
        elif isinstance(event, yaml.AliasEvent):
            is_key = True  # it stood for a value: PyYAML writes one for edits that two devices share
        elif isinstance(event, yaml.ScalarEvent) and depth in (1, 3):
            if is_key:
                keys[depth] = event.value
            elif depth == 1 and keys[1] == "kind":
                kind = event.value
            elif depth == 3 and keys[1] == "devices" and keys[3] == "name":
                names.add(event.value)
            is_key = not is_key
    return kind, frozenset(names)
