"""What a resource of another project's configuration says besides its selectors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SriovPool:
    """What an entry of sriov-network-device-plugin's `resourceList` says besides its selectors."""

    prefix: str
    """intel.com"""
    device_type: str = "netDevice"
    """netDevice or accelerator."""
    additional_info: Mapping[str, Mapping[str, str]] | None = None
    """By PCI address or `*`."""
    use_cdi: bool = False


@dataclass(frozen=True, slots=True)
class SharedPool:
    """What an entry of k8s-rdma-shared-dev-plugin's `configList` says besides its selectors."""

    hca_max: int
    """So many units, whatever number of HCAs; each unit is all HCAs."""
    use_cdi: bool = False
