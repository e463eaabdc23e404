"""Our own Container Device Interface specs. `agent.cdi_names` reads those of others.

https://github.com/cncf-tags/container-device-interface, SPEC.md: the runtime reads every .json and
.yaml file of its spec folders; a file names one kind, such as nvidia.com/gpu. A name is looked up when a
container is created, so what it means may change until then.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.errors import Unavailable
from agent.model.slots import CDI_VENDOR, cdi_kind, is_slot_id

SPEC_FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
MAX_SPEC_BYTES = 4 << 20
SPEC_VERSION = "0.5.0"
"""Old enough for containerd 1.7 and CRI-O 1.24; nothing newer is needed."""
OWN_PREFIX = "nodefabric-"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Spec:
    """What the spec of a slot says."""

    kind: str
    """Of the slot's resource: vf or nic."""
    edits: Mapping[str, Any]
    """containerEdits, as they stand there."""


class SlotSpecs:
    """One spec file for each bound slot. Methods block, briefly.

    The folder is on a tmpfs, and a reboot voids what is in it: so a file need be whole (a runtime may read at any
    moment), and not on any disk.
    """

    def __init__(self, folder: Path = SPEC_FOLDERS[1]) -> None:
        self.folder = folder

    def write(self, kind: str, slot: str, edits: Mapping[str, Any]) -> None:
        """Write the spec of a slot, in place of an earlier one. Raises Unavailable."""
        file = self._file(slot)
        fresh = file.with_name(f".{file.name}.{os.getpid()}")  # whose suffix no runtime reads
        try:
            self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            fresh.unlink(missing_ok=True)
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), "w") as opened:
                opened.write(text_of(kind, slot, edits))
            fresh.rename(file)
        except OSError as error:
            raise Unavailable(
                f"the CDI spec {file} cannot be written ({error.strerror}): without it the runtime creates no"
                " container for this slot; mount the folder read-write into the agent (cdiDir)"
            ) from error

    def remove(self, slot: str) -> None:
        """Remove the spec of a slot. One that is not there is removed already. Raises Unavailable."""
        try:
            self._file(slot).unlink(missing_ok=True)
        except OSError as error:
            raise Unavailable(f"the CDI spec {self._file(slot)} cannot be removed: {error.strerror}") from error

    def is_written(self, kind: str, slot: str, edits: Mapping[str, Any]) -> bool:
        """Tell whether the spec of a slot is there and says this."""
        try:
            with self._file(slot).open("rb") as stream:
                return stream.read(MAX_SPEC_BYTES) == text_of(kind, slot, edits).encode()
        except OSError:
            return False

    def read(self, slot: str) -> Spec | None:
        """Read what the spec of a slot says; None if that is not to be understood."""
        try:
            with self._file(slot).open("rb") as stream:
                document = json.loads(stream.read(MAX_SPEC_BYTES))
            vendor, _, kind = document["kind"].partition("/")
            found = [device["containerEdits"] for device in document["devices"] if device["name"] == slot]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.warning("%s cannot be read: %s", self._file(slot), error)
            return None
        whole = vendor == CDI_VENDOR and kind and len(found) == 1 and isinstance(found[0], dict)
        return Spec(kind, found[0]) if whole else None

    def slots(self) -> frozenset[str]:
        """List the slots that have a spec of ours. What a killed process has half written is removed.

        Not while another thread writes.
        """
        found = set()
        for path in _entries(self.folder):
            if path.name.startswith(f".{OWN_PREFIX}slot-"):
                with contextlib.suppress(OSError):  # no runtime reads it
                    path.unlink()
            elif path.name.startswith(OWN_PREFIX) and path.suffix == ".json":
                slot = path.name.removeprefix(OWN_PREFIX).removesuffix(".json")
                if is_slot_id(slot):
                    found.add(slot)
        return frozenset(found)

    def _file(self, slot: str) -> Path:
        return self.folder / f"{OWN_PREFIX}{slot}.json"


def text_of(kind: str, slot: str, edits: Mapping[str, Any]) -> str:
    """Spell the spec of a slot of a kind of resource."""
    device = {"name": slot, "containerEdits": dict(edits)}
    return json.dumps({"cdiVersion": SPEC_VERSION, "kind": cdi_kind(kind), "devices": [device]}, indent=1) + "\n"


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
