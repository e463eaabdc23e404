"""Moves an interface on the processor of whoever waits for it.

An interface that leaves its network namespace waits in rcu_barrier() for all that RCU has still to free
(net/core/dev.c, __dev_change_net_namespace). Starting the CNI program leaves such work behind on its processor, and
the move does on its own. Where two processors have some, the second one's is mostly found too late for the grace
period that the first one's began, and waits for another: two timer ticks more. On a node where all processors have
such work all the time it makes no difference.
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

MAX_PROCESSORS = 8192
"""NR_CPUS_RANGE_END of the kernel's x86-64: nobody has more."""


log = logging.getLogger(__name__)


class Processors:
    """Which processors this process may use. Any thread may ask to run on one of them for a while."""

    def __init__(self) -> None:
        self._all = range(_possible())
        with ThreadPoolExecutor(1) as thread:  # one of its own, as it may not get back what it had
            self._may_choose = thread.submit(self._restores).result()

    def on(self, cpu: int | None) -> AbstractContextManager[None]:
        """Return what runs a `with` block on a processor, if that is known and allowed; else it runs anywhere.

        For a single system call: a thread that is bound waits for its processor however busy that is.
        """
        return _Bound(self, cpu)

    def _bind(self, cpu: int | None) -> bool:
        return self._may_choose and self._choose(cpu)

    def _release(self, cpu: int | None) -> None:
        try:
            os.sched_setaffinity(0, self._all)
        except OSError as error:  # the block has done what it has done
            self._may_choose = False
            log.error("a thread stays on processor %s: %s", cpu, error)

    def _choose(self, cpu: int | None) -> bool:
        if cpu is None or cpu not in self._all:
            return False
        try:
            os.sched_setaffinity(0, (cpu,))
        except OSError:  # not one of this container's, or switched off
            return False
        return True

    def _restores(self) -> bool:
        """Tell whether to ask for all processors gives back what there was.

        To ask for the former ones instead would leave the thread without those that its cgroup gets later. But where
        somebody has bound the process to some before it began (taskset), that must stay.
        """
        try:
            before = os.sched_getaffinity(0)
            os.sched_setaffinity(0, self._all)
            return os.sched_getaffinity(0) == before
        except OSError:
            return False


class _Bound:
    __slots__ = ("_cpu", "_is_bound", "_processors")

    def __init__(self, processors: Processors, cpu: int | None) -> None:
        self._processors = processors
        self._cpu = cpu

    def __enter__(self) -> None:
        self._is_bound = self._processors._bind(self._cpu)

    def __exit__(self, *_: object) -> None:
        if self._is_bound:
            self._processors._release(self._cpu)


def _possible() -> int:
    """Tell how many numbers of processors there may be; not all need be there."""
    try:
        last = Path("/sys/devices/system/cpu/possible").read_text().strip().replace(",", "-").rpartition("-")[2]
        return min(MAX_PROCESSORS, int(last) + 1)
    except (OSError, ValueError):
        return os.cpu_count() or 1
