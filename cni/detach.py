"""DEL, and the way back after anything: a failed ADD, a crash, a lost DEL, a reboot.

DEL turns the rows into *detaching*, which is the promise, and lets the move back and the return of
leases run on a thread of its own: the pod's namespace stays alive as long as its descriptor is held
here, and after a crash the row is found again. So no runtime waits for a slow driver, and a device is
never handed on before it is verifiably back.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from agent import device_info
from agent.errors import AgentError, DeviceBusy
from agent.hardware import netns as namespaces
from agent.hardware.host import Host
from agent.ledger import Ledger
from agent.model.allocation import Attachment, AttachmentState, NetnsId
from agent.model.device import Snapshot
from cni import foreign_lock
from cni.ailment import REBOOTED, RowFacts, ailment
from cni.beside import Beside
from cni.call import BEGUN, Call, with_path
from cni.finding import NOBODY, UNKNOWN
from cni.leases import LeaseBook, goes_first
from cni.locks import DeviceLocks
from cni.modes.choice import mode_of
from cni.underway import Underway

NOWHERE = NetnsId(0, 0)
"""A namespace that is gone, or that nobody can name: then the device tells, see `cni.ailment`."""
HEAL_SECONDS = 60.0
"""How long healing waits for a device: at a start nobody is served before, and a driver may hang in the kernel."""
OTHERS_SECONDS = 1.0
"""And for each other one while one has taken longer: it may wait for the same."""
PodKnown = Callable[[Attachment], bool | None]
Tell = Callable[[str, str], None]
"""Takes a device, and what somebody should know of it."""

log = logging.getLogger(__name__)


def _nobody_to_ask(row: Attachment) -> bool | None:
    return None


def tell_nobody(device: str, text: str) -> None:
    """Leave it at the log."""


class Detaching:
    """Brings devices back. Methods block and may run on many threads at once."""

    def __init__(
        self,
        host: Host,
        ledger: Ledger,
        snapshot: Callable[[], Snapshot],
        locks: DeviceLocks,
        tell_lost: Tell = tell_nobody,
        heal_seconds: float = HEAL_SECONDS,
    ) -> None:
        """`tell_lost` is told what the host does not take back with a device, such as a route.

        `heal_seconds` is how long `heal` waits for a device to be back.
        """
        self._heal_seconds = heal_seconds
        self._tell_lost = tell_lost
        self._host = host
        self._ledger = ledger
        self._snapshot = snapshot
        self._locks = locks
        self.leases = LeaseBook(ledger)
        self.underway = Underway()
        self._guard = threading.Lock()
        self._leaving: dict[int, _Leaving] = {}
        self._overdue: set[int] = set()

    def close(self, seconds: float = 1.0) -> None:
        """Wait a bounded time for devices on their way back; the rest is found at the next start."""
        deadline = time.monotonic() + seconds
        with self._guard:
            leaving = list(self._leaving.values())
        for one in leaving:
            one.thread.join(max(0.0, deadline - time.monotonic()))
        self.leases.close()

    def is_leaving(self, row: Attachment) -> bool:
        """Tell whether a thread is bringing this row's device back at the moment."""
        return row.attachment_id in self._leaving

    def delete(self, call: Call) -> None:
        """Promise to detach what this container and interface own. Nothing owned is success."""
        self.underway.overtake(call.container_id, call.ifname)
        rows = self._ledger.attachments_of(call.container_id, call.ifname)
        if rows:
            self._ledger.begin_detach([row.attachment_id for row in rows])
            for row in rows:
                self.start_detach(foreign_lock.completed(with_path(row, call), call), call.netns)
        elif self._is_strange(call):
            log.info(
                "container %s is in no books: its addresses of %s are to be given back", call.container_id, call.ifname
            )
            self.leases.give_back_unbooked(call)
        self.underway.remember(call.container_id, call.ifname)

    def is_out_of_date(self, call: Call) -> bool:
        """Tell whether a DEL lay on disk while an ADD brought the same interface in anew: then it is not about that.

        Raises DeviceBusy while such an ADD is under way. Of a clock that was set back between an ADD and its DEL the
        reconciler makes amends, once the pod's namespace is gone.
        """
        if call.spooled_at is None:
            return False
        of = call.container_id, call.ifname
        is_later = self.underway.later_add(*of, call.spooled_at)
        if is_later is None:
            raise DeviceBusy(f"an ADD of {call.container_id} {call.ifname} is under way that is later than this DEL")
        rows = self._ledger.attachments_of(*of)
        if not is_later and not any(row.request.get(BEGUN, 0.0) > call.spooled_at for row in rows):
            return False
        log.info("a DEL of container %s came before its interface %s was attached anew, and is let be", *of)
        return True

    def _is_strange(self, call: Call) -> bool:
        """Tell whether a call without a row may be about addresses that no row and no owed lease stands for.

        The addresses of a chained call belong to interfaces that only rows name; by the call's own name
        the cluster's network may have leased.
        """
        conf = call.conf
        return (
            conf.ipam is not None
            and (conf.device is not None or conf.master is not None or conf.pf != ())
            and not self.underway.has_called(call.container_id, call.ifname)
            and not self._ledger.has_interface(call.container_id, call.ifname)
        )

    def start_detach(self, row: Attachment, netns: int | None) -> None:
        """Bring a *detaching* row's device back on a thread of its own."""
        held = os.dup(netns) if netns is not None else None

        def leave() -> None:
            try:
                with self._locks.hold([row.device]):
                    current = self._ledger.attachment_on(row.device)
                    if current is not None and current.attachment_id == row.attachment_id:
                        self.undo(row, held)
            except (AgentError, OSError) as error:
                log.error("%s is not back yet: %s", row.device, error)
            finally:
                if held is not None:
                    os.close(held)
                self._has_left(row)

        try:
            is_new = self._start(row, threading.Thread(target=leave, name="detach", daemon=True))
        except RuntimeError as error:  # no more threads: the promise is kept by `heal`
            log.error("%s is not back yet: %s", row.device, error)
            is_new = False
        if not is_new and held is not None:
            os.close(held)

    def _start(self, row: Attachment, thread: threading.Thread) -> bool:
        """Have a thread bring a device back, if none does, and note it: whoever finds it there may wait for it."""
        with self._guard:
            if row.attachment_id in self._leaving:
                return False  # a repeated DEL
            thread.start()
            self._leaving[row.attachment_id] = _Leaving(thread, time.monotonic())
            return True

    def await_detached(self, rows: Iterable[Attachment], seconds: float) -> tuple[Attachment, ...]:
        """Wait a bounded time for devices on their way back. Return the rows of those that are not back."""
        deadline = time.monotonic() + seconds
        for row in (rows := tuple(rows)):
            leaving = self._leaving.get(row.attachment_id)
            if leaving is not None:
                leaving.thread.join(max(0.0, deadline - time.monotonic()))
        left = {row.attachment_id for row in self._ledger.attachments()}
        return tuple(row for row in rows if row.attachment_id in left)

    def undo(self, row: Attachment, netns: int | None = None, *, leases_later: bool = False) -> None:
        """Bring the device back, return its leases, drop the row. Repeatable after any crash.

        Without a descriptor the namespace is looked for at its path. The caller holds the device's
        lock. `leases_later` leaves the leases to `leases.settle`. Raises AgentError if the device is
        not verifiably back; the row then stays, and the device is in quarantine.
        """
        with foreign_lock.held(row):
            this_boot = row.boot_id == self._ledger.boot_id
            was_first = this_boot and goes_first(row)
            returned = was_first and self.leases.give_back(row)
            if this_boot:
                try:
                    with _open_netns(row, netns) as opened:
                        lost = mode_of(row).leave(self._host, self._snapshot(), row, opened)
                except AgentError as error:
                    self._ledger.quarantine(row.device, f"clean-up failed: {error}")
                    raise
                for what in lost:
                    log.error("%s is back, but the host does not take back what it had there: %s", row.device, what)
                    self._tell_lost(row.device, f"not put back: {what}")
            later = leases_later or was_first
            owed = row.request["network"] is not None and not returned and (later or not self.leases.give_back(row))
            foreign_lock.forget(row)
            if (info := row.request.get("device_info_file")) is not None:
                device_info.remove_attached(info, row.device)
            self._ledger.finish_detach(row, lease_owed=owed)

    def heal(self, device: str, pod_known: PodKnown = _nobody_to_ask) -> str | None:
        """Finish what a crash, a lost DEL or a reboot left of an attachment.

        `pod_known` tells whether kubelet or the runtime know a row's pod; None if they cannot be asked.
        Returns one word that says what was wrong, or None if all is well or somebody is at it.
        Raises AgentError if the device is still not back. One that takes too long is in quarantine until it is.
        """
        with ExitStack() as held:
            try:
                held.enter_context(self._locks.hold([device], seconds=0.2))
            except DeviceBusy:
                self._withhold_overdue(device)
                return None
            row = self._ledger.attachment_on(device)
            if row is None or row.attachment_id in self._leaving:
                return None
            reason = ailment(self._facts(row, pod_known))
            if reason is None:
                return None
            log.warning("healing %s of container %s: %s", device, row.owner.container_id, reason)
            self._ledger.begin_detach([row.attachment_id])
            # After a reboot there may be many, the start waits for all, and plugins may hang. At other
            # times the relay may ask again for the same container, which must not meet its old lease.
            self._put_back_beside(row, held.pop_all(), leases_later=reason == REBOOTED)
            return reason

    def _put_back_beside(self, row: Attachment, lock: ExitStack, *, leases_later: bool) -> None:
        """Undo a row on a thread of its own, which lets go of the device's lock, and wait for it, but not for ever."""

        def work() -> None:
            try:
                with lock:
                    self.undo(row, leases_later=leases_later)
            finally:
                self._has_left(row)

        thread = Beside(f"healing {row.device}", work)
        seconds = min(self._heal_seconds, OTHERS_SECONDS) if self._overdue else self._heal_seconds
        try:
            is_new = self._start(row, thread)
        except RuntimeError as error:  # no more threads
            log.error("%s is awaited however long it takes: %s", row.device, error)
            work()
            return
        if not is_new:
            lock.close()  # which a DEL waits for that has come just now
        elif not thread.is_over(seconds):
            self._withhold(row, seconds)

    def _has_left(self, row: Attachment) -> None:
        with self._guard:
            self._leaving.pop(row.attachment_id, None)
            self._overdue.discard(row.attachment_id)

    def _withhold_overdue(self, device: str) -> None:
        """Withhold a device that a DEL has been bringing back for too long."""
        row = self._ledger.attachment_on(device)
        leaving = self._leaving.get(row.attachment_id) if row is not None else None
        if row is None or leaving is None or row.attachment_id in self._overdue:
            return
        if time.monotonic() > leaving.since + self._heal_seconds:
            self._withhold(row, self._heal_seconds)

    def _withhold(self, row: Attachment, seconds: float) -> None:
        why = f"is not back after {seconds:g} s: its driver may hang, look at dmesg"
        with self._guard:
            if row.attachment_id in self._leaving:
                self._overdue.add(row.attachment_id)
        self._ledger.quarantine(row.device, f"it {why}")
        current = self._ledger.attachment_on(row.device)
        if current is None or current.attachment_id != row.attachment_id:  # just now
            self._ledger.end_quarantine(row.device)
        raise DeviceBusy(f"{row.device} {why}")

    def _facts(self, row: Attachment, pod_known: PodKnown) -> RowFacts:
        """Look at what a row is about. The caller holds the device's lock, so no ADD is under way."""
        this_boot = row.boot_id == self._ledger.boot_id
        namespace_lives = this_boot and namespaces.is_at(row.owner.netns, row.netns_path)
        stands = this_boot and row.state is AttachmentState.ATTACHED
        look, nobodys = stands and not namespace_lives, stands and namespace_lives and is_nobodys(row)
        away = (look or nobodys) and mode_of(row).away(self._host, row)
        return RowFacts(
            this_boot=this_boot,
            state=row.state,
            namespace_lives=namespace_lives,
            away=look and away,
            tells=bool(row.undo.netdev) or row.undo.mode == "vfio",  # whose `away` looks at the path
            pod_known=pod_known(row) if look else None,
            is_orphan=nobodys and not away,
        )

    def owner_alive(self, row: Attachment) -> bool:
        """Tell whether an attachment's pod may still use the device.

        The namespace at its path decides. Where that path cannot be seen, a device that is not back
        in the host still sits in a namespace that lives, and is left alone.
        """
        return ailment(self._facts(replace(row, state=AttachmentState.ATTACHED), _nobody_to_ask)) is None


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A device on its way back."""

    thread: threading.Thread
    since: float
    """As time.monotonic tells."""


def is_nobodys(row: Attachment) -> bool:
    """Tell whether a device was found in a namespace, and neither container nor pod is known to have it there."""
    return row.owner.container_id == UNKNOWN and row.owner.pod == NOBODY and bool(row.undo.netdev)


@contextmanager
def _open_netns(row: Attachment, netns: int | None) -> Iterator[int | None]:
    """Yield a descriptor of the row's namespace: the one given, or the one at its path, if it is it.

    An adopted row may know none: then the one given is believed, for the device shows whether it is there.
    """
    if netns is not None and row.owner.netns in (NOWHERE, namespaces.identity(netns)):
        yield netns
        return
    if not namespaces.is_at(row.owner.netns, row.netns_path):
        yield None
        return
    try:
        opened = os.open(row.netns_path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # just now
        yield None
        return
    try:
        yield opened if namespaces.identity(opened) == row.owner.netns else None
    finally:
        os.close(opened)
