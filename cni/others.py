"""What CNI must know of what is not its own: what resources offer, and what kubelet gave to whom."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from agent.config import CniSettings
from agent.model.allocation import PodRef

NOTHING: Mapping[str, str] = MappingProxyType({})
ANYTHING_GOES = CniSettings(require_grant=False)


@dataclass(frozen=True, slots=True)
class Holding:
    """What kubelet gave to one pod, as PCI addresses."""

    whole: frozenset[str] = frozenset()
    """VFs and adapters that are the pod's alone."""
    shared: frozenset[str] = frozenset()
    """Adapters of which it has a share."""


@dataclass(frozen=True, slots=True)
class Others:
    """How to ask for it. All may be called on many threads at once."""

    offered: Callable[[], Mapping[str, str]] = lambda: NOTHING
    """Maps the PCI devices that resources offer to kubelet to their resources."""
    units_of: Callable[[PodRef], Iterable[tuple[str, str]]] = lambda pod: ()
    """Lists resource name and unit of all that kubelet gave to a pod; may raise Unavailable."""
    held_by: Callable[[PodRef], Holding | None] = lambda pod: Holding()
    """Asks kubelet what a pod has; None if it does not know the pod. May raise Unavailable."""
    settings: Callable[[], CniSettings] = lambda: ANYTHING_GOES
    """The configuration of this moment."""


NO_OTHERS = Others()
