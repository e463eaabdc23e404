"""`OfferedUnit`: what others than the device plugins need to know about a unit."""

from __future__ import annotations

from typing import Protocol

from agent.model.health import Health


class OfferedUnit(Protocol):
    """One kubelet device ID of a resource. `deviceplugin.resources.Unit` is one."""

    @property
    def unit_id(self) -> str:
        """Unique over all resources of the node."""

    @property
    def resource_name(self) -> str:
        """Such as rdma/hca."""

    @property
    def device(self) -> str:
        """PCI address of the device behind the unit, or the GPU's UUID."""

    @property
    def numa_node(self) -> int:
        """-1 if the firmware did not say."""

    @property
    def health(self) -> Health:
        """Whether kubelet may hand it out."""
