"""The pods bound to this node, as the API server has them. What is kept of a pod is a few words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from agent.cluster.apiserver import POD, ApiServer
from agent.cluster.object_watch import ObjectWatch, Timing, Watched
from agent.model.quantity import is_memory, parse_exact


@dataclass(frozen=True, slots=True)
class WatchedPod:
    """What schedulers' rules need to know of one pod."""

    namespace: str
    name: str
    uid: str
    phase: str
    """Pending, Running, Succeeded, Failed or Unknown."""
    exclusive_native: bool = False
    """Guaranteed, with whole CPUs, memory or huge pages in a container that lasts."""
    extended: frozenset[str] = frozenset()
    """Extended resources that its lasting containers ask for."""


class PodWatch(ObjectWatch[WatchedPod]):
    """Follows the pods of one node. `pods` and `problem` may be read from any thread."""

    def __init__(
        self, api: ApiServer, node_name: str, changed: Callable[[], None], timing: Timing | None = None
    ) -> None:
        """`changed` is called, on the watch's thread, when a pod came, went, or is another in what is kept of it."""
        watched = Watched(POD, {"spec.nodeName": node_name}, read_pod, "the pods of the node")
        super().__init__(api, watched, changed, timing)

    @property
    def pods(self) -> tuple[WatchedPod, ...] | None:
        """By namespace and name; None before the first list."""
        return self.objects


def read_pod(item: Mapping[str, Any]) -> WatchedPod:
    """Take from a Pod object what is kept of it."""
    metadata, status = item["metadata"], item.get("status", {})
    requests = [container.get("resources", {}).get("requests") or {} for container in _lasting(item.get("spec", {}))]
    guaranteed = status.get("qosClass") == "Guaranteed"
    return WatchedPod(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        phase=status.get("phase", "Pending"),
        exclusive_native=guaranteed and any(_is_exclusive(k, v) for r in requests for k, v in r.items()),
        extended=frozenset(name for r in requests for name in r if not _is_native(name)),
    )


def _lasting(spec: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """List the containers that run as long as the pod: its own ones and its sidecars, which are init containers."""
    yield from spec.get("containers") or ()
    for container in spec.get("initContainers") or ():
        if container.get("restartPolicy") == "Always":
            yield container


def _is_native(name: str) -> bool:
    """Tell whether Kubernetes defines a resource itself (core/v1/helper, IsNativeResource)."""
    return "/" not in name or "kubernetes.io/" in name


def _is_exclusive(name: str, quantity: Any) -> bool:
    amount = parse_exact(quantity)
    if name == "cpu":
        return amount > 0 and amount == amount.to_integral_value()
    return amount > 0 and is_memory(name)
