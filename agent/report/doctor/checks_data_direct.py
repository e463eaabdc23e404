"""Checks of hosts whose adapters have a Data Direct function: kernel, rdma-core, ACS of the shared switch. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from agent.report.doctor.data_direct_facts import REQUEST_REDIRECT, DataDirectFacts, functions
from agent.report.doctor.facts import Facts
from agent.report.doctor.findings import Finding, Severity

CHECK = "data-direct"


def data_direct(facts: Facts) -> Iterator[Finding]:
    """Whether traffic between GPUs and adapters takes the way of the Data Direct functions, where there are such."""
    known = facts.data_direct
    if known is None:
        return
    problems = [*_driver(facts, known), *_library(known), *_acs(known)]
    yield from problems
    if not problems:
        count = len(functions(facts.snapshot))
        ready = "kernel, libmlx5 and ACS let GPUs' traffic through" if known.acs else "kernel and libmlx5 know them"
        yield Finding(CHECK, Severity.FINE, f"{count} functions; {ready}")


def _driver(facts: Facts, known: DataDirectFacts) -> Iterator[Finding]:
    lacking = [d.address for d in functions(facts.snapshot) if d.driver is None or d.is_for_programs]
    if lacking:
        yield Finding(
            CHECK,
            Severity.WARNING,
            f"{', '.join(lacking)} {'has' if len(lacking) == 1 else 'have'} no kernel driver: GPUs' traffic then goes"
            " over the processor, with about half the bandwidth",
            f"modprobe mlx5_ib; if it is loaded, this kernel ({known.kernel or 'unknown'}) is too old: take Linux 6.12"
            " or later, or the driver of DOCA",
        )


def _library(known: DataDirectFacts) -> Iterator[Finding]:
    if not known.library:
        text = "the host has no libmlx5.so.1 to look at: what counts is the one in each container image"
        yield Finding(CHECK, Severity.UNSEEN, text, "build images with rdma-core 54 or later")
    elif not known.library_knows:
        yield Finding(
            CHECK,
            Severity.WARNING,
            f"{known.library} does not know Data Direct: NCCL and UCX then silently use the slower path",
            "install rdma-core 54 or later, on the host and in container images",
        )


def _acs(known: DataDirectFacts) -> Iterator[Finding]:
    """Redirected requests or completions go up to the processor and back down again."""
    unseen = [port.address for port, control in known.acs if control is None]
    if unseen:
        text = f"the ACS settings of {', '.join(unseen)} cannot be read"
        yield Finding(CHECK, Severity.UNSEEN, text, "run doctor as root on the host")
    wrong = [(port, control) for port, control in known.acs if control is not None and control & port.rule.off]
    unsafe = [
        (port, control)
        for port, control in known.acs
        if control is not None and not control & port.rule.off and control & port.rule.on != port.rule.on
    ]
    wanted = ";".join(f"{port.rule.words}@{port.address}" for port, _ in known.acs)
    remedy = f"boot with pci=config_acs={wanted} (Linux 6.11 or later; rdma_topo write-grub-acs writes it)"
    if wrong:
        ports = ", ".join(
            f"{port.address} redirects {_what(port.rule.off)} ({port.towards} is below it)" for port, _ in wrong
        )
        yield Finding(CHECK, Severity.WARNING, f"ACS sends GPUs' traffic up to the processor: {ports}", remedy)
    if unsafe:
        ports = ", ".join(f"{port.address} ({control:07b}, not {port.rule.words})" for port, control in unsafe)
        text = f"ACS is not set as rdma-core's rdma_topo asks, so functions are less isolated: {ports}"
        yield Finding(CHECK, Severity.NOTE, text, remedy)


def _what(bit: int) -> str:
    return "requests" if bit == REQUEST_REDIRECT else "completions"
