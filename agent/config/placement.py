"""The section `placement`: what the hardware does not tell of GPUs, and of how near NICs are to them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from agent.config.naming import RESOURCE_NAME
from agent.config.section import FOLDER, Many, Refusal, Section, Through, matching, string
from agent.model.gpu_ids import GpuIds, fields

MAX_PATTERN = 200
_NESTED = re.compile(r"\((?:\\.|[^()\\])*(?<!\\)[*+}](?:\\.|[^()\\])*\)[*+{]")
"""A repeated group with a repetition in it, such as (a+)+: one ID may take it years."""
_RESOURCE = re.compile(rf"{RESOURCE_NAME.pattern}|[A-Za-z0-9.*/_-]*\*[A-Za-z0-9.*/_-]*")
_GPU = re.compile(r"[^{}]*(?:\{\w+\}[^{}]*)+")

_USUAL = "{pci}"


def _pattern(given: str) -> str:
    if len(given) > MAX_PATTERN or _NESTED.search(given):
        raise ValueError
    try:
        is_fine = re.compile(given).groups > 0
    except (re.error, OverflowError, RecursionError):
        is_fine = False
    if not is_fine:
        raise ValueError
    return given


@dataclass(frozen=True, slots=True)
class GpuNames(Section):
    """What a device plugin that the agent does not know calls its GPUs."""

    resource: Annotated[str, matching("domain/name, such as example.com/npu; * stands for anything", _RESOURCE)]
    """The resource of the GPUs; * stands for anything"""
    pattern: Annotated[
        str,
        string(
            "a regular expression with named groups, such as npu-(?P<pci>.+), of at most"
            f" {MAX_PATTERN} characters, without a repetition in a repeated group",
            _pattern,
        ),
    ]
    """Regular expression of a whole device ID, with named groups"""
    gpu: Annotated[str, matching("text with groups of the pattern in braces, such as accel{number}", _GPU)] = _USUAL
    """PCI address, or name of the driver (card0, accel3), made of the groups"""

    def contradictions(self) -> Iterator[Refusal]:
        unknown = sorted(fields(self.gpu) - set(re.compile(self.pattern).groupindex))
        if unknown and self.pattern:
            where, other = (
                ("pattern", "gpu") if self.gpu == GpuNames.__dataclass_fields__["gpu"].default else ("gpu", "pattern")
            )
            yield Refusal((where,), f"has no group {unknown[0]}: name it (?P<{unknown[0]}>…)", (other,))

    def value(self) -> GpuIds:
        return GpuIds(self.resource, self.pattern, self.gpu)


def _values(given: tuple[GpuNames, ...]) -> tuple[GpuIds, ...]:
    return tuple(each.value() for each in given)


@dataclass(frozen=True, slots=True)
class Placement(Section):
    """What placement is to know besides what it finds out."""

    gpu_ids: Annotated[tuple[GpuIds, ...], Through(Many[GpuNames], _values)] = ()
    """Device IDs of GPU plugins that the agent does not know"""
    topology_file: Annotated[Path | None, FOLDER] = None
    """NCCL's topology file, for hosts whose PCI tree shows NUMA nodes only"""
