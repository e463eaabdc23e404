"""The files that one configuration is made of: our own, and those of device plugins that we stand in for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from agent.config.document import Flags, parse, read_file
from agent.config.values import Config
from agent.errors import ConfigError

Stat = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Sources:
    """Where a configuration comes from. At least one of the files is named."""

    own: Path | None = None
    """Any shape will do here, too."""
    sriov: Path | None = None
    """Of sriov-network-device-plugin; its pools come after our own resources."""
    shared: Path | None = None
    """Of k8s-rdma-shared-dev-plugin; its pools come last."""
    flags: Flags = field(default_factory=Flags)

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.own, self.sriov, self.shared) if path is not None)

    def __str__(self) -> str:
        return ", ".join(map(str, self.files))

    def load(self, read: Callable[[Path], bytes] = read_file) -> Config:
        """Read all files into one configuration. Raises ConfigError with all that is wrong in them."""
        found: list[Config] = []
        problems: list[str] = []
        for path in self.files:
            try:
                found.append(parse(read(path), str(path), self.flags))
            except ConfigError as error:
                problems += (
                    [f"{path}: {problem}" for problem in error.problems] if len(self.files) > 1 else error.problems
                )
        if problems:
            raise ConfigError(str(self), problems)
        return _joined(found, str(self))

    def stat(self) -> tuple[Stat | None, ...]:
        """Say what tells one version of the files from the next, without reading them.

        A ConfigMap's file is a link into a folder that is swapped as a whole, so the file behind it is looked at.
        """
        return tuple(_stat(path) for path in self.files)

    def digest(self) -> tuple[bytes, ...]:
        """Say what is in the files; empty for one that cannot be read."""
        return tuple(_digest(path) for path in self.files)


def _joined(found: list[Config], source: str) -> Config:
    first = found[0]
    if len(found) == 1:
        return first
    resources = tuple(resource for config in found for resource in config.resources)
    problems = []
    for i, resource in enumerate(resources):
        if any(other.name == resource.name for other in resources[:i]):
            problems.append(f"{resource.name} is configured twice: one resource cannot come from two files")
    if problems:
        raise ConfigError(source, problems)
    warnings = tuple(f"{config.source}: {warning}" for config in found for warning in config.warnings)
    return replace(first, resources=resources, warnings=warnings, source=source)


def _stat(path: Path) -> Stat | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _digest(path: Path) -> bytes:
    try:
        return hashlib.blake2b(read_file(path), digest_size=16).digest()
    except ConfigError:
        return b""
