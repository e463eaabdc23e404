"""Which GPU each device of a resource says that it belongs to. Pure.

A device says so of a GPU that it is nearest to, among the devices of its resource. The VFs of a port that is nearest
to several GPUs take turns; whole adapters, of which a GPU may have one only, are matched exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agent.offer.rails import nearest
from agent.placement import Distances
from agent.placement.matching import assign

_ONE_MORE = 1 << 30
"""What a GPU's next adapter costs: more than all that tells adapters apart."""


@dataclass(frozen=True, slots=True)
class Pairing:
    """The GPUs of a resource's devices."""

    gpu: Mapping[str, str] = field(default_factory=dict)
    """Device → the GPU that it names. One that is nearest to none is missing."""
    near: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Device → all GPUs that it is nearest to."""


def pair_up(devices: Sequence[str], distances: Distances) -> Pairing:
    """Pair the devices of one resource, given by PCI address, with GPUs."""
    port_of = {device: distances.port(device) for device in sorted(devices, key=distances.order)}
    near = nearest(sorted(set(port_of.values())), distances)
    by_port: dict[str, list[str]] = {}
    for device, port in port_of.items():
        if port in near:
            by_port.setdefault(port, []).append(device)
    if all(len(mine) == 1 for mine in by_port.values()):
        gpu = _matched(by_port, near, distances)
    else:
        gpu = _in_turns(by_port, near)
    return Pairing(gpu, {device: near[port] for device, port in port_of.items() if port in near})


def _matched(
    by_port: Mapping[str, Sequence[str]], near: Mapping[str, Sequence[str]], distances: Distances
) -> dict[str, str]:
    """Serve as many GPUs as can be, each by as few adapters more than another as can be."""
    ports, gpus = list(by_port), distances.gpus
    costs = [[distances.span(gpu, port) if gpu in near[port] else None for gpu in gpus] for port in ports]
    found = assign(costs, [[_ONE_MORE * i for i in range(len(ports))] for _ in gpus])
    assert found is not None, "each port is near to some GPU, and every GPU has room for all"
    return {by_port[port][0]: gpus[column] for port, column in zip(ports, found, strict=True)}


def _in_turns(by_port: Mapping[str, Sequence[str]], near: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Give the first device of each port to the GPU that has fewest so far, then the second of each, and so on."""
    served: Counter[str] = Counter()
    gpu: dict[str, str] = {}
    for turn in range(max(map(len, by_port.values()), default=0)):
        for port, devices in by_port.items():
            if turn < len(devices):
                chosen = min(near[port], key=served.__getitem__)
                served[chosen] += 1
                gpu[devices[turn]] = chosen
    return gpu
