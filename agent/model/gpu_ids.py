"""Which device IDs of kubelet's may name a GPU, whatever plugin gave them. Pure.

NVIDIA's plugin (deviceIDStrategy, MIG, time slicing) calls a device `GPU-<UUID>`, `3`, `MIG-<UUID>`, `3:1` (GPU and
slice), of old `MIG-GPU-<UUID>/<GPU instance>/<compute instance>`, and a replica of any of them `<ID>::<number>`; other
plugins use PCI addresses. UUIDs mean the same under any resource name, numbers and addresses only under a GPU's: a
VF's unit is a PCI address, too, and a shared HCA's may be a number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable

RAIL_PREFIX = "rail-"
"""A rail's unit is called by its GPU."""
_UUID = re.compile(r"(GPU|MIG)-.+")
_GPU_RESOURCE = re.compile(r"nvidia\.com/(gpu|mig-).*|[a-z0-9.-]+/v?gpu([._-].*)?")


def gpus_of(
    units: Iterable[tuple[str, str]], find: Callable[[str], str | None], own_resources: Collection[str] = ()
) -> frozenset[str]:
    """List the GPUs behind some units. IDs of no GPU count for nothing.

    `units` are pairs of resource name and device ID; `find` gives the UUID of the GPU that an ID names, and
    None for one that names none; `own_resources` are the names of resources that are GPUs by configuration.
    """
    found = set()
    for resource_name, unit_id in units:
        name = unit_id.removeprefix(RAIL_PREFIX)
        if _UUID.fullmatch(name) or resource_name in own_resources or is_gpu_resource(resource_name):
            found.add(find(name))
    return frozenset(uuid for uuid in found if uuid is not None)


def is_gpu_resource(name: str) -> bool:
    """Tell whether a resource is one of GPUs by its name alone: nvidia.com/gpu.shared, nvidia.com/mig-1g.10gb."""
    return _GPU_RESOURCE.fullmatch(name) is not None
