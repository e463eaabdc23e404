"""The pods bound to this node, as the API server has them. What is kept of a pod is a few words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from agent.cluster.apiserver import POD, ApiServer
from agent.cluster.object_watch import ObjectWatch, Timing, Watched
from agent.model.printable import is_memory, parse_exact


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
    exclusive_init: bool = False
    """Whether an init container that ends asks for extended resources, or, if Guaranteed, for exclusive native ones."""


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
    lasting, ending = _requests(item.get("spec", {}))
    guaranteed = status.get("qosClass") == "Guaranteed"
    return WatchedPod(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        phase=status.get("phase", "Pending"),
        exclusive_native=guaranteed and any(_is_exclusive(name, amount) for name, amount in lasting),
        extended=frozenset(name for name, _ in lasting if not _is_native(name)),
        exclusive_init=any(
            not _is_native(name) or (guaranteed and _is_exclusive(name, amount)) for name, amount in ending
        ),
    )


def _requests(spec: Mapping[str, Any]) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """Return what the containers ask for that run as long as the pod, sidecars too; and what the others ask for."""
    init = spec.get("initContainers") or ()
    sidecars = [container for container in init if container.get("restartPolicy") == "Always"]
    ending = [container for container in init if container.get("restartPolicy") != "Always"]
    return _asked([*(spec.get("containers") or ()), *sidecars]), _asked(ending)


def _asked(containers: Iterable[Mapping[str, Any]]) -> list[tuple[str, Any]]:
    return [item for each in containers for item in (each.get("resources", {}).get("requests") or {}).items()]


def _is_native(name: str) -> bool:
    """Tell whether Kubernetes defines a resource itself (core/v1/helper, IsNativeResource)."""
    return "/" not in name or "kubernetes.io/" in name


def _is_exclusive(name: str, quantity: Any) -> bool:
    amount = parse_exact(quantity)
    if name == "cpu":
        return amount > 0 and amount == amount.to_integral_value()
    return amount > 0 and is_memory(name)
