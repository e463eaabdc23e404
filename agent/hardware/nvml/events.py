"""The driver's events about GPUs (XIDs), waited for on the calling thread.

An event set is made anew with each session of the reader (`agent.hardware.nvml.library`), and the library is let go in
between, so that it sees what a reset or a hot plug has changed. It watches the GPUs that the newest reading shows:
one that could not be read at first joins when it can.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from agent.model.device import Gpu
from agent.model.gpu_health import GpuEvent, slice_of

if TYPE_CHECKING:
    import pynvml

    from agent.hardware.nvml.monitor import GpuMonitor

WAIT_MILLISECONDS = 500
"""How long one wait may take: as long takes the end of the agent, and letting go of the library."""
RETRY_SECONDS = 1.0

log = logging.getLogger(__name__)


def follow(monitor: GpuMonitor, tell: Callable[[GpuEvent], None], ending: threading.Event) -> None:
    """Tell of every event until `ending` is set. Failures of the library are waited out, and said once."""
    said = ""
    while not ending.is_set():
        session = monitor.session
        trouble = ""
        if not session:
            monitor.cannot_hear(())  # no reading either, and that is told of by the reader
        elif monitor.gpus():
            monitor.hold(True)
            try:
                trouble = _follow_session(monitor, session, tell, ending)
            finally:
                monitor.hold(False)
        if trouble and trouble != said:
            log.warning("errors of GPUs are watched anew, because of: %s", trouble)
        if trouble and said:  # and not just once, as when a GPU is lost
            monitor.cannot_hear((f"errors (XIDs) of GPUs are not told: {trouble}",))
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
                    monitor.cannot_hear(_register(events, gpus, has_events))
                    monitor.registered(sum(has_events.values()))
                if not any(has_events.values()):  # GPUs that have none: before Kepler, or of a virtual machine
                    monitor.await_session(session, RETRY_SECONDS)
                    continue
                try:
                    _take(pynvml.nvmlEventSetWait_v2(events, WAIT_MILLISECONDS), monitor, tell)
                except pynvml.NVMLError_Timeout:
                    continue
            return ""
        finally:
            monitor.registered(0)
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
