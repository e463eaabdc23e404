"""Healing: finish what a crash, a lost DEL or a reboot left of an attachment.

A driver may hang in the kernel. So a device comes back on a thread of its own, and whoever heals goes on in time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

from agent.errors import DeviceBusy
from agent.model.allocation import Attachment
from cni.condition import REBOOTED, PodKnown, condition, look, nobody_to_ask
from cni.detach import Detacher
from cni.node import Node

HEAL_SECONDS = 60.0
"""How long healing waits for a device: at a start nobody is served before, and a driver may hang in the kernel."""
OTHERS_SECONDS = 1.0
"""And for each other one while one has taken longer: it may wait for the same."""

log = logging.getLogger(__name__)


class Healer:
    """Looks at rows, and brings back what nobody has any more. Methods block, and may run on many threads at once."""

    def __init__(self, node: Node, detacher: Detacher, seconds: float = HEAL_SECONDS) -> None:
        """`seconds` is how long `heal` waits for a device to be back."""
        self._node = node
        self._detacher = detacher
        self._seconds = seconds

    def heal(self, device: str, pod_known: PodKnown = nobody_to_ask) -> str | None:
        """Finish what a crash, a lost DEL or a reboot left of an attachment.

        `pod_known` tells whether kubelet or the runtime know a row's pod; None if they cannot be asked.
        Returns one word that says what was wrong, or None if all is well or somebody is at it.
        Raises AgentError if the device is still not back. One that takes too long is in quarantine until it is.
        """
        with ExitStack() as held:
            try:
                held.enter_context(self._node.locks.hold([device], seconds=0.2))
            except DeviceBusy:
                self._withhold_overdue(device)
                return None
            row = self._node.ledger.attachment_on(device)
            if row is None or row in self._detacher.leaving:
                return None
            reason = condition(look(self._node, row, pod_known))
            if reason is None:
                return None
            log.warning("healing %s of container %s: %s", device, row.owner.container_id, reason)
            self._node.ledger.begin_detach([row.attachment_id])
            # After a reboot there may be many, the start waits for all, and plugins may hang. At other
            # times the relay may ask again for the same container, which must not meet its old lease.
            self._put_back_in_background(row, held.pop_all(), leases_later=reason == REBOOTED)
            return reason

    def _put_back_in_background(self, row: Attachment, lock: ExitStack, *, leases_later: bool) -> None:
        """Undo a row on a thread of its own, which lets go of the device's lock, and wait for it, but not for ever."""

        def work() -> None:
            try:
                with lock:
                    self._detacher.undo(row, leases_later=leases_later)
            finally:
                self._detacher.leaving.end(row)

        thread = Background(f"healing {row.device}", work)
        seconds = min(self._seconds, OTHERS_SECONDS) if self._detacher.leaving.has_overdue else self._seconds
        with ExitStack() as unless_started:
            unless_started.enter_context(lock)  # which a DEL waits for that has come just now
            if not self._detacher.leaving.start(row, thread):
                return
            unless_started.pop_all()
        if not thread.is_over(seconds):
            self._withhold(row, seconds)

    def _withhold_overdue(self, device: str) -> None:
        """Withhold a device that a DEL has been bringing back for too long."""
        row = self._node.ledger.attachment_on(device)
        since = self._detacher.leaving.since(row) if row is not None else None
        if row is not None and since is not None and time.monotonic() > since + self._seconds:
            self._withhold(row, self._seconds)

    def _withhold(self, row: Attachment, seconds: float) -> None:
        why = f"is not back after {seconds:g} s: its driver may hang, look at dmesg"
        self._detacher.leaving.note_overdue(row)
        self._node.ledger.quarantine(row.device, f"it {why}")
        current = self._node.ledger.attachment_on(row.device)
        if current is None or current.attachment_id != row.attachment_id:  # just now
            self._node.ledger.end_quarantine(row.device)
        raise DeviceBusy(f"{row.device} {why}")


class Background(threading.Thread):
    """Work whose end is awaited for a bounded time: a write to sysfs that hangs in the kernel cannot be ended.

    It ends with the process, whatever it waits for.
    """

    def __init__(self, what: str, work: Callable[[], None]) -> None:
        """`what` is for the log, where nobody waits any more for what `work` raises."""
        super().__init__(name="healing", daemon=True)
        self._what = what
        self._work = work
        self._error: BaseException | None = None
        self._guard = threading.Lock()
        self._is_over = self._is_late = False

    def run(self) -> None:
        """Do the work."""
        error: BaseException | None = None
        try:
            self._work()
        except BaseException as caught:
            error = caught
        with self._guard:
            self._error, self._is_over = error, True
            is_late = self._is_late
        if is_late and error is None:
            log.warning("%s is done at last", self._what)
        elif is_late:
            log.error("%s has failed at last: %s", self._what, error)

    def is_over(self, seconds: float) -> bool:
        """Wait so long for the end. Raises what the work has raised."""
        self.join(seconds)
        with self._guard:
            self._is_late = not self._is_over
        if self._error is not None:
            raise self._error
        return not self._is_late
