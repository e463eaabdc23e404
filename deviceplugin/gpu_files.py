"""Reads what the host has to pass GPUs by."""

from __future__ import annotations

from pathlib import Path

from agent.cdi import SPEC_FOLDERS
from agent.cdi_names import SpecNames
from agent.hardware.gpu_nodes import device_nodes, mig_minors
from deviceplugin.gpu_response import CDI_KIND, GpuFiles


class GpuFilesOf:
    """One host's, below a root. Not for two threads at once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._specs = SpecNames([root / folder.relative_to("/") for folder in SPEC_FOLDERS])

    def read(self) -> GpuFiles:
        """Read the host's CDI specs, device files and slices. A few file operations, unless a spec is new."""
        return GpuFiles(self._specs.of_kind(CDI_KIND), device_nodes(self._root), mig_minors(self._root))
