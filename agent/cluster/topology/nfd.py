"""The file that node-feature-discovery's worker turns into labels, for an agent that may not write Node objects.

One `key=value` a line; the worker reads no file whose name begins with a dot, and none above 64 KiB
(source/local of node-feature-discovery).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from agent.cluster.topology.node_object import NodeLabels
from agent.cluster.topology.publisher import FACTS_SECONDS
from agent.cluster.topology.view import View
from agent.errors import HardwareError

MAX_BYTES = 64 << 10
WRITER = "# Written by nodefabric "
HEAD = f"{WRITER}from its configuration (topology.labels); a change here lasts until its next change.\n"


class Features:
    """Keeps the file in step with the node; takes back what an earlier configuration put there."""

    def __init__(self, view: View, labels: NodeLabels) -> None:
        self._view = view
        self._labels = labels
        self._file = FeatureFile(view.root / view.config.labels.nfd_file.relative_to("/"))

    async def run(self) -> None:
        """Keep it until cancelled, if labels go there."""
        if self._view.config.labels.to != "nfd":
            await self._tell(self._file.withdraw)
            return
        while True:
            seen = self._view.facts.value
            kept = await asyncio.to_thread(self._file.read)
            await self._tell(partial(self._file.write, await self._labels.make(kept)))
            await asyncio.sleep(self._view.config.coalesce_seconds)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FACTS_SECONDS):
                    await self._view.facts.other_than(seen)

    async def _tell(self, work: Callable[[], object]) -> None:
        problem = None
        try:
            await asyncio.to_thread(work)
        except HardwareError as error:
            problem = str(error)
        self._view.problems.note("features", problem)


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
