"""Our own Container Device Interface specs. And those of others, of which only the names count.

https://github.com/cncf-tags/container-device-interface, SPEC.md: the runtime reads every .json and
.yaml file of its spec folders; a file names one kind, such as nvidia.com/gpu. A name is looked up when a
container is created, so what it means may change until then.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from agent.edits.spec_files import MAX_SPEC_BYTES, OWN_PREFIX, SPEC_FOLDERS, SpecFiles, text_of
from agent.model.unit_id import CDI_VENDOR, UnitId, cdi_kind

_SUFFIXES = (".json", ".yaml", ".yml")

Stamp = tuple[str, int, int, int]
Named = tuple[str, frozenset[str]]
"""A spec's kind, and the names of its devices."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """What the spec of a slot says."""

    kind: str
    """Of the slot's resource: vf, nic or hca."""
    edits: Mapping[str, Any]
    """containerEdits, as they stand there."""


class SlotSpecs:
    """One spec file for each bound slot. Methods block, briefly."""

    def __init__(self, folder: Path = SPEC_FOLDERS[1]) -> None:
        self.folder = folder
        self._files = SpecFiles(folder, "slot-", "this slot")

    def write(self, kind: str, slot: str, edits: Mapping[str, Any]) -> None:
        """Write the spec of a slot, in place of an earlier one. Raises Unavailable."""
        self._files.write(slot, _text(kind, slot, edits))

    def remove(self, slot: str) -> None:
        """Remove the spec of a slot. One that is not there is removed already. Raises Unavailable."""
        self._files.remove(slot)

    def is_written(self, kind: str, slot: str, edits: Mapping[str, Any]) -> bool:
        """Tell whether the spec of a slot is there and says this."""
        return self._files.says(slot, _text(kind, slot, edits))

    def read(self, slot: str) -> SlotSpec | None:
        """Read what the spec of a slot says; None if that is not to be understood."""
        try:
            document = json.loads(self._files.read(slot))
            vendor, _, kind = document["kind"].partition("/")
            found = [device["containerEdits"] for device in document["devices"] if device["name"] == slot]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.warning("%s cannot be read: %s", self._files.path(slot), error)
            return None
        whole = vendor == CDI_VENDOR and kind and len(found) == 1 and isinstance(found[0], dict)
        return SlotSpec(kind, found[0]) if whole else None

    def slots(self) -> frozenset[str]:
        """List the slots that have a spec of ours. What a killed process has half written is removed."""
        return frozenset(name for name in self._files.names() if UnitId.parse(name).is_slot)


def _text(kind: str, slot: str, edits: Mapping[str, Any]) -> str:
    return text_of(cdi_kind(kind), [(slot, edits)])


@dataclass
class SpecNames:
    """Which devices of a kind the node's specs name. Not for two threads at once.

    A spec of NVIDIA's toolkit describes every driver file of the host: some hundred kilobytes of YAML, of
    which only the names matter here. So a file is read once, as a stream, until it is another one.
    """

    folders: Sequence[Path] = SPEC_FOLDERS
    _seen: dict[Stamp, Named] = field(default_factory=dict)

    def of_kind(self, kind: str) -> frozenset[str]:
        """List the names of the devices of a kind. A file that cannot be read counts for nothing."""
        found: dict[Stamp, Named] = {}
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


def read_spec(file: Path) -> Named:
    """Read a spec's kind and the names of its devices; no kind if it is no spec."""
    try:
        with file.open("rb") as stream:
            text = stream.read(MAX_SPEC_BYTES)
        return _of_json(json.loads(text)) if file.suffix == ".json" else _of_yaml(text)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        log.debug("%s is not a CDI spec: %s", file, error)
        return "", frozenset()


def _of_json(document: Any) -> Named:
    if not isinstance(document, dict) or not isinstance(document.get("kind"), str):
        return "", frozenset()
    devices = document.get("devices")
    names = (d.get("name") for d in devices if isinstance(d, dict)) if isinstance(devices, list) else ()
    return document["kind"], frozenset(name for name in names if isinstance(name, str))


def _of_yaml(text: bytes) -> Named:
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
