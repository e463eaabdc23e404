"""Granted GPUs → what their container gets.

Which files of the driver a program needs is the NVIDIA container toolkit's to know. So a container is
told which GPUs are its own, in one of the ways that the toolkit understands, or several:

    cdi            names of the host's NVIDIA spec, resolved by the container runtime itself
    envvar         NVIDIA_VISIBLE_DEVICES, for hosts whose runtime is the toolkit's; a pod can forge it
    volume-mounts  a mount for each GPU below a folder that the toolkit looks into; a pod cannot forge it
    device-specs   besides one of these, the device files, so that kubelet's device cgroup knows of them

Without a choice it is CDI where the host's spec names the GPUs, else the variable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agent.edits.cdi import SpecNames
from agent.edits.container_edits import ContainerEdits, DeviceNode
from agent.edits.spec_files import SPEC_FOLDERS
from agent.hardware.nvml.library import device_nodes, mig_minors
from agent.model.device import Gpu, MigDevice, Snapshot
from agent.model.mounts import Mount
from agent.offer.offer import Unit

CDI_KIND = "nvidia.com/gpu"
VARIABLE = "NVIDIA_VISIBLE_DEVICES"
MOUNTS = "/var/run/nvidia-container-devices"
CONTROL_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")


@dataclass(frozen=True, slots=True)
class GpuFiles:
    """What the host has to pass GPUs by."""

    cdi_names: frozenset[str] = frozenset()
    """Names of the devices of its NVIDIA CDI specs: `0`, `GPU-…`, `0:1`, `all`, as the toolkit was told."""
    nodes: frozenset[str] = frozenset()
    """The driver's device files."""
    mig_minors: Mapping[str, int] = field(default_factory=dict)
    """What a slice's files are: `gpu0/gi7/access` → minor number in nvidia-caps."""


NO_GPU_FILES = GpuFiles()


def gpu_edits(pass_by: Sequence[str], units: Sequence[Unit], snapshot: Snapshot, files: GpuFiles) -> ContainerEdits:
    """Work out what a container gets for these units, which are GPUs, slices or replicas of them."""
    found = [_found(unit.gpu or unit.device, snapshot) for unit in units]
    ids = list(dict.fromkeys(unit.gpu or unit.device for unit in units))  # replicas of one GPU are one
    names = list(dict.fromkeys(_cdi_name(*each, files.cdi_names) for each in found))
    by = pass_by or (("cdi",) if all(name in files.cdi_names for name in names) else ("envvar",))
    envs: dict[str, str] = {}
    if "envvar" in by:
        envs[VARIABLE] = ",".join(ids)
    if "volume-mounts" in by:
        envs[VARIABLE] = MOUNTS
    nodes = dict.fromkeys(path for each in found for path in _nodes(*each, files)) if "device-specs" in by else {}
    return ContainerEdits(
        envs=tuple(envs.items()),
        devices=tuple(DeviceNode(path) for path in nodes),
        cdi_devices=tuple(f"{CDI_KIND}={name}" for name in names) if "cdi" in by else (),
        mounts=tuple(Mount("/dev/null", f"{MOUNTS}/{i}") for i in ids) if "volume-mounts" in by else (),
    )


Found = tuple[str, Gpu | None, MigDevice | None]


def _found(uuid: str, snapshot: Snapshot) -> Found:
    """Find what a UUID names. It may be gone: what a container asks for by name can come back."""
    gpu = snapshot.gpu_by_uuid.get(uuid)
    if gpu is not None:
        return uuid, gpu, None
    for gpu in snapshot.gpus:
        for mig in gpu.mig_devices:
            if mig.uuid == uuid:
                return uuid, gpu, mig
    return uuid, None, None


def _cdi_name(uuid: str, gpu: Gpu | None, mig: MigDevice | None, names: frozenset[str]) -> str:
    """Choose the name that the host's spec has for a GPU: its UUID, which stays, before a number, which may not."""
    if uuid in names or gpu is None:
        return uuid
    number = f"{gpu.index}:{mig.index}" if mig is not None else f"{gpu.index}"
    return number if number in names else uuid


def _nodes(uuid: str, gpu: Gpu | None, mig: MigDevice | None, files: GpuFiles) -> Iterator[str]:
    if gpu is None or gpu.minor is None:
        return
    yield from (path for path in CONTROL_NODES if path in files.nodes)
    yield f"/dev/nvidia{gpu.minor}"
    if mig is not None:
        instance = f"gpu{gpu.minor}/gi{mig.gpu_instance}"
        for path in (f"{instance}/access", f"{instance}/ci{mig.compute_instance}/access"):
            if path in files.mig_minors:
                yield f"/dev/nvidia-caps/nvidia-cap{files.mig_minors[path]}"


class GpuFilesOf:
    """One host's, below a root. Not for two threads at once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._specs = SpecNames([root / folder.relative_to("/") for folder in SPEC_FOLDERS])

    def read(self) -> GpuFiles:
        """Read the host's CDI specs, device files and slices. A few file operations, unless a spec is new."""
        return GpuFiles(self._specs.of_kind(CDI_KIND), device_nodes(self._root), mig_minors(self._root))
