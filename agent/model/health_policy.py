"""How facts about devices become health: what counts of them, and for how long it must last. Pure; time is passed in.

A flap is not an outage. Reasons that come and go by nature (`Tempo.SETTLED`) count when they have lasted for
`down_seconds`, and are over when the device has been well for `up_seconds` on end. A fault that comes again before
that goes on counting from where it first began, so a link that flaps without end is an outage.
All other reasons count at once, both ways.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from agent.model.device import Gpu
from agent.model.gpu_health import judge_gpu
from agent.model.health import HEALTHY, Health, Tempo, tempo_of


@dataclass(frozen=True, slots=True)
class Patience:
    """How long things must last, in seconds."""

    down_seconds: float = 0.0
    up_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Course:
    """What is known of one device's health over time."""

    shown: Health
    """What counts."""
    raw: Health
    """What was true at the last look."""
    raw_since: float
    """When `raw` became healthy or unhealthy."""
    failing_since: float | None = None
    """When the fault began that does not count yet. Short good times within do not end it."""

    def due(self, patience: Patience) -> float | None:
        """Tell when time alone changes what counts; None if it does not."""
        if self.raw.healthy == self.shown.healthy:
            return None
        if self.raw.healthy:
            return self.raw_since + patience.up_seconds
        return (self.raw_since if self.failing_since is None else self.failing_since) + patience.down_seconds


def begun(raw: Health, now: float) -> Course:
    """Start with a device that was never seen before: what is true counts."""
    return Course(raw, raw, now)


def step(course: Course, raw: Health, now: float, patience: Patience) -> Course:
    """Take a look into account."""
    if raw.healthy != course.raw.healthy:
        if course.raw.healthy and now >= course.raw_since + patience.up_seconds:
            course = replace(course, failing_since=None)  # well for so long, though nobody looked meanwhile
        course = replace(course, raw_since=now)
    course = replace(course, raw=raw)
    return _failing(course, now, patience) if not raw.healthy else _well(course, now, patience)


def _failing(course: Course, now: float, patience: Patience) -> Course:
    if not course.shown.healthy or tempo_of(course.raw.reason) is Tempo.AT_ONCE:
        return replace(course, shown=course.raw, failing_since=None)
    since = course.raw_since if course.failing_since is None else course.failing_since
    if now >= since + patience.down_seconds:
        return replace(course, shown=course.raw, failing_since=None)
    return replace(course, failing_since=since)


def _well(course: Course, now: float, patience: Patience) -> Course:
    lasted = now >= course.raw_since + patience.up_seconds
    if course.shown.healthy:
        return replace(course, failing_since=None) if lasted else course
    if lasted or tempo_of(course.shown.reason) is Tempo.AT_ONCE:
        return replace(course, shown=HEALTHY, failing_since=None)
    return course


def as_it_is(subject: str, raw: Health) -> Health:
    """Let what is true now count at once."""
    return raw


def as_it_reads(gpu: Gpu, mig_uuid: str) -> Health:
    """Judge a GPU by its last reading, and by no event."""
    return judge_gpu(gpu, mig_uuid=mig_uuid)


@dataclass(frozen=True, slots=True)
class HealthPolicy:
    """How facts become health. The defaults take them as they are."""

    lasting: Callable[[str, Health], Health] = as_it_is
    """Subject (a PCI address, with a word behind it for one of several views) and what is true of it → what counts."""
    gpu: Callable[[Gpu, str], Health] = as_it_reads
    """A GPU and the UUID of its MIG slice, empty for all of it → its health."""
    follow_link: bool = True
    """VFs are unhealthy while their PF has no link."""


PLAIN_POLICY = HealthPolicy()
