"""The agent's image, as hack/build-image leaves it."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.daemonset.manifests import REPOSITORY

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Image:
    """One architecture's."""

    folder: Path

    @classmethod
    def find(cls) -> Image | None:
        """Return the one for this machine, if it is there."""
        found = REPOSITORY / "build/image" / ARCHITECTURES.get(platform.machine(), platform.machine())
        return cls(found) if (found / "image.tar").exists() else None

    @property
    def root(self) -> Path:
        """Its files."""
        return self.folder / "root"

    @property
    def told(self) -> dict[str, Any]:
        """What buildah tells of it."""
        document: dict[str, Any] = json.loads((self.folder / "image.json").read_text())
        return document

    @property
    def name(self) -> str:
        """Under which a registry or a runtime has it."""
        return str(self.told["FromImage"])
