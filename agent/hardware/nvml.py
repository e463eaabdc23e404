"""GPUs as the NVIDIA driver's library (NVML) shows them.

A node without the library or without the loaded driver is normal: it has no GPUs that could be
handed out, and the next scan asks again. One GPU that fails (fallen off the bus, say) is a
`Problem` and hides no other.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from agent.errors import DriverUnavailable
from agent.model.device import Gpu, Problem, is_pci_address

if TYPE_CHECKING:
    import pynvml

LIBRARY = "libnvidia-ml.so.1"
"""Found by the dynamic loader, as pynvml does."""


class Nvml:
    """The driver's library, opened when first needed and kept open. Not for use by two threads at once."""

    def __init__(self) -> None:
        self.unavailable: DriverUnavailable | None = None
        """Why the last reading found no driver; None when it found one."""
        self._open = False

    def read(self) -> tuple[tuple[Gpu, ...], tuple[Problem, ...]]:
        """Read all GPUs, and what could not be read. Never raises."""
        try:
            # pynvml costs memory that a node without GPUs need not pay.
            ctypes.CDLL(LIBRARY)
        except OSError as error:
            self.unavailable = DriverUnavailable(f"{LIBRARY} cannot be opened: {error}")
            return (), ()
        import pynvml

        try:
            if not self._open:
                pynvml.nvmlInit()
                self._open = True
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            self.close()
            self.unavailable = DriverUnavailable(f"the NVIDIA driver does not answer: {error}")
            if isinstance(error, pynvml.NVMLError_DriverNotLoaded):
                return (), ()
            return (), (Problem("nvml", str(self.unavailable)),)
        self.unavailable = None
        gpus, problems = [], []
        for index in range(count):
            try:
                gpus.append(_gpu(index))
            except (pynvml.NVMLError, ValueError) as error:
                problems.append(Problem(f"nvml/gpu{index}", f"cannot be read: {error}"))
        if problems:
            # A library opened before a GPU was reset or replaced keeps its old view.
            self.close()
        return tuple(gpus), tuple(problems)

    def close(self) -> None:
        """Let go of the driver, so that it can be unloaded."""
        if self._open:
            import pynvml

            self._open = False
            try:
                pynvml.nvmlShutdown()
            except pynvml.NVMLError as error:
                self.unavailable = DriverUnavailable(f"the NVIDIA driver did not close: {error}")


def kernel_address(nvml_address: str) -> str:
    """Spell NVML's `00000000:1B:00.0` as the kernel does: `0000:1b:00.0`. Raises ValueError."""
    domain, _, rest = nvml_address.partition(":")
    address = f"{int(domain, 16):04x}:{rest.lower()}"
    if not is_pci_address(address):
        raise ValueError(f"{nvml_address!r} is not a PCI address")
    return address


def _gpu(index: int) -> Gpu:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    return Gpu(
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        index=index,
        minor=_minor(handle),
        pci_address=kernel_address(_text(pynvml.nvmlDeviceGetPciInfo(handle).busId)),
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        memory_bytes=_memory(handle),
    )


def _text(value: str | bytes) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value


def _minor(handle: pynvml.c_nvmlDevice_t) -> int | None:
    import pynvml

    try:
        return int(pynvml.nvmlDeviceGetMinorNumber(handle))
    except pynvml.NVMLError_NotSupported:
        return None  # WSL has no device nodes per GPU


def _memory(handle: pynvml.c_nvmlDevice_t) -> int:
    import pynvml

    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError_NotSupported:
        return 0  # memory shared with the CPU (integrated GPUs)
