"""What one container gets for the units that it was granted."""

from __future__ import annotations

from dataclasses import dataclass

from agent.model.mounts import Mount


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device file of the host."""

    path: str
    """Where the container finds it."""
    permissions: str = "rw"
    host_path: str = ""
    """Where the host has it; empty for the same path."""


@dataclass(frozen=True, slots=True)
class ContainerEdits:
    """What one container gets."""

    envs: tuple[tuple[str, str], ...] = ()
    devices: tuple[DeviceNode, ...] = ()
    cdi_devices: tuple[str, ...] = ()
    annotations: tuple[tuple[str, str], ...] = ()
    mounts: tuple[Mount, ...] = ()

    def __add__(self, other: ContainerEdits) -> ContainerEdits:
        return ContainerEdits(
            envs=self.envs + other.envs,
            devices=self.devices + other.devices,
            cdi_devices=self.cdi_devices + other.cdi_devices,
            annotations=self.annotations + other.annotations,
            mounts=self.mounts + other.mounts,
        )
