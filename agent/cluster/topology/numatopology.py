"""The Numatopology object (nodeinfo.volcano.sh/v1alpha1) of this node, for Volcano's numaaware plugin. Pure.

What the plugin reads, and what that means for the content:

- `numares.cpu.allocatable` is a set of CPU numbers (an amount would be a parse error): those that no container owns.
  `numares.cpu` must be there, or the scheduler fails on its absence.
- `cpuDetail` must have every CPU: one that is missing would count for NUMA node 0.
- `resReserved.cpu` is a number of CPUs that the scheduler takes off again, and it chooses them itself, by topology.
  kubelet's reserved CPUs may be others. So where kubelet reports what it hands out (static CPU manager), the reserved
  ones are missing in `allocatable` and nothing is left to take off: "0".
- `podAllocations` (Volcano 1.16): a pod that the scheduler placed keeps its CPUs twice until it is listed here. The
  older definition of the object does not know the field, and the API server then refuses the object as a whole.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from agent.cluster.apiserver import NUMATOPOLOGY
from agent.cluster.topology.node_view import NodeState, View, cpus_of
from agent.cluster.topology.noderesourcetopology import metadata
from agent.cluster.topology.publisher import Publication
from agent.errors import AgentError
from agent.hardware.sysfs.numa import read_cpu_places
from agent.model.device import CpuPlace, cpu_list
from agent.model.printable import milli_text

log = logging.getLogger(__name__)


class Numatopology(Publication):
    """Published for Volcano."""

    kind = NUMATOPOLOGY

    def __init__(self, view: View) -> None:
        self._view = view
        self._places: tuple[frozenset[int], Mapping[int, CpuPlace]] = frozenset(), {}
        """The CPUs that were there when it was last read where each is."""
        self._with_pods = True

    async def content(self) -> Mapping[str, Any] | None:
        """Build the object of what kubelet reports now."""
        state = await self._view.state()
        if state is None:
            return None
        cpus = frozenset(cpu for node in state.snapshot.numa_nodes for cpu in node.cpus)
        if cpus != self._places[0]:
            self._places = cpus, await asyncio.to_thread(read_cpu_places, self._view.node.host.root, cpus)
        return build(state, self._places[1], with_pods=self._with_pods)

    def yields(self, error: AgentError) -> bool:
        """Leave podAllocations out where the cluster's definition of the object has none (Volcano before 1.16)."""
        if self._with_pods and "podAllocations" in str(error):
            self._with_pods = False
            log.warning("the cluster's Numatopology has no podAllocations: publishing it without")
            return True
        return False


def build(state: NodeState, places: Mapping[int, CpuPlace], *, with_pods: bool = True) -> dict[str, Any] | None:
    """Build the object, or None if the scan found no NUMA node to speak of.

    `places` says where each CPU is. `with_pods` adds podAllocations.
    """
    if not state.snapshot.numa_nodes:
        return None
    numa_of = {cpu: node.number for node in state.snapshot.numa_nodes for cpu in node.cpus}
    kubelet = state.kubelet
    handed_out = frozenset(state.allocatable.cpu_ids) or (frozenset(numa_of) - kubelet.reserved_cpus)
    reserved = 0 if state.allocatable.cpu_ids or kubelet.reserved_cpus else kubelet.reserved_milli_cpu
    spec: dict[str, Any] = {
        "policies": {"CPUManagerPolicy": kubelet.cpu_manager, "TopologyManagerPolicy": kubelet.policy},
        "resReserved": {"cpu": milli_text(reserved)},
        "numares": {"cpu": {"allocatable": cpu_list(handed_out - state.owned_cpus), "capacity": len(numa_of)}},
        "cpuDetail": {str(cpu): _detail(cpu, numa, places) for cpu, numa in sorted(numa_of.items())},
    }
    if with_pods:
        spec["podAllocations"] = _pods(state)
    return {
        "apiVersion": NUMATOPOLOGY.api_version,
        "kind": NUMATOPOLOGY.kind,
        "metadata": metadata(state),
        "spec": spec,
    }


def _detail(cpu: int, numa: int, places: Mapping[int, CpuPlace]) -> dict[str, int]:
    # A kernel that does not show it: a NUMA node as a socket and a CPU as a core are never wrong by more than siblings.
    place = places.get(cpu, CpuPlace(numa, cpu))
    return {"numa": numa, "socket": place.socket, "core": place.core}


def _pods(state: NodeState) -> list[dict[str, Any]]:
    """List the pods that own CPUs. The scheduler knows a pod again by its UID, or by namespace and name."""
    uids = {(pod.namespace, pod.name): pod.uid for pod in state.watched or ()}
    found = []
    for pod in sorted(state.pods, key=lambda pod: pod.pod.names):
        containers = [{"name": name, "allocations": {"cpu": cpu_list(cpus)}} for name, cpus in cpus_of(pod)]
        if not containers:
            continue
        namespace, name = pod.pod.names
        listed: dict[str, Any] = {"namespace": namespace, "name": name, "containerAllocations": containers}
        if uid := uids.get(pod.pod.names):
            listed["uid"] = uid
        found.append(listed)
    return found
