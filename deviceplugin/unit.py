"""`Unit`: what kubelet counts and hands out under one ID."""

from __future__ import annotations

from dataclasses import dataclass, field

from agent.model.health import Health

MAX_UNIT_ID = 63


@dataclass(frozen=True, slots=True)
class Unit:
    """What kubelet counts and hands out under one ID."""

    unit_id: str
    resource_name: str
    kind: str
    device: str
    """PCI address of the device behind the unit, or the GPU's UUID; empty for a slot that is not bound."""
    health: Health
    numa_node: int
    rdma_devices: tuple[str, ...] = ()
    """RDMA devices that come with the unit: the HCA itself, or those of the VF."""
    alternative: int = 0
    """Which alternative of the resource's selector took the device."""
    gpu: str = ""
    """A rail's GPU, by its UUID; `device` is its NIC."""
    is_slot: bool = False
    """The device is chosen when the whole pod is known."""
    beside: str = field(default="", compare=False)
    """For a slot, a device of its NUMA node, to tell what is near to it."""

    @property
    def place(self) -> str:
        """The device that stands where the unit is."""
        return self.device or self.beside
