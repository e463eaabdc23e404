"""All checks, in the order in which they are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from agent.doctor import checks_hardware, checks_node
from agent.doctor.facts import Facts
from agent.doctor.findings import Finding

CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    *(checks_node.configuration, checks_node.agent, checks_node.kubelet, checks_node.cdi, checks_node.memlock),
    *(checks_node.cni, checks_hardware.modules, checks_hardware.rdma_mode, checks_hardware.iommu, checks_hardware.vfs),
    *(checks_hardware.mtu, checks_hardware.names, checks_hardware.hugepages, checks_hardware.gpus),
)


def examine(facts: Facts) -> tuple[Finding, ...]:
    """Run every check; each says at least one thing."""
    return tuple(finding for check in CHECKS for finding in check(facts))
