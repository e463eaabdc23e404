"""The section `placement`: what the hardware does not tell of GPUs, and of how near NICs are to them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.config import declare
from agent.config.naming import RESOURCE_NAME
from agent.config.reader import Reader
from agent.model.gpu_ids import GpuIds, fields

MAX_PATTERN = 200
_PLAIN = GpuIds("", "")
_NESTED = re.compile(r"\((?:\\.|[^()\\])*(?<!\\)[*+}](?:\\.|[^()\\])*\)[*+{]")
"""A repeated group with a repetition in it, such as (a+)+: one ID may take it years."""
_RESOURCE = re.compile(rf"{RESOURCE_NAME.pattern}|[A-Za-z0-9.*/_-]*\*[A-Za-z0-9.*/_-]*")


def _gpu_ids(reader: Reader) -> GpuIds | None:
    problems = len(reader.problems)
    name = reader.text(
        "resource",
        None,
        "domain/name, such as example.com/npu; * stands for anything",
        _RESOURCE,
        about="The resource of the GPUs; * stands for anything",
    )
    pattern = reader.take(
        "pattern",
        None,
        f"a regular expression with named groups, such as npu-(?P<pci>.+), of at most {MAX_PATTERN} characters, without"
        " a repetition in a repeated group",
        _is_pattern,
        schema={"type": "string"},
        about="Regular expression of a whole device ID, with named groups",
    )
    gpu = reader.text(
        "gpu",
        _PLAIN.gpu,
        "text with groups of the pattern in braces, such as accel{number}",
        re.compile(r"[^{}]*(?:\{\w+\}[^{}]*)+"),
        about="The GPU's PCI address, or what its driver calls it (card0, accel3), made of the groups",
    )
    reader.done()
    for key in ("resource", "pattern"):
        if key not in reader.value:
            reader.note(key, "is missing")
    if len(reader.problems) > problems or name is None or pattern is None or gpu is None:
        return None
    if unknown := sorted(fields(gpu) - set(re.compile(pattern).groupindex)):
        reader.note(
            "gpu" if "gpu" in reader.value else "pattern", f"has no group {unknown[0]}: name it (?P<{unknown[0]}>…)"
        )
        return None
    return GpuIds(name, pattern, gpu)


def _is_pattern(value: Any) -> bool:
    if not isinstance(value, str) or len(value) > MAX_PATTERN or _NESTED.search(value):
        return False
    try:
        return re.compile(value).groups > 0
    except (re.error, OverflowError, RecursionError):
        return False


@dataclass(frozen=True, slots=True)
class Placement:
    """What placement is to know besides what it finds out."""

    gpu_ids: tuple[GpuIds, ...] = declare.sections(
        _gpu_ids, about="What device plugins that the agent does not know call their GPUs"
    )
    topology_file: Path | None = declare.path(
        None,
        about="NCCL's topology file of hosts whose PCI tree tells no more than NUMA nodes; a node that has none goes by"
        " what it knows; default: none",
    )
