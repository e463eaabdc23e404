"""GPUs as the NVIDIA driver's library (NVML) shows them, and the driver's device files.

A node without the library or without the loaded driver is normal: it has no GPUs that could be
handed out, and the next reading asks again. One GPU that fails (fallen off the bus, say) is a
`Problem` and hides no other; it stays in the list with what ails it. When the library itself fails,
the GPUs stay as they were last seen: that the monitor failed says nothing about them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agent.model.device import Gpu, Problem

if TYPE_CHECKING:
    import pynvml

    from agent.hardware.nvml.gpu_facts import Condition, Links


import os
from operator import attrgetter
from pathlib import Path

LIBRARY = "libnvidia-ml.so.1"
"""Found by the dynamic loader, as pynvml does."""
MIG_MINORS = "proc/driver/nvidia-caps/mig-minors"
HOT_READINGS = 3
"""A GPU is too hot when so many readings on end show it slowed down for heat: one peak is not an outage."""
_GONE_AFTER_RESET = frozenset({"GpuLost", "ResetRequired", "RowRemapPending", "PageRetirementPending"})
"""Only a reset, or the driver loaded anew, ends these."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one look at all GPUs showed."""

    gpus: tuple[Gpu, ...] = ()
    problems: tuple[Problem, ...] = ()
    unavailable: str = ""
    """Why there is no driver; empty when it answered."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What is remembered of a GPU from one reading to the next."""

    gpu: Gpu
    links: Links
    corrupt: bool
    """Its inforom is."""
    ecc_errors: int = 0
    hot: int = 0
    """Readings on end that showed it slowed down for heat."""
    away: bool = False
    """The last reading did not show it."""


class Nvml:
    """The driver's library, opened when first needed and kept open. Not for use by two threads at once."""

    def __init__(self) -> None:
        self.session = 0
        """Number of the session with the driver; 0 while there is none. A user of the library beside this one must
        let go when it changes: the library keeps its view of the GPUs until nobody uses it."""
        self._sessions = 0
        self._known: dict[str, _Known] = {}
        self._bound: set[str] = set()
        """Where a driver was bound to a known GPU that could not be read since."""
        self._sought: frozenset[str] = frozenset()
        """Where GPUs are that the library did not show, and for whose sake it was opened anew."""

    def read(self, *, slow: bool = True, bound: Sequence[str] = (), expected: Collection[str] = ()) -> Reading:
        """Read all GPUs, and what could not be read. Never raises.

        `slow` says to read also what seldom changes and takes long: links, fabric, inforom.
        `bound` are PCI addresses at which a driver was bound since the last reading, `expected` those at which the
        kernel shows GPUs that have their driver.
        """
        if not is_installed():
            return Reading(unavailable=f"{LIBRARY} is not on this node")
        # pynvml costs memory that a node without GPUs need not pay.
        import pynvml

        self._sought -= frozenset(bound)
        self._bound.update({known.gpu.pci_address for known in self._known.values()}.intersection(bound))
        try:
            if not self.session:
                pynvml.nvmlInit()
                self._sessions += 1
                self.session = self._sessions
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            return self._unanswered(error)
        return self._look(count, slow, frozenset(expected))

    def close(self) -> None:
        """Let go of the driver, so that it can be unloaded."""
        if self.session:
            import pynvml

            self.session = 0
            try:
                pynvml.nvmlShutdown()
            except pynvml.NVMLError:
                return  # it has gone by itself

    def _unanswered(self, error: pynvml.NVMLError) -> Reading:
        import pynvml

        self.close()
        if isinstance(error, pynvml.NVMLError_DriverNotLoaded):
            self._known = {uuid: replace(known, away=True) for uuid, known in self._known.items()}
            return Reading(unavailable=f"the NVIDIA driver is not loaded: {error}")
        if isinstance(error, pynvml.NVMLError_LibRmVersionMismatch):
            text = (
                f"the NVIDIA driver was replaced after this process loaded {LIBRARY}: restart the agent's pod on this"
                " node, and see that it gets the library of the driver that is loaded now"
            )
        else:
            text = f"the NVIDIA driver does not answer: {error}"
        gpus = tuple(known.gpu for known in self._known.values() if not known.away)
        if gpus:
            text += "; the GPUs are shown as they were last seen"
        return Reading(gpus, (Problem("nvml", text),), unavailable=text)

    def _look(self, count: int, slow: bool, expected: frozenset[str]) -> Reading:
        import pynvml

        from agent.hardware.nvml import gpu_facts

        handles: dict[int, pynvml.c_nvmlDevice_t] = {}
        seen: list[Gpu] = []
        failed: dict[int, pynvml.NVMLError | ValueError] = {}
        errors: dict[str, pynvml.NVMLError] = {}
        for index in range(count):
            try:
                handles[index] = pynvml.nvmlDeviceGetHandleByIndex(index)
                seen.append(gpu_facts.identity(handles[index], index))
            except (pynvml.NVMLError, ValueError) as error:
                failed[index] = error
        is_full = slow or any(gpu.uuid not in self._known or self._known[gpu.uuid].away for gpu in seen)
        addresses = [gpu.pci_address for gpu in seen]
        fresh: dict[str, _Known] = {}
        for gpu in seen:
            try:
                fresh[gpu.uuid] = self._details(gpu, handles[gpu.index], addresses, is_full)
            except pynvml.NVMLError as error:
                failed[gpu.index] = errors[gpu.uuid] = error
            else:
                self._bound.discard(gpu.pci_address)
        problems = [Problem(f"nvml/gpu{i}", f"cannot be read: {error}") for i, error in sorted(failed.items())]
        missing = self._missing(fresh, errors)
        everyone = {**fresh, **missing}
        matrix = gpu_facts.matrix([k.gpu for k in everyone.values()], {u: k.links for u, k in everyone.items()})
        self._known = {
            uuid: replace(known, gpu=replace(known.gpu, nvlinks=matrix[uuid])) for uuid, known in everyone.items()
        }
        unseen = expected.difference(addresses)
        if slow and (failed or not unseen <= self._sought):
            # A library opened before a GPU was reset, replaced or bound to the driver keeps its old view. To open it
            # takes long, so not at each look at a GPU that shows itself and cannot be read, nor for one that it hides.
            self._sought = unseen
            self.close()
        self._sought &= unseen
        return Reading(tuple(sorted((k.gpu for k in self._known.values()), key=attrgetter("index"))), tuple(problems))

    def _details(self, gpu: Gpu, handle: pynvml.c_nvmlDevice_t, addresses: Sequence[str], slow: bool) -> _Known:
        from agent.hardware.nvml import gpu_facts

        last = self._known.get(gpu.uuid)
        is_cut = gpu_facts.mig_mode(handle)
        now = gpu_facts.condition(handle, is_cut, _lasting(last, gpu, self._bound) if last else ())
        hot = (last.hot if last else 0) + 1 if now.hot else 0
        if slow or last is None:
            clique, links = gpu_facts.fabric_clique(handle), gpu_facts.links(handle, addresses)
            corrupt = gpu_facts.has_corrupt_inforom(handle)
        else:
            clique, links, corrupt = last.gpu.fabric_clique, last.links, last.corrupt
        ailments = (
            *now.ailments,
            *(("InforomCorrupted",) if corrupt else ()),
            *(("ThermalSlowdown",) if hot >= HOT_READINGS else ()),
        )
        enumeration = last.gpu.enumeration if last else 0
        return _Known(
            replace(
                gpu,
                fabric_clique=clique,
                mig_mode=is_cut,
                mig_devices=gpu_facts.mig_devices(handle, gpu.memory_bytes) if is_cut else (),
                ailments=ailments,
                enumeration=enumeration + (last is not None and _was_reset(last, gpu, now, self._bound)),
            ),
            links,
            corrupt,
            now.ecc_errors,
            hot,
        )

    def _missing(self, fresh: Mapping[str, _Known], errors: Mapping[str, pynvml.NVMLError]) -> dict[str, _Known]:
        """Keep GPUs known before that this reading did not show, with what can be said of them.

        `errors` are those of GPUs that said who they are, by UUID. The others are asked by their address: numbers
        change when a GPU is gone.
        """
        import pynvml

        places = {known.gpu.pci_address for known in fresh.values()}
        kept = {}
        for uuid, known in self._known.items():
            if uuid in fresh or known.gpu.pci_address in places:
                continue
            error = errors.get(uuid) or _error_at(known.gpu.pci_address)
            if isinstance(error, pynvml.NVMLError_GpuIsLost | pynvml.NVMLError_NotFound):
                ailments = ("GpuLost",)
            elif isinstance(error, pynvml.NVMLError_ResetRequired):
                ailments = ("ResetRequired",)
            else:
                kept[uuid] = known  # what cannot be read now may be well
                continue
            kept[uuid] = replace(known, gpu=replace(known.gpu, ailments=ailments), away=True)
        return kept


def is_installed() -> bool:
    """Tell whether the driver's library is on this node."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def device_nodes(root: Path) -> frozenset[str]:
    """List the driver's nodes: /dev/nvidia0, /dev/nvidiactl … None on a node without the driver."""
    try:
        names = os.listdir(root / "dev")
    except OSError:
        return frozenset()
    return frozenset(f"/dev/{name}" for name in names if name.startswith("nvidia") and name != "nvidia-caps")


def mig_minors(root: Path) -> Mapping[str, int]:
    """Read which minor number of nvidia-caps opens what: `gpu0/gi7/access` → 66. Empty where no GPU can be cut.

    The driver writes a line for every slice that there could be; those are the same on all hosts.
    """
    try:
        lines = (root / MIG_MINORS).read_text("ascii", "replace").splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _error_at(address: str) -> pynvml.NVMLError | None:
    """Ask the GPU at a PCI address who it is, and return why it does not say; None if it does."""
    import pynvml

    try:
        pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByPciBusId(address))
    except pynvml.NVMLError as error:
        return error
    return None


def _lasting(last: _Known, gpu: Gpu, bound: Set[str]) -> Set[str]:
    """Tell what ailed a GPU, but for what has ended since if it was found anew: it may not say so itself."""
    ailments = frozenset(last.gpu.ailments)
    return ailments - _GONE_AFTER_RESET if _is_found_anew(last, gpu, bound) else ailments


def _is_found_anew(last: _Known, gpu: Gpu, bound: Set[str]) -> bool:
    return last.away or gpu.pci_address in bound


def _was_reset(last: _Known, gpu: Gpu, now: Condition, bound: Set[str]) -> bool:
    return (
        _is_found_anew(last, gpu, bound)
        or now.ecc_errors < last.ecc_errors
        or bool(_GONE_AFTER_RESET & (set(last.gpu.ailments) - set(now.ailments)))
    )
