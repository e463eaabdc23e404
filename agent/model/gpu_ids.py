"""What device plugins call GPUs: which resources are of GPUs, and which GPU the ID of a unit means. Pure.

    nvidia.com/gpu, nvidia.com/mig-…   GPU-<UUID>, 3, MIG-<UUID>, 3:1 (GPU and slice), of old MIG-GPU-<UUID>/<GPU
                                       instance>/<compute instance>; a replica of any of them <ID>::<number>
    amd.com/gpu, amd.com/cpx_nps1      0000:c1:00.0, a partition amdgpu_xcp_3, a replica <ID>-slice-<number>
    gpu.intel.com/i915, …/xe           card0-0: the card, and a number among its shares
    huawei.com/Ascend910, …/npu        Ascend910-3; Ascend910-4c-100-3 for a part of the device 3
    habana.ai/gaudi                    a serial number, which says nothing of where the device is: its device files do

UUIDs mean the same under any resource name, the rest only under a GPU's: a VF's unit is a PCI address, too, and a
shared HCA's may be a number. What other plugins call theirs, the configuration says (`GpuIds`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

RAIL = "rail-"
MAX_ID = 128
"""A longer ID is of no form that the configuration tells: patterns get slow with length."""
UUID = re.compile(r"(GPU|MIG)-.+")
_RESOURCE = re.compile(
    r"nvidia\.com/(gpu|mig-).*|[a-z0-9.-]+/v?gpu([._-].*)?|amd\.com/[a-z]+_nps[0-9]+"
    r"|gpu\.intel\.com/(i915|xe)|habana\.ai/gaudi|huawei\.com/(Ascend.+|npu)"
)
_INTEL = re.compile(r"(card[0-9]+)-[0-9]+")
_HUAWEI = re.compile(r"(?:Ascend|npu).*-([0-9]+)")
_FIELD = re.compile(r"\{(\w+)\}")
_SHORT_ADDRESS = re.compile(r"[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True, slots=True)
class GpuIds:
    """What a plugin calls its GPUs, as the configuration says."""

    resource: str
    """Its resource's name; * stands for anything."""
    pattern: str
    """A regular expression with named groups, of a whole ID."""
    gpu: str = "{pci}"
    """The GPU's name made of the groups: a PCI address, or what its driver calls it (card0, accel3)."""

    def name(self, unit_id: str) -> str:
        """Name the GPU that an ID means; empty if it is of another form."""
        found = re.fullmatch(self.pattern, unit_id) if len(unit_id) <= MAX_ID else None
        if found is None:
            return ""
        name = _FIELD.sub(lambda field: found[field[1]] or "", self.gpu)
        lower = name.lower()
        return f"0000:{lower}" if _SHORT_ADDRESS.fullmatch(lower) else lower if ":" in lower else name


def fields(template: str) -> frozenset[str]:
    """List the groups that a GPU's name is made of."""
    return frozenset(_FIELD.findall(template))


def gpu_name(resource_name: str, unit_id: str, own: Collection[str] = (), ids: Sequence[GpuIds] = ()) -> str | None:
    """Name the GPU behind a unit as its driver or NVML does; empty if the ID does not say; None if it is no GPU's.

    `own` are names of resources that are GPUs by configuration.
    """
    for each in ids:
        if fnmatchcase(resource_name, each.resource):
            return each.name(unit_id)
    name = unit_id.removeprefix(RAIL)
    if not (UUID.fullmatch(name) or resource_name in own or is_gpu_resource(resource_name)):
        return None
    if found := _INTEL.fullmatch(name):
        return found[1]
    if found := _HUAWEI.fullmatch(name):
        return f"davinci{found[1]}"
    return name.partition("-slice-")[0]


def is_gpu_resource(name: str) -> bool:
    """Tell whether a resource is one of GPUs by its name alone: nvidia.com/gpu.shared, amd.com/cpx_nps1."""
    return _RESOURCE.fullmatch(name) is not None
