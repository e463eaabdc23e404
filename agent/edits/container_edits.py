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


def joined(one: ContainerEdits, other: ContainerEdits) -> ContainerEdits:
    """Give both to one container."""
    return ContainerEdits(
        envs=one.envs + other.envs,
        devices=one.devices + other.devices,
        cdi_devices=one.cdi_devices + other.cdi_devices,
        annotations=one.annotations + other.annotations,
        mounts=one.mounts + other.mounts,
    )
