"""`GpuMonitor`: the newest reading of the GPUs, taken on a thread that may hang without anybody waiting.

A call into the driver can hang for good (a GPU off the bus, a driver that deadlocks), and nothing can
take it back. So readings are taken on one thread of their own, events are waited for on another, a third
notices when a reading takes too long; and who asks gets the last reading at once.
Readings come on a timer, and soon after an event of the driver or of the PCI bus: not with each scan
of the node, of which every pod causes some.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from agent.hardware.nvml.library import Nvml, Reading, is_installed
from agent.model.change import GPUS, OnEvent
from agent.model.device import Gpu, Problem
from agent.model.device_health import GpuEvent, slice_of

if TYPE_CHECKING:
    import pynvml


log = logging.getLogger(__name__)

WAIT_MILLISECONDS = 500
"""How long one wait for events may take: as long takes the end of the agent, and letting go of the library."""
RETRY_SECONDS = 1.0
"""Between tries to follow events."""
END_SECONDS = 1.0
"""How long the end of the agent waits for a thread. One that hangs is left behind."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds between and for readings."""

    quick: float = 5.0
    """Between readings of what may change at any time: lost, memory errors, heat, slices."""
    slow: float = 60.0
    """Between readings of all, and between looks for a driver that is not there."""
    first: float = 1.0
    """How long a scan waits for the very first reading."""
    overdue: float = 5.0
    """When a reading counts as hung."""
    settle: float = 0.05
    """Between an event and the reading: events come in bursts."""
    apart: float = 1.0
    """Between readings because of events, however many come: a program that fails may cause hundreds a second."""
    let_go: float = 2.0
    """How long a new session waits for the end of the last one's events."""
    absent: float = 10.0
    """Between looks for the library, on a node without."""


DEFAULT_TIMES = Times()


@dataclass(frozen=True)
class GpuWatch:
    """Somebody follows the errors."""

    monitor: GpuMonitor

    @property
    def unheard(self) -> Sequence[str]:
        """Why errors of some GPUs, or of all, are not heard."""
        return self.monitor.unheard

    def close(self) -> None:
        """Follow them no more."""
        self.monitor.unfollow()


class GpuMonitor:
    """The GPUs of this node. `latest` and `pci_event` may be called from any thread and never hang."""

    def __init__(
        self,
        times: Times = DEFAULT_TIMES,
        clock: Callable[[], float] = time.monotonic,
        reader: Nvml | None = None,
        is_installed: Callable[[], bool] = is_installed,
    ) -> None:
        self._times = times
        self._clock = clock
        self._nvml = reader or Nvml()
        self._is_installed = is_installed
        self._lock = threading.Lock()
        self._asked = threading.Event()
        self._ending = threading.Event()
        self._turn = threading.Condition()
        """Of sessions, and of the end."""
        self._read_once = threading.Event()
        self.let_go = threading.Event()
        """Set while the library is not in use for events."""
        self.let_go.set()
        self.watching = 0
        """Of how many GPUs the driver's events are watched now."""
        self.unheard: Sequence[str] = ()
        """Why errors of some GPUs, or of all, are not heard."""
        self._reading = Reading()
        self._began: float | None = None
        """When the reading began that is going on."""
        self._waited = False
        self._eager_until = self._paused_until = -math.inf
        self._bound: set[str] = set()
        self._expected: frozenset[str] = frozenset()
        self._slow_asked = False
        self._threads: list[threading.Thread] = []
        self._looked_at: float | None = None
        self._on_change: OnEvent | None = None
        self._on_event: Callable[[GpuEvent], None] | None = None

    @property
    def session(self) -> int:
        """Number of the session with the driver."""
        return self._nvml.session

    def latest(self) -> Reading:
        """Return the newest reading. Only the first call waits for one, a bounded time."""
        if not self._started():
            return Reading(unavailable="the NVIDIA driver's library is not on this node")
        if not self._waited:
            self._read_once.wait(self._times.first)
            self._waited = True
        reading = self._reading
        if self._is_paused() or self._is_overdue():
            what = "is let go for a reset" if self._is_paused() else "does not answer"
            text = f"the NVIDIA driver {what}; the GPUs are shown as they were last seen"
            return replace(reading, problems=(*reading.problems, Problem("nvml", text)))
        return reading

    def gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs as last read."""
        return self._reading.gpus

    def follow(self, *, on_change: OnEvent | None = None, on_event: Callable[[GpuEvent], None] | None = None) -> None:
        """Call `on_change(what, GPUS)` when a reading differs from the last, `on_event` at each error of the driver.

        Both are called on threads of the monitor, must neither block nor raise, and may still be called when
        whoever wanted it has ended.
        """
        if on_change is not None:
            self._on_change = on_change
        if on_event is not None:
            self._on_event = on_event

    def unfollow(self) -> None:
        """Tell nobody of errors any more."""
        self._on_event = None

    def pci_event(self, action: str, address: str) -> None:
        """Take note of a uevent of the PCI bus: the driver may have found a GPU anew."""
        with self._lock:
            if not self._threads:
                self._looked_at = None
                return
            if action == "bind":
                self._bound.add(address)
            self._slow_asked = True
            self._eager_until = self._clock() + self._times.slow
        self._asked.set()

    def expect(self, addresses: Collection[str]) -> None:
        """Take note of where the kernel shows GPUs with their driver: the library may be older than one of them."""
        with self._lock:
            before, self._expected = self._expected, frozenset(addresses)
            if self._expected <= before or not self._threads:
                return
            self._slow_asked = True
        self._asked.set()

    def pause(self, seconds: float, addresses: Sequence[str]) -> bool:
        """Let go of the driver for so long, and look then at the GPUs at some PCI addresses as if found anew.

        Tells whether the driver is let go; it is not if it hangs. 0 seconds end a pause.
        """
        with self._lock:
            self._paused_until = self._clock() + seconds
            self._bound.update(addresses)
            self._slow_asked = True
        self._asked.set()
        if not self._threads or not seconds:
            return True
        with self._turn:
            let_go = self._turn.wait_for(self._is_closed, self._times.let_go)
        return let_go and self.let_go.wait(self._times.let_go)

    def disturbed(self) -> None:
        """Read the GPUs soon."""
        self._asked.set()

    def await_session(self, last: int, seconds: float) -> None:
        """Wait for a session other than the last, or for the time to pass, or for the end."""
        with self._turn:
            self._turn.wait_for(partial(self._has_moved_on, last), seconds)

    def close(self) -> None:
        """End the threads, or leave them behind if the driver does not give them back. Closing twice is harmless."""
        if self._ending.is_set():
            return
        self._on_change = self._on_event = None
        self._ending.set()
        self._asked.set()
        with self._turn:
            self._turn.notify_all()
        until = self._clock() + END_SECONDS
        for thread in self._threads:
            thread.join(max(until - self._clock(), 0))

    def _started(self) -> bool:
        with self._lock:
            if self._threads or self._ending.is_set():
                return bool(self._threads)
            now = self._clock()
            if self._looked_at is not None and now - self._looked_at < self._times.absent:
                return False
            self._looked_at = now
            if not self._is_installed():
                return False
            self._threads = [
                threading.Thread(target=self._read_on, name="gpus", daemon=True),
                threading.Thread(target=self._follow_events, name="gpu-events", daemon=True),
                threading.Thread(target=self._look_for_hangs, name="gpu-hangs", daemon=True),
            ]
            for thread in self._threads:
                thread.start()
            return True

    def _read_on(self) -> None:
        slow_at, paused = self._clock(), False
        while not self._ending.is_set():
            self._asked.clear()
            with self._lock:
                pausing = self._is_paused()
                if not pausing:  # what was asked for in a pause is for the reading after it
                    bound, self._bound = tuple(sorted(self._bound)), set()
                    slow, self._slow_asked = self._slow_asked or self._clock() >= slow_at, False
                    expected = self._expected
            if pausing:
                self._nvml.close()
                with self._turn:
                    self._turn.notify_all()
                self._changed("the GPU monitor pauses")
                self._asked.wait(max(self._paused_until - self._clock(), 0.0))
                paused = True
                continue
            if not self._nvml.session:
                # Opened while in use for events, the library would show the GPUs of before. Those may hang, though.
                self.let_go.wait(self._times.let_go)
            self._began = self._clock()
            reading = self._read(slow, bound, expected)
            self._began = None
            if slow:
                slow_at = self._clock() + self._times.slow
            before, self._reading = self._reading, reading
            self._read_once.set()
            with self._turn:
                self._turn.notify_all()
            if reading != before or paused:
                self._changed("GPUs changed")
            paused = False
            ended = self._clock()
            if self._asked.wait(self._pause(reading)):
                self._ending.wait(max(self._times.settle, ended + self._times.apart - self._clock()))
        self._nvml.close()

    def _look_for_hangs(self) -> None:
        """Say once when a reading hangs, and when it no longer does: neither thread that calls the driver could."""
        said = False
        while not self._ending.wait(self._times.overdue / 5):
            hung = self._is_overdue()
            if hung != said:
                said = hung
                if hung:
                    log.error("the NVIDIA driver does not answer: GPUs are kept as last seen")
                self._changed("the GPU monitor hangs" if hung else "the GPU monitor works again")

    def _pause(self, reading: Reading) -> float:
        """Tell how long to wait for the next reading, unless somebody asks for one."""
        if reading.unavailable:
            # A driver that was loaded just now takes its time.
            return self._times.quick if self._clock() < self._eager_until else self._times.slow
        # Without a session, because a GPU failed, the errors of the others are not heard.
        return self._times.quick if self._nvml.session else self._times.settle

    def _read(self, slow: bool, bound: tuple[str, ...], expected: Collection[str]) -> Reading:
        try:
            return self._nvml.read(slow=slow, bound=bound, expected=expected)
        except Exception as error:  # the thread must live on: nobody else would ever look again
            log.exception("the GPUs could not be read")
            text = (
                f"the GPUs could not be read ({type(error).__name__}: {error}); they are shown as they were last seen"
            )
            return Reading(self._reading.gpus, (Problem("nvml", text),))

    def _follow_events(self) -> None:
        while not self._ending.is_set():
            try:
                follow(self, self._tell, self._ending)
            except Exception:
                log.exception("errors of GPUs are watched again")
                self._ending.wait(self._times.quick)

    def _tell(self, event: GpuEvent) -> None:
        listener = self._on_event
        if listener is not None:
            listener(event)

    def _changed(self, what: str) -> None:
        listener = self._on_change
        if listener is not None:
            listener(what, GPUS)

    def _is_closed(self) -> bool:
        return not self.session

    def _has_moved_on(self, last: int) -> bool:
        return self._ending.is_set() or self.session not in (0, last)

    def _is_paused(self) -> bool:
        return self._clock() < self._paused_until

    def _is_overdue(self) -> bool:
        began = self._began
        return began is not None and self._clock() - began > self._times.overdue


def follow(monitor: GpuMonitor, tell: Callable[[GpuEvent], None], ending: threading.Event) -> None:
    """Tell of every event until `ending` is set. Failures of the library are waited out, and said once."""
    said = ""
    while not ending.is_set():
        session = monitor.session
        trouble = ""
        if not session:
            monitor.unheard = ()  # no reading either, and that is told of by the reader
        elif monitor.gpus():
            monitor.let_go.clear()
            try:
                trouble = _follow_session(monitor, session, tell, ending)
            finally:
                monitor.let_go.set()
        if trouble and trouble != said:
            log.warning("errors of GPUs are watched again, because of: %s", trouble)
        if trouble and said:  # and not just once, as when a GPU is lost
            monitor.unheard = (f"errors (XIDs) of GPUs are not told: {trouble}",)
        said = trouble
        if trouble:
            monitor.disturbed()  # GpuIsLost is said without saying which: a reading will tell
            ending.wait(RETRY_SECONDS)
        else:
            monitor.await_session(session, RETRY_SECONDS)


def _follow_session(
    monitor: GpuMonitor, session: int, tell: Callable[[GpuEvent], None], ending: threading.Event
) -> str:
    """Tell of events until the session ends; return what else made an end to it."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return str(error)
    try:
        events = pynvml.nvmlEventSetCreate()
        try:
            seen: tuple[Gpu, ...] | None = None
            has_events: dict[str, bool] = {}
            while not ending.is_set() and monitor.session == session:
                if (gpus := monitor.gpus()) is not seen:
                    seen = gpus
                    monitor.unheard = _register(events, gpus, has_events)
                    monitor.watching = sum(has_events.values())
                if not any(has_events.values()):  # GPUs that have none: before Kepler, or of a virtual machine
                    monitor.await_session(session, RETRY_SECONDS)
                    continue
                try:
                    _take(pynvml.nvmlEventSetWait_v2(events, WAIT_MILLISECONDS), monitor, tell)
                except pynvml.NVMLError_Timeout:
                    continue
            return ""
        finally:
            monitor.watching = 0
            pynvml.nvmlEventSetFree(events)
    except pynvml.NVMLError as error:
        return str(error)
    finally:
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError as error:
            log.debug("the NVIDIA driver did not close: %s", error)


def _register(events: pynvml.c_nvmlEventSet_t, gpus: tuple[Gpu, ...], has_events: dict[str, bool]) -> list[str]:
    """Ask for the events of GPUs that are not asked yet, and note of each whether it has any. Return what failed."""
    import pynvml

    failed = []

    wanted = pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError
    here = {gpu.uuid: gpu.pci_address for gpu in gpus if "GpuLost" not in gpu.ailments}
    for uuid in has_events.keys() - here.keys():
        del has_events[uuid]  # what comes back is asked again
    for uuid, address in here.items():
        if has_events.get(uuid):
            continue
        try:
            # By UUID no GPU would be found while any has fallen off the bus (nvml.h, nvmlDeviceGetHandleByUUID).
            handle = pynvml.nvmlDeviceGetHandleByPciBusId(address)
            kinds = pynvml.nvmlDeviceGetSupportedEventTypes(handle) & wanted
            if kinds:
                pynvml.nvmlDeviceRegisterEvents(handle, kinds, events)
            has_events[uuid] = bool(kinds)
        except pynvml.NVMLError as error:
            if uuid not in has_events:
                log.warning("errors of this GPU are not watched: %s", error, extra={"device": uuid})
            has_events[uuid] = False  # until a later reading
            if not isinstance(error, pynvml.NVMLError_NotSupported):  # in a virtual machine, say: nobody can mend it
                failed.append(f"errors (XIDs) of {uuid} are not told: {error}")
    return failed


def _take(data: pynvml.c_nvmlEventData_t, monitor: GpuMonitor, tell: Callable[[GpuEvent], None]) -> None:
    import pynvml

    if data.eventType & pynvml.nvmlEventTypeXidCriticalError:
        try:
            uuid = pynvml.nvmlDeviceGetUUID(data.device)
        except pynvml.NVMLError:
            uuid = ""
        gpu = next((g for g in monitor.gpus() if g.uuid == uuid), None)
        tell(
            GpuEvent(
                xid=int(data.eventData),
                at=time.monotonic(),
                gpu_uuid=gpu.uuid if gpu else "",
                mig_uuid=slice_of(gpu, data.gpuInstanceId, data.computeInstanceId) if gpu else "",
                enumeration=gpu.enumeration if gpu else 0,
            )
        )
    monitor.disturbed()
