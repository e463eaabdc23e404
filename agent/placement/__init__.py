"""Which GPUs and NICs a request should get: pure, deterministic, and never a reason to fail a pod.

    Distances      how near everything is, made once per snapshot
    match_nics     NICs for given GPUs, an exact minimum
    match_groups   NICs for several containers at once
    choose_gpus    GPUs that belong together and find NICs near them
    choose_pairs   both at once
    choose_sets    several NICs for each of some GPUs
    choose         units of one resource, as kubelet asks for them

Devices are named by PCI address (of a VF, a PF or any other function) and GPUs by UUID; a MIG
device, a time-sliced replica (`UUID::2`) and a driver's index count as their GPU. A wrong guess costs
bandwidth, never correctness.
"""

from __future__ import annotations

from agent.placement.distances import Distances
from agent.placement.gpu_sets import choose_sets
from agent.placement.gpus import choose_gpus, choose_pairs
from agent.placement.layout import Layout, choose
from agent.placement.nics import Group, for_pairs, match_groups, match_nics

__all__ = [
    "Distances",
    "Group",
    "Layout",
    "choose",
    "choose_gpus",
    "choose_pairs",
    "choose_sets",
    "for_pairs",
    "match_groups",
    "match_nics",
]
