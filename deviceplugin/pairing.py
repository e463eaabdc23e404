"""Which grants belong to one container, though kubelet never says for whom it asks.

It admits one pod after the other, and asks for each resource of a container once, in random order. So
grants in close succession are one container's until a resource comes up for the second time, or until
a pod is known to have them: its admission is over then. A wrong guess costs only nearness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agent.config import Resource

PAIRING_SECONDS = 3.0
"""The next resource's turn comes within milliseconds, unless another plugin's is between and slow."""


@dataclass(frozen=True, slots=True)
class _Granted:
    resource: Resource
    units: tuple[str, ...]
    devices: tuple[str, ...]
    at: float


class Pairing:
    """The last grants of one container, as far as can be told."""

    def __init__(self, clock: Callable[[], float], has_pod: Callable[[str], bool]) -> None:
        """`has_pod` tells whether it is known which pod a unit was granted to."""
        self._clock = clock
        self._has_pod = has_pod
        self._run: tuple[_Granted, ...] = ()

    def remember(self, resource: Resource, units: Sequence[str], devices: Sequence[str]) -> None:
        """Take in a grant."""
        granted = _Granted(resource, tuple(units), tuple(devices), self._clock())
        self._run = (*self._container_of(resource, len(units)), granted)

    def near(self, resource: Resource, size: int) -> tuple[str, ...]:
        """Name the devices that the next units of a resource should be near to: a NIC's GPU, a GPU's NIC.

        NICs without a GPU are near other NICs of the container.
        """
        run = self._container_of(resource, size)
        complement = [g for g in run if is_gpu(g.resource) != is_gpu(resource)]
        return tuple(device for grant in complement or run for device in grant.devices if device)

    def _container_of(self, resource: Resource, size: int) -> tuple[_Granted, ...]:
        """List the last grants that go with so many units of a resource that kubelet asks for now."""
        since = self._clock() - PAIRING_SECONDS
        run = tuple(g for g in self._run if g.at >= since and not any(map(self._has_pod, g.units)))
        same = [i for i, g in enumerate(run) if g.resource.name == resource.name]
        if not same:
            return run
        # It is another container's turn. Its other half may have come already, and been taken for the other half of
        # the one before, if that one has none: then the numbers fit better now. Most ask for as many GPUs as NICs.
        later = run[same[-1] + 1 :]
        before = len(run[same[-1]].units)
        fits = [g for g in later if is_gpu(g.resource) != is_gpu(resource) and len(g.units) == size != before]
        return later if fits else ()


def is_gpu(resource: Resource) -> bool:
    """Tell whether a resource's units are GPUs."""
    return resource.kind == "gpu"
