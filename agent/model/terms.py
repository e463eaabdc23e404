"""On what terms facts about devices become health. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agent.model.device import Gpu
from agent.model.gpu_health import judge_gpu
from agent.model.health import Health


def as_it_is(subject: str, raw: Health) -> Health:
    """Let what is true now count at once."""
    return raw


def as_it_reads(gpu: Gpu, mig_uuid: str) -> Health:
    """Judge a GPU by its last reading, and by no event."""
    return judge_gpu(gpu, mig_uuid=mig_uuid)


@dataclass(frozen=True, slots=True)
class Terms:
    """On what terms facts become health. The defaults take them as they are."""

    lasting: Callable[[str, Health], Health] = as_it_is
    """Subject (a PCI address, with a word behind it for one of several views) and what is true of it → what counts."""
    gpu: Callable[[Gpu, str], Health] = as_it_reads
    """A GPU and the UUID of its MIG slice, empty for all of it → its health."""
    follow_link: bool = True
    """VFs are unhealthy while their PF has no link."""


PLAIN_TERMS = Terms()
