"""What NVML says about one GPU: who it is, its slices, its links, what ails it.

NVML answers "not supported" for whatever a GPU or an older driver does not have, and "function not
found" where the library is older than the bindings. Neither is an error here: the fact is unknown.
All functions raise pynvml's other errors; `agent.hardware.nvml.library` deals with these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import pynvml

from agent.model.device import Gpu, MigDevice, is_pci_address

if TYPE_CHECKING:
    Handle: TypeAlias = pynvml.c_nvmlDevice_t

T = TypeVar("T")
_EIGHTHS = 8
"""A GPU's memory is cut into eighths for its slices."""
_RESET_ACTIONS = frozenset(
    (
        pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET,
        pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT,
        pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET,
        pynvml.NVML_GPU_RECOVERY_ACTION_BUS_RESET,
        pynvml.NVML_GPU_RECOVERY_ACTION_SYSTEM_REBOOT,
    )
)


@dataclass(frozen=True, slots=True)
class Links:
    """A GPU's active NVLinks."""

    peers: Mapping[str, int]
    """PCI address of another GPU → links that go there directly."""
    switch: int
    """Links that go to an NVSwitch."""


NO_LINKS = Links({}, 0)


@dataclass(frozen=True, slots=True)
class Condition:
    """What a reading shows of a GPU's state."""

    ailments: tuple[str, ...]
    ecc_errors: int
    """Uncorrected memory errors since the driver or a reset began to count."""
    hot: bool
    """The hardware has slowed it down for heat."""


def kernel_address(nvml_address: str) -> str:
    """Spell NVML's `00000000:1B:00.0` as the kernel does: `0000:1b:00.0`. Raises ValueError."""
    domain, _, rest = nvml_address.partition(":")
    address = f"{int(domain, 16):04x}:{rest.lower()}"
    if not is_pci_address(address):
        raise ValueError(f"{nvml_address!r} is not a PCI address")
    return address


def identity(handle: Handle, index: int) -> Gpu:
    """Read who a GPU is. Raises ValueError for an address that is none."""
    return Gpu(
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        index=index,
        minor=answer(pynvml.nvmlDeviceGetMinorNumber, handle),  # WSL has no node per GPU
        pci_address=kernel_address(pynvml.nvmlDeviceGetPciInfo(handle).busId),
        name=pynvml.nvmlDeviceGetName(handle),
        memory_bytes=memory(handle),
    )


def memory(handle: Handle) -> int:
    """Read the size of the memory in bytes; 0 for memory shared with the CPU (integrated GPUs)."""
    info = answer(pynvml.nvmlDeviceGetMemoryInfo, handle)
    return int(info.total) if info is not None else 0


def mig_mode(handle: Handle) -> bool:
    """Tell whether the GPU is cut into slices, or would be if it had any."""
    mode = answer(pynvml.nvmlDeviceGetMigMode, handle)
    return mode is not None and bool(mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE)


def mig_devices(handle: Handle, gpu_memory: int) -> tuple[MigDevice, ...]:
    """List a GPU's slices, by instance. One that goes meanwhile is left out."""
    found = []
    for index in range(answer(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        try:
            found.append(_mig_device(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index), index, gpu_memory))
        except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
            continue  # the numbers have holes
    return tuple(sorted(found, key=attrgetter("gpu_instance", "compute_instance")))


def _mig_device(handle: Handle, index: int, gpu_memory: int) -> MigDevice:
    size = memory(handle)
    _, mig, profile = pynvml.nvmlDeviceGetName(handle).partition(" MIG ")
    return MigDevice(
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        profile=profile if mig else _profile(pynvml.nvmlDeviceGetAttributes(handle), gpu_memory),
        gpu_instance=int(pynvml.nvmlDeviceGetGpuInstanceId(handle)),
        compute_instance=int(pynvml.nvmlDeviceGetComputeInstanceId(handle)),
        memory_bytes=size,
        index=index,
    )


def _profile(attributes: pynvml.c_nvmlDeviceAttributes, gpu_memory: int) -> str:
    """Name a slice's profile where the driver's name for it does not tell.

    The number of gigabytes is that of the eighths of the whole memory, not of what is left for programs.
    """
    whole = math.ceil(gpu_memory / (1 << 30))
    share = math.ceil((attributes.memorySizeMB << 20) / gpu_memory * _EIGHTHS) / _EIGHTHS if gpu_memory else 0
    compute, of_gpu = attributes.computeInstanceSliceCount, attributes.gpuInstanceSliceCount
    return f"{f'{compute}c.' if compute != of_gpu else ''}{of_gpu}g.{round(whole * share)}gb"


def links(handle: Handle, gpus: Sequence[str]) -> Links:
    """Count a GPU's active NVLinks. `gpus` are the PCI addresses of all GPUs."""
    peers: dict[str, int] = {}
    to_switch = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            if pynvml.nvmlDeviceGetNvLinkState(handle, link) != pynvml.NVML_FEATURE_ENABLED:
                continue
        except _ABSENT:
            break  # links are numbered without holes
        peer = answer(_remote_address, handle, link)
        kind = answer(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        if peer is not None and peer in gpus:
            peers[peer] = peers.get(peer, 0) + 1
        elif kind in (pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH, None):
            # Drivers that do not tell the kind of the other end know two kinds of it.
            to_switch += 1
    return Links(peers, to_switch)


def _remote_address(handle: Handle, link: int) -> str:
    try:
        return kernel_address(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)
    except ValueError:
        return ""  # switches of the fifth generation of NVLink have no PCI function here


def matrix(gpus: Sequence[Gpu], found: Mapping[str, Links]) -> dict[str, tuple[tuple[str, int], ...]]:
    """Work out by how many links each GPU (UUID) reaches each other one, directly or through switches.

    GPUs that joined different cliques of a fabric reach each other through no switch.
    """
    return {
        one.uuid: tuple(
            sorted((other.uuid, n) for other in gpus if other is not one and (n := _between(one, other, found)))
        )
        for one in gpus
    }


def _between(one: Gpu, other: Gpu, found: Mapping[str, Links]) -> int:
    mine, theirs = found.get(one.uuid, NO_LINKS), found.get(other.uuid, NO_LINKS)
    apart = one.fabric_clique and other.fabric_clique and one.fabric_clique != other.fabric_clique
    return mine.peers.get(other.pci_address, 0) + (0 if apart else min(mine.switch, theirs.switch))


def fabric_clique(handle: Handle) -> str:
    """Read `cluster UUID.clique ID` of the NVLink domain beyond the host; empty until it is joined, or if none is."""
    info = pynvml.c_nvmlGpuFabricInfo_v2_t()
    if answer(pynvml.nvmlDeviceGetGpuFabricInfoV, handle, pynvml.byref(info)) is None:
        return ""
    if info.state != pynvml.NVML_GPU_FABRIC_STATE_COMPLETED or info.status != pynvml.NVML_SUCCESS:
        return ""
    digits = bytes(info.clusterUuid).hex()
    if not digits.strip("0"):
        return ""  # a host whose NVSwitches lead nowhere else
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return f"{'-'.join(parts)}.{info.cliqueId}"


def condition(handle: Handle, is_cut: bool, before: Collection[str] = ()) -> Condition:
    """Read what ails a GPU now, which is cut into slices or not. The words are those of `agent.model.device_health`.

    `before` is what the last reading showed and no reset has ended since.
    """
    kind, since = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    ecc_errors = answer(pynvml.nvmlDeviceGetTotalEccErrors, handle, kind, since) or 0
    rows = answer(pynvml.nvmlDeviceGetRemappedRows, handle)
    if rows is None and is_cut:
        # A GPU with slices does not tell (nvml.h, nvmlDeviceGetRemappedRows). All that can be cut do remap rows.
        rows = (0, 0, int("RowRemapPending" in before), int("RowRemapFailed" in before))
    return Condition(tuple(_ailments(handle, ecc_errors, rows)), ecc_errors, _is_slowed_for_heat(handle))


def _ailments(handle: Handle, ecc_errors: int, rows: Sequence[int] | None) -> Iterator[str]:
    if _recovery_action(handle) in _RESET_ACTIONS:
        yield "ResetRequired"
    if rows is None:
        # GPUs that remap rows also confine an error to the program that it hit.
        if ecc_errors:
            yield "EccUncorrectable"
        if answer(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, handle):
            yield "PageRetirementPending"
        return
    _corrected, _uncorrected, pending, failed = rows
    if failed:
        yield "RowRemapFailed"
    if pending:
        yield "RowRemapPending"


def _recovery_action(handle: Handle) -> int | None:
    """Read what the driver (570 and later) says must be done to the GPU; None if it does not say."""
    found = answer(pynvml.nvmlDeviceGetFieldValues, handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    return int(found[0].value.uiVal) if found and found[0].nvmlReturn == pynvml.NVML_SUCCESS else None


def _is_slowed_for_heat(handle: Handle) -> bool:
    try:
        reasons = int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except pynvml.NVMLError_FunctionNotFound:  # before driver 535
        reasons = answer(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    except _ABSENT:
        return False
    return bool(reasons & pynvml.nvmlClocksEventReasonHwThermalSlowdown)


def has_corrupt_inforom(handle: Handle) -> bool:
    """Have the board's data about itself checked. It takes tens of milliseconds: not for each reading."""
    try:
        answer(pynvml.nvmlDeviceValidateInforom, handle)
    except pynvml.NVMLError_CorruptedInforom:
        return True
    return False


_ABSENT = (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_InvalidArgument)


def answer(question: Callable[..., T], *about: object) -> T | None:
    """Return the answer, None if this GPU, driver or library does not know the question."""
    try:
        return question(*about)
    except _ABSENT:
        return None
