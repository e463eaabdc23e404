"""`HealthHistory`: since when each device has been well or ill, and when to look again.

The lists are made again when the hardware or the books changed. Health may change without either: when a
link has been down for long enough, or up, when a GPU's error is over, when the driver reports one.
For these the book says when the next look is due, and wakes whoever makes the lists.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from agent.config import HealthSettings
from agent.model.device_health import (
    NO_TROUBLES,
    Course,
    GpuEvent,
    HealthPolicy,
    Patience,
    begun,
    judge_gpu,
    next_recovery,
    step,
)
from agent.model.health import Health, Reason
from agent.state import Latest


class HealthHistory:
    """The course of every device's health. Any thread may call; nothing blocks for long."""

    def __init__(self, settings: HealthSettings | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._guard = threading.Lock()
        self.settings = Latest(settings or HealthSettings())
        """How patient it is."""
        self.unavailable: Latest[Reason | None] = Latest(None)
        """Why no unit at all may be handed out; None if that is so of none."""
        self.renumbered: Latest[frozenset[tuple[str, str]]] = Latest(frozenset())
        """Units (resource name, ID) whose containers kubelet would give another's device."""
        self._courses: dict[str, tuple[int, Course]] = {}
        """Subject → number of the look that saw it last, and its course."""
        self.asked = 0
        """How often something asked for a look: without that, and before one is due, another would see the same."""
        self._look = 0
        self._looked_at = 0.0
        self._troubles = NO_TROUBLES
        self._listeners: list[Callable[[], None]] = []
        for cell in (self.settings, self.unavailable, self.renumbered):
            cell.subscribe(self._ask_for_a_look)

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call, on some thread, when a look should be taken at once."""
        self._listeners.append(listener)

    def gpu_event(self, event: GpuEvent) -> None:
        """Take in an error that a GPU's driver reported."""
        policy = self.settings.value.gpu_policy
        with self._guard:
            # An error may come hundreds of times a second, and a look takes long on a large node.
            is_news = self._troubles.is_news(event, self._looked_at, policy)
            self._troubles = self._troubles.noted(event, policy)
        if is_news:
            self._ask_for_a_look()

    def policy(self) -> HealthPolicy:
        """Begin a look: how facts of this moment become health."""
        now = self._clock()
        with self._guard:
            # What two looks did not ask about is gone, or something graver hides it.
            self._courses = {s: known for s, known in self._courses.items() if known[0] >= self._look - 1}
            self._look += 1
            self._looked_at = now
        seen: dict[str, tuple[Health, Health]] = {}

        def lasting(subject: str, raw: Health) -> Health:
            known = seen.get(subject)  # all VFs of a PF ask about the same link
            if known is None or known[0] is not raw:
                known = seen[subject] = raw, self.judge(subject, raw, now)
            return known[1]

        return HealthPolicy(
            lasting=lasting,
            gpu=lambda gpu, mig: judge_gpu(gpu, self._troubles, now, self.settings.value.gpu_policy, mig),
            follow_link=self.settings.value.link == "follow",
        )

    def judge(self, subject: str, raw: Health, now: float) -> Health:
        """Return the health that counts, given the present one."""
        with self._guard:
            known = self._courses.get(subject)
            course = begun(raw, now) if known is None else step(known[1], raw, now, self._patience)
            self._courses[subject] = self._look, course
        return course.shown

    def due(self) -> float | None:
        """Return when the next look is due though nothing else happens, on the clock; None if never."""
        with self._guard:
            dues = [course.due(self._patience) for look, course in self._courses.values() if look == self._look]
            dues.append(next_recovery(self._troubles, self._looked_at, self.settings.value.gpu_policy))
        return min((due for due in dues if due is not None), default=None)

    def seconds_to_look(self) -> float | None:
        """Return in how many seconds the next look is due; None if nothing but an event asks for one."""
        due = self.due()
        return None if due is None else max(0.0, due - self._clock())

    @property
    def _patience(self) -> Patience:
        return Patience(self.settings.value.down_seconds, self.settings.value.up_seconds)

    def _ask_for_a_look(self) -> None:
        with self._guard:
            self.asked += 1
        for listener in self._listeners:
            listener()
