"""DEL, and the way back after anything.

DEL turns the rows into *detaching*, which is the promise, and lets the move back and the return of
leases run on a thread of its own: the pod's namespace stays alive as long as its descriptor is held
here, and after a crash the row is found again, by `cni.heal`. So no runtime waits for a slow driver, and a device is
never handed on before it is verifiably back.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager

from agent.edits import device_info
from agent.errors import AgentError, DeviceBusy, Unavailable
from agent.hardware import netns as namespaces
from agent.model.allocation import Attachment, NetnsId, Withheld
from agent.process.interpreter import Background
from cni.call import BEGUN, Call, InFlight, Node
from cni.ipam.leases import LeaseBook, goes_first
from cni.migrate import adopted_rows
from cni.modes.choice import mode_of

NOWHERE = NetnsId(0, 0)
"""A namespace that is gone, or that nobody can name: then the device tells, see `cni.heal`."""

log = logging.getLogger(__name__)


class Leaving:
    """Devices on their way back, each on a thread of its own. Safe for many threads."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._background = Background("detach")
        self._under_way: dict[int, tuple[Future[None], float]] = {}
        """Row → the work that brings its device back, and since when, as time.monotonic tells."""
        self._overdue: set[int] = set()

    def start(self, row: Attachment, work: Callable[[], None]) -> Future[None] | None:
        """Bring a device back by `work`, and note it: whoever finds it there may wait for it.

        Returns None if that is under way already. Raises Unavailable if no thread can be started.
        """
        done: Future[None] = Future()

        def run() -> None:
            try:
                try:
                    work()
                finally:
                    self._end(row)
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        with self._guard:
            if row.attachment_id in self._under_way:
                return None  # a repeated DEL
            try:
                self._background.start(run)
            except RuntimeError as error:
                raise Unavailable(f"{row.device} is brought back later: {error}") from error
            self._under_way[row.attachment_id] = done, time.monotonic()
            return done

    def _end(self, row: Attachment) -> None:
        with self._guard:
            del self._under_way[row.attachment_id]
            self._overdue.discard(row.attachment_id)

    def __contains__(self, row: Attachment) -> bool:
        return row.attachment_id in self._under_way

    def wait_for_all(self, seconds: float) -> bool:
        """Wait so long for the end of all. Returns whether all have ended."""
        with self._guard:
            found = [done for done, _ in self._under_way.values()]
        return not wait(found, seconds).not_done

    def since(self, row: Attachment) -> float | None:
        """Return since when a row's device has been on its way; None if it is not, or is known to take too long."""
        with self._guard:
            found = self._under_way.get(row.attachment_id)
            return found[1] if found is not None and row.attachment_id not in self._overdue else None

    def note_overdue(self, row: Attachment) -> None:
        """Note that a row's device takes too long."""
        with self._guard:
            if row.attachment_id in self._under_way:
                self._overdue.add(row.attachment_id)

    @property
    def has_overdue(self) -> bool:
        """Whether one of them takes too long."""
        return bool(self._overdue)


class Detacher:
    """Brings devices back. Methods block and may run on many threads at once."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.leases = LeaseBook(node.ledger)
        self.in_flight = InFlight()
        self.leaving = Leaving()

    def close(self, seconds: float = 1.0) -> bool:
        """Wait a bounded time for devices on their way back; the rest is found at the next start.

        Returns whether all are back.
        """
        are_back = self.leaving.wait_for_all(seconds)
        self.leases.close()
        return are_back

    def delete(self, call: Call) -> None:
        """Promise to detach what this container and interface own. Nothing owned is success."""
        self.in_flight.overtake(call.container_id, call.ifname)
        self.leases.look_in(call.cni_path)
        rows = self._node.ledger.attachments_of(call.container_id, call.ifname)
        if rows:
            self._node.ledger.begin_detach([row.attachment_id for row in rows])
            for row in rows:
                self.start_detach(adopted_rows.completed(row, call), call.netns)
        elif self._is_strange(call):
            log.info(
                "container %s is in no books: its addresses of %s are to be given back", call.container_id, call.ifname
            )
            self.leases.give_back_unbooked(call)
        self.in_flight.remember(call.container_id, call.ifname)

    def is_out_of_date(self, call: Call) -> bool:
        """Return whether a DEL lay on disk while an ADD brought the same interface in again: then it is not about that.

        Raises DeviceBusy while such an ADD is in flight. Of a clock that was set back between an ADD and its DEL the
        reconciler makes amends, once the pod's namespace is gone.
        """
        if call.spooled_at is None:
            return False
        of = call.container_id, call.ifname
        if self.in_flight.has_add_since(*of, call.spooled_at):
            raise DeviceBusy(f"an ADD of {call.container_id} {call.ifname} is under way that is later than this DEL")
        rows = self._node.ledger.attachments_of(*of)
        if not any(row.request.get(BEGUN, 0.0) > call.spooled_at for row in rows):
            return False
        log.info("a DEL of container %s came before its interface %s was attached again, and is ignored", *of)
        return True

    def _is_strange(self, call: Call) -> bool:
        """Return whether a call without a row may be about addresses that no row and no owed lease stands for.

        The addresses of a chained call belong to interfaces that only rows name; by the call's own name
        the cluster's network may have leased.
        """
        conf = call.conf
        return (
            conf.ipam is not None
            and (conf.device is not None or conf.master is not None or conf.pf != ())
            and not self.in_flight.has_called(call.container_id, call.ifname)
            and not self._node.ledger.has_interface(call.container_id, call.ifname)
        )

    def start_detach(self, row: Attachment, netns: int | None) -> None:
        """Bring a *detaching* row's device back on a thread of its own."""
        held = os.dup(netns) if netns is not None else None

        def leave() -> None:
            try:
                with self._node.locks.hold([row.device]):
                    current = self._node.ledger.attachment_on(row.device)
                    if current is not None and current.attachment_id == row.attachment_id:
                        self.undo(row, held)
            except (AgentError, OSError) as error:
                log.error("%s is not back yet: %s", row.device, error)
            except Exception:
                log.exception("%s is not back yet", row.device)
            finally:
                if held is not None:
                    os.close(held)

        with ExitStack() as unless_started:
            if held is not None:
                unless_started.callback(os.close, held)  # or its namespace would keep the device
            if self.leaving.start(row, leave) is not None:
                unless_started.pop_all()

    def undo(self, row: Attachment, netns: int | None = None, *, leases_later: bool = False) -> None:
        """Bring the device back, return its leases, drop the row. Repeatable after any crash.

        Without a descriptor the namespace is looked for at its path. The caller holds the device's
        lock. `leases_later` leaves the leases to `leases.settle`. Raises AgentError if the device is
        not verifiably back; the row then stays, and the device is in quarantine.
        """
        with adopted_rows.held(row):
            this_boot = row.boot_id == self._node.ledger.boot_id
            was_first = this_boot and goes_first(row)
            returned = was_first and self.leases.give_back(row)
            if this_boot:
                try:
                    with _open_netns(row, netns) as opened:
                        lost = mode_of(row).leave(self._node.host, row, opened)
                except AgentError as error:
                    self._node.ledger.quarantine(row.device, Withheld.CLEAN_UP_FAILED.because(error))
                    raise
                for what in lost:
                    log.error("%s is back, but the host does not take back what it had there: %s", row.device, what)
                    self._node.observer.not_put_back(row.device, what)
            owed = not returned and not self.leases.give_back(row, later=leases_later or was_first)
            adopted_rows.forget(row)
            if (info := row.request.get("device_info_file")) is not None:
                device_info.remove_attached(info, row.device)
            self._node.ledger.finish_detach(row, lease_owed=owed)


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
