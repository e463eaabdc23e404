"""The files that a configuration is made of: ours, and those of device plugins that we stand in for.

Some keys are heeded at start only; a version that changes them is applied but for these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from agent.config.document import Flags, parse, read_file
from agent.config.section import keys_of
from agent.config.values import Config
from agent.errors import ConfigError

AT_START_ONLY = ("endpoints", "kubelet_dir", "state_dir", "run_dir", "cdi_dir", "netns_folders", "runtime_socket")
"""Fields of Config that are heeded at start only."""
WAITS = "restart the agent to put into effect what was changed of"
"""So begins what is said of a version that is in effect but for these."""


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

    def read(self) -> Mapping[Path, bytes | ConfigError]:
        """Return what is in the files."""
        return {path: _read(path) for path in self.files}

    def load(self, texts: Mapping[Path, bytes | ConfigError] | None = None) -> Config:
        """Join all files to one configuration. Raises ConfigError with all that is wrong in them."""
        found: list[Config] = []
        problems: list[str] = []
        for path, text in (texts or self.read()).items():
            try:
                if isinstance(text, ConfigError):
                    raise text
                found.append(parse(text, str(path), self.flags))
            except ConfigError as error:
                where = f"{path}: " if len(self.files) > 1 else ""
                problems += [f"{where}{problem}" for problem in error.problems]
        if problems:
            raise ConfigError(str(self), problems)
        return _joined(found, str(self))


def _read(path: Path) -> bytes | ConfigError:
    try:
        return read_file(path)
    except ConfigError as error:
        return error


def without_restart(old: Config, new: Config, also: Sequence[str] = ()) -> tuple[Config, tuple[str, ...]]:
    """Say what of a new configuration can be in effect at once, and which of its keys have to wait for a restart."""
    keys = {name: key for key, name in keys_of(Config).items()}
    waiting = [name for name in (*AT_START_ONLY, *also) if name in keys and getattr(old, name) != getattr(new, name)]
    kept = {name: getattr(old, name) for name in waiting}
    return replace(new, **kept), tuple(keys[name] for name in waiting)


def _joined(found: list[Config], source: str) -> Config:
    first = found[0]
    if len(found) == 1:
        return first
    resources = tuple(resource for config in found for resource in config.resources)
    names = [resource.name for resource in resources]
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ConfigError(
            source, [f"{name} is configured twice: one resource cannot come from two files" for name in twice]
        )
    warnings = tuple(f"{config.source}: {warning}" for config in found for warning in config.warnings)
    return replace(first, resources=resources, warnings=warnings, source=source)
