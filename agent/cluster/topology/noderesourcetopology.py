"""The NodeResourceTopology object (topology.node.k8s.io/v1alpha2) of this node. Pure.

The object says what the scheduler plugin NodeResourceTopologyMatch reads:

- A zone `node-<N>` for every NUMA node from 0 up to the last one with CPUs or devices, without a gap, in order: the
  scheduler indexes arrays by the number. It takes numbers below 64 only. Zones past the last one hold no pod (GB200 has
  34 of them, for GPU memory), but its score LeastNUMANodes enumerates all combinations of zones, and LeastAllocated
  takes a zone without CPUs for a full one.
- Each zone has cpu, memory and every huge page size of the node: if no zone had them, every pod
  asking for them would be rejected here. `agent.cluster.topology.amounts` tells what the amounts mean.
- Policy and scope in kubelet's words; the deprecated topologyPolicies say the same to schedulers that
  read no attributes.
- The fingerprint of the node's pods, and by which method it was made. The scheduler takes over what an object says of
  a node only if this equals what it computes from its own list of the node's pods. So the same pods must count here:
  with a dedicated informer (the scheduler's default) all bound pods that are not Pending, those that have ended too;
  with the shared one, Running pods (scheduler-plugins, podprovider). Only the API server knows the phases. By the
  method `with-exclusive-resources` only pods count that own something: extended resources, or, if Guaranteed, whole
  CPUs, memory or huge pages (resourcerequests/exclusive.go). Up to v0.34.7 any extended resource and all init
  containers count; on master the resources of the published zones, and sidecars of the init containers. Without a watch
  of pods those that kubelet lists count, by the method `all`: since Kubernetes 1.34 the admitted ones that have not
  ended, another set than the scheduler's as long as an ended pod is not deleted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from xxhash import xxh64_intdigest

from agent.cluster.apiserver import TOPOLOGY
from agent.cluster.pod_watch import WatchedPod
from agent.cluster.topology.amounts import Amount, by_zone
from agent.cluster.topology.publisher import Publication
from agent.cluster.topology.state import NodeState
from agent.cluster.topology.view import View
from agent.config.topology import Fingerprint
from agent.model.device import NumaNode
from agent.model.printable import is_memory

PREFIX = "pfp0v001"
METHOD_ALL = "all"
DEFAULT = Fingerprint()
MAX_ZONES = 64

_DEPRECATED = {
    ("single-numa-node", "container"): "SingleNUMANodeContainerLevel",
    ("single-numa-node", "pod"): "SingleNUMANodePodLevel",
    ("restricted", "container"): "RestrictedContainerLevel",
    ("restricted", "pod"): "RestrictedPodLevel",
    ("best-effort", "container"): "BestEffortContainerLevel",
    ("best-effort", "pod"): "BestEffortPodLevel",
}


class NodeResourceTopology(Publication):
    """Published for the scheduler plugin."""

    kind = TOPOLOGY
    settles = True

    def __init__(self, view: View) -> None:
        self._view = view

    async def content(self) -> Mapping[str, Any] | None:
        """Build the object of what kubelet tells now."""
        state = await self._view.state()
        return build(state, self._view.config.fingerprint) if state is not None else None


def build(state: NodeState, rule: Fingerprint = DEFAULT) -> dict[str, Any] | None:
    """Build the object, or None if the scan found no NUMA node to speak of.

    `rule` says which of the watched pods the scheduler counts.
    """
    nodes = {node.number: node for node in state.snapshot.numa_nodes if 0 <= node.number < MAX_ZONES}
    if not nodes:
        return None
    every = by_zone(range(max(nodes) + 1), nodes, state)
    used = [n for n, zone in every.items() if any(a.capacity for a in zone if not is_memory(a.name))]
    amounts = {number: zone for number, zone in every.items() if number <= max(used, default=0)}
    attributes = _attributes(state, rule, {a.name for zone in amounts.values() for a in zone})
    policy = _DEPRECATED.get((state.kubelet.policy, state.kubelet.scope), "None")
    return {
        "apiVersion": TOPOLOGY.api_version,
        "kind": TOPOLOGY.kind,
        "metadata": metadata(state),
        "attributes": [{"name": name, "value": value} for name, value in sorted(attributes.items())],
        "topologyPolicies": [policy],
        "zones": [_zone(number, amounts, nodes, state) for number in sorted(amounts)],
    }


def metadata(state: NodeState) -> dict[str, Any]:
    """Name an object after the node, which owns it: the cluster removes it with the node."""
    found: dict[str, Any] = {"name": state.node_name}
    if state.node_uid is not None:
        owner = {"apiVersion": "v1", "kind": "Node", "name": state.node_name, "uid": state.node_uid}
        found["ownerReferences"] = [owner]
    return found


def _attributes(state: NodeState, rule: Fingerprint, resources: set[str]) -> dict[str, str]:
    if state.watched is not None:
        pods, method = counted(state.watched, rule, resources), rule.method
    else:
        pods, method = [(pod.namespace, pod.name) for pod in state.pods], METHOD_ALL
    attributes = {
        "topologyManagerPolicy": state.kubelet.policy,
        "topologyManagerScope": state.kubelet.scope,
        "nodeTopologyPodsFingerprint": fingerprint(pods),
        "nodeTopologyPodsFingerprintMethod": method,
    }
    if state.kubelet.max_numa_nodes is not None:
        attributes["topologyManagerMaxNUMANodes"] = state.kubelet.max_numa_nodes
    return attributes


def _zone(
    number: int, amounts: Mapping[int, tuple[Amount, ...]], nodes: Mapping[int, NumaNode], state: NodeState
) -> dict[str, Any]:
    zone: dict[str, Any] = {"name": f"node-{number}", "type": "Node"}
    node = nodes.get(number)
    if node is not None and node.distances:
        order = sorted(n.number for n in state.snapshot.numa_nodes)
        zone["costs"] = [
            {"name": f"node-{other}", "value": distance}
            for other, distance in zip(order, node.distances, strict=False)
            if other in nodes and other in amounts
        ]
    zone["resources"] = [amount.document() for amount in amounts[number]]
    return zone


def fingerprint(pods: Iterable[tuple[str, str]]) -> str:
    """Compute the fingerprint of pods, each given as (namespace, name), in any order."""
    hashes = sorted(xxh64_intdigest(name, seed=xxh64_intdigest(namespace)) for namespace, name in pods)
    return f"{PREFIX}{xxh64_intdigest(b''.join(value.to_bytes(8, 'little') for value in hashes)):016x}"


def counted(pods: Iterable[WatchedPod], rule: Fingerprint, resources: Collection[str]) -> list[tuple[str, str]]:
    """Choose the pods that the scheduler counts, as (namespace, name). `resources` are those of the zones."""
    return [
        (pod.namespace, pod.name)
        for pod in pods
        if (pod.phase == "Running" if rule.pods == "shared" else pod.phase != "Pending")
        and (rule.method == METHOD_ALL or _is_exclusive(pod, rule.rules, resources))
    ]


def _is_exclusive(pod: WatchedPod, rules: str, resources: Collection[str]) -> bool:
    if rules == "master":
        return pod.exclusive_native or not pod.extended.isdisjoint(resources)
    return pod.exclusive_native or bool(pod.extended) or pod.exclusive_init
