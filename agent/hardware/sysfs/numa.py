"""NUMA nodes and CPUs as /sys/devices/system shows them. The node of a PCI device: `pci.py`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from agent.hardware.sysfs.read import Attributes
from agent.model.device import CpuPlace, NumaNode

_NODES = "/sys/devices/system/node"
_CPUS = "/sys/devices/system/cpu"
_NODE = re.compile(r"node([0-9]{1,5})")
_HUGEPAGES = re.compile(r"hugepages-([0-9]{1,15})kB")
_MEM_TOTAL = re.compile(r"MemTotal:\s+([0-9]{1,18}) kB")
_MAX_CPU = 1 << 16


def read_numa_nodes(read: Attributes) -> tuple[NumaNode, ...]:
    """Read all NUMA nodes, by number."""
    numbers = [int(m[1]) for name in read.names(_NODES) if (m := _NODE.fullmatch(name))]
    return tuple(_node(read, f"{_NODES}/node{number}", number) for number in sorted(numbers))


def parse_cpulist(text: str) -> tuple[int, ...]:
    """Read the kernel's `0-3,8,10-11`. Raises ValueError for anything else."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        low, dash, high = part.partition("-")
        first, last = int(low), int(high if dash else low)
        if not 0 <= first <= last < _MAX_CPU:
            raise ValueError(f"{part!r} is not a range of CPUs")
        cpus.update(range(first, last + 1))
    return tuple(sorted(cpus))


def read_cpu_places(root: Path, cpus: Iterable[int]) -> dict[int, CpuPlace]:
    """Read where these CPUs are. One whose place the kernel does not tell is left out, as one that is offline is.

    Two small files a CPU: the caller reads them once for as long as the CPUs stay the same.
    """
    read = Attributes(root)
    found = {}
    for cpu in cpus:
        folder = f"{_CPUS}/cpu{cpu}/topology"
        socket, core = read.whole(f"{folder}/physical_package_id", -1), read.whole(f"{folder}/core_id", -1)
        if socket >= 0 and core >= 0:
            found[cpu] = CpuPlace(socket, core)
    return found


def _node(read: Attributes, folder: str, number: int) -> NumaNode:
    memory = _MEM_TOTAL.search(read.text(f"{folder}/meminfo") or "")
    pages = []
    for name in read.names(f"{folder}/hugepages"):
        if size := _HUGEPAGES.fullmatch(name):
            count = read.whole(f"{folder}/hugepages/{name}/nr_hugepages", 0)
            pages.append((int(size[1]) * 1024, count))
    return NumaNode(
        number=number,
        cpus=_numbers(read, f"{folder}/cpulist", parse_cpulist, "CPUs"),
        memory_bytes=int(memory[1]) * 1024 if memory else 0,
        hugepages=tuple(sorted(pages)),
        distances=_numbers(read, f"{folder}/distance", _distances, "distances"),
    )


def _numbers(read: Attributes, path: str, parse: Callable[[str], tuple[int, ...]], what: str) -> tuple[int, ...]:
    text = read.text(path) or ""
    try:
        return parse(text)
    except ValueError:
        read.note(path, f"is not a list of {what}: {text[:40]!r}")
        return ()


def _distances(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split())
