"""The fingerprint of a node's pods, by the rule of the NodeResourceTopology schedulers.

The scheduler takes over what an object says of a node only if the fingerprint in it equals the one that it computes
from its own list of the node's pods. So the same pods must count here as there:

- With a dedicated informer (the scheduler's default) all bound pods that are not Pending count, those that have ended
  too; with the shared one, Running pods (scheduler-plugins, podprovider). Only the API server knows the phases.
- By the method `with-exclusive-resources` only pods count that own something of the zones: devices whose resource is
  in the published zones, or, if Guaranteed, whole CPUs, memory or huge pages (resourcerequests/exclusive.go).

Without a watch of pods the pods that kubelet lists count, by the method `all`. Since Kubernetes 1.34 these are the
admitted ones that have not ended: another set than the scheduler's as long as an ended pod is not deleted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from xxhash import xxh64_intdigest

from agent.clients.pod_watch import WatchedPod

PREFIX = "pfp0v001"
METHOD_ALL = "all"
DEDICATED = "dedicated"
SHARED = "shared"


def fingerprint(pods: Iterable[tuple[str, str]]) -> str:
    """Compute the fingerprint of pods, each given as (namespace, name), in any order."""
    hashes = sorted(xxh64_intdigest(name, seed=xxh64_intdigest(namespace)) for namespace, name in pods)
    return f"{PREFIX}{xxh64_intdigest(b''.join(value.to_bytes(8, 'little') for value in hashes)):016x}"


def counted(
    pods: Iterable[WatchedPod], informer: str, method: str, resources: Collection[str]
) -> list[tuple[str, str]]:
    """Choose the pods that the scheduler counts, as (namespace, name). `resources` are those of the zones."""
    return [
        (pod.namespace, pod.name)
        for pod in pods
        if (pod.phase == "Running" if informer == SHARED else pod.phase != "Pending")
        and (method == METHOD_ALL or pod.exclusive_native or not pod.extended.isdisjoint(resources))
    ]
