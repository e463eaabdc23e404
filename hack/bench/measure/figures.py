"""Samples to figures, and figures to a table. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Limit:
    """What a figure must not exceed."""

    figure: str
    most: float
    what: str


LIMITS = (
    Limit("discovery_1024_vf_ms", 500, "scan of a node with 1,024 VFs"),
    Limit("allocate_p99_ms", 5, "Allocate over kubelet's socket"),
    Limit("preferred_p99_ms", 5, "GetPreferredAllocation over kubelet's socket"),
    Limit("start_to_registered_ms", 700, "from the agent's exec until kubelet has all lists, with 1,024 VFs"),
    Limit("add_ratio_host_device", 0.8, "ADD of a VF, in terms of host-device"),
    Limit("del_ratio_host_device", 0.8, "DEL of a VF until the answer, in terms of host-device"),
    Limit("add_4_ratio_source_in_pairs", 1.15, "four ADDs with source routing, in terms of those without"),
    Limit("passthrough_p50_ms", 5, "ADD for a pod without our devices, above /bin/true"),
    Limit("passthrough_away_p50_ms", 5, "the same while the agent is away"),
    Limit("agent_rss_mib", 100, "memory of the agent with 1,024 VFs, publishing"),
)


def quantile(sample: Sequence[float], share: float) -> float:
    """Return the smallest value that a share of the sample does not exceed (nearest rank)."""
    return sorted(sample)[max(math.ceil(len(sample) * share), 1) - 1]


def spread(name: str, milliseconds: Sequence[float]) -> Figures:
    """Return the median and the 99th percentile of a sample."""
    return {f"{name}_p50_ms": quantile(milliseconds, 0.5), f"{name}_p99_ms": quantile(milliseconds, 0.99)}


def ratios(figures: Mapping[str, float], *names: str) -> Figures:
    """Return medians in terms of the former version's, where that was measured."""
    former = {name: figures.get(f"former_{name}_p50_ms") for name in names}
    return {f"{name}_ratio_former": figures[f"{name}_p50_ms"] / median for name, median in former.items() if median}


def exceeded(figures: Mapping[str, float], limits: Iterable[Limit] = LIMITS) -> list[str]:
    """Tell which limits are not held."""
    return [
        f"{limit.figure} is {figures[limit.figure]:.3g}, must be at most {limit.most:g} ({limit.what})"
        for limit in limits
        if limit.figure in figures and figures[limit.figure] > limit.most
    ]


def table(figures: Mapping[str, float], limits: Iterable[Limit] = LIMITS) -> Iterator[str]:
    """Lay the figures out, with the limits of those that have one."""
    known = {limit.figure: limit for limit in limits}
    for name, value in figures.items():
        limit = known.get(name)
        verdict = "" if limit is None else f"  {'ok' if value <= limit.most else 'OVER':4} at most {limit.most:g}"
        yield f"{name:34}{value:10.3f}{verdict}"
