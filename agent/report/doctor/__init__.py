"""Looks a node over: facts are collected below a root that is passed in, and pure checks find what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from agent.report.doctor import checks_hardware, checks_node
from agent.report.doctor.facts import Facts
from agent.report.doctor.results import Result

CHECKS: tuple[Callable[[Facts], Iterator[Result]], ...] = (
    checks_node.configuration,
    checks_node.agent,
    checks_node.kubelet,
    checks_node.cdi,
    checks_node.memlock,
    checks_node.cni,
    checks_node.driver,
    checks_node.slices,
    checks_node.classes,
    checks_node.held,
    checks_hardware.modules,
    checks_hardware.rdma_mode,
    checks_hardware.iommu,
    checks_hardware.vfs,
    checks_hardware.mtu,
    checks_hardware.names,
    checks_hardware.rails,
    checks_hardware.not_offered,
    checks_hardware.hugepages,
    checks_hardware.gpus,
    checks_hardware.data_direct,
)
"""In the order in which they are told."""


def examine(facts: Facts) -> tuple[Result, ...]:
    """Run every check; each says at least one thing: those of claims where something is offered to them, that of Data
    Direct where adapters have such functions."""
    return tuple(finding for check in CHECKS for finding in check(facts))
