"""Looks a node over: facts are collected below a root that is passed in, and pure checks find what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from agent.report.doctor import checks_hardware, checks_node
from agent.report.doctor.facts import Facts, Result

CHECKS: tuple[tuple[str, Callable[[Facts], Iterator[Result]]], ...] = (
    ("config", checks_node.configuration),
    ("agent", checks_node.agent),
    ("kubelet", checks_node.kubelet),
    ("cdi", checks_node.cdi),
    ("memlock", checks_node.memlock),
    ("cni", checks_node.cni),
    ("claims", checks_node.driver),
    ("claims", checks_node.slices),
    ("claims", checks_node.held),
    ("modules", checks_hardware.modules),
    ("rdma-mode", checks_hardware.rdma_mode),
    ("iommu", checks_hardware.iommu),
    ("vfs", checks_hardware.vfs),
    ("mtu", checks_hardware.mtu),
    ("names", checks_hardware.names),
    ("rails", checks_hardware.rails),
    ("not-offered", checks_hardware.not_offered),
    ("hugepages", checks_hardware.hugepages),
    ("gpus", checks_hardware.gpus),
    ("data-direct", checks_hardware.data_direct),
)
"""Name and check, in the order in which they are shown."""


def examine(facts: Facts) -> tuple[Result, ...]:
    """Run every check; each says at least one thing: those of claims where something is offered to them, that of Data
    Direct where adapters have such functions."""
    return tuple(replace(found, check=found.check or name) for name, check in CHECKS for found in check(facts))
