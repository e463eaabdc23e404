"""The file that node-feature-discovery's worker turns into labels, for an agent that may not write Node objects.

One `key=value` a line; the worker reads no file whose name begins with a dot, and none above 64 KiB
(source/local of node-feature-discovery).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from agent.errors import HardwareError

MAX_BYTES = 64 << 10
WRITER = "# Written by nodefabric "
HEAD = f"{WRITER}from its configuration (topology.labels); a change here lasts until its next change.\n"


class FeatureFile:
    """The file at its place."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, str]:
        """Return the labels in it; none if it is not there."""
        try:
            with self._path.open("rb") as file:
                return parse(file.read(MAX_BYTES).decode("utf-8", "replace"))
        except OSError:
            return {}

    def write(self, labels: Mapping[str, str]) -> bool:
        """Make the file say this. Tells whether it had to be written; the worker sees it whole or not at all.

        Raises HardwareError where that is not possible.
        """
        text = render(labels).encode()
        if self._says(text) or (not labels and not self._path.exists()):
            return False
        if len(text) > MAX_BYTES:
            raise HardwareError(f"{self._path}: {len(labels)} labels do not fit {MAX_BYTES} bytes")
        temporary = self._path.with_name(f".{self._path.name}.new")
        try:
            with temporary.open("wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.chmod(0o644)
            temporary.rename(self._path)
        except OSError as error:
            raise HardwareError(
                f"{self._path} cannot be written ({error.strerror}): mount the folder of NFD's features, writable"
            ) from error
        return True

    def _says(self, text: bytes) -> bool:
        try:
            with self._path.open("rb") as file:
                return file.read(MAX_BYTES + 1) == text
        except OSError:
            return False

    def withdraw(self) -> bool:
        """Remove the file, if it is of `write`'s making. Tells whether it was there. Raises HardwareError."""
        try:
            with self._path.open("rb") as file:
                is_ours = file.read(len(WRITER)) == WRITER.encode()
            if is_ours:
                self._path.unlink()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise HardwareError(f"{self._path} has labels that are wanted no more: {error.strerror}") from error
        return is_ours


def render(labels: Mapping[str, str]) -> str:
    """Write labels as the worker reads them."""
    return HEAD + "".join(f"{key}={value}\n" for key, value in sorted(labels.items()))


def parse(text: str) -> dict[str, str]:
    """Read what `render` wrote."""
    lines = (line.strip() for line in text.splitlines())
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
