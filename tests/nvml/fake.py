"""A driver that is not there: a libnvidia-ml.so.1 compiled from C, and the file that tells it what to show.

    FakeDriver(file).show(FakeGpu("GPU-a"), FakeGpu("GPU-b")).xid("GPU-a", 79)

Whoever loads the library needs the environment of `environment`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from agent.model.device import Gpu
from agent.model.device_health import NO_INSTANCE

HERE = Path(__file__).parent
SUCCESS, DRIVER_NOT_LOADED, GPU_IS_LOST, RESET_REQUIRED, VERSION_MISMATCH, UNKNOWN = 0, 9, 15, 16, 18, 999
SWITCH = "switch"


@dataclass(frozen=True)
class FakeMig:
    uuid: str
    gpu_instance: int
    compute_instance: int = 0
    megabytes: int = 9728
    of_gpu: int = 1
    of_compute: int = 1
    name: str = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"


@dataclass(frozen=True)
class FakeGpu:
    uuid: str
    bus: str = "00000000:1B:00.0"
    minor: int = 0
    memory: int = 85520809984
    error: int = 0
    """What all calls about it return."""
    ecc: int = 0
    rows: str = "0,0"
    """Pending and failed remappings; `-` for a GPU that cannot remap, `-pending` if it has pages to retire."""
    recovery: int = 0
    """What the driver advises; -1 for one that does not."""
    hot: bool = False
    corrupt: bool = False
    mig: tuple[FakeMig, ...] | None = None
    """None: not cut into slices."""
    links: tuple[str, ...] = ()
    """Bus addresses of the GPUs at the other end, or SWITCH."""
    fabric: tuple[int, str, int] | None = None
    """State, cluster (32 hex digits), clique."""
    name: str = "NVIDIA H100 80GB HBM3"


@dataclass
class FakeDriver:
    """What the library shows. Each change is written at once, in one step."""

    file: Path
    init: int = SUCCESS
    gpus: tuple[FakeGpu, ...] = ()
    hangs: frozenset[str] = frozenset()
    fails: dict[str, int] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)

    def show(self, *gpus: FakeGpu, init: int = SUCCESS) -> FakeDriver:
        """Show these GPUs, or fail to initialise."""
        self.gpus, self.init = gpus, init
        return self.write()

    def change(self, uuid: str, **changes: object) -> FakeDriver:
        """Change one GPU."""
        self.gpus = tuple(replace(g, **changes) if g.uuid == uuid else g for g in self.gpus)  # type: ignore[arg-type]
        return self.write()

    def hang(self, *calls: str) -> FakeDriver:
        """Let calls hang (`DeviceGetCount`); none lets those that hang go on."""
        self.hangs = frozenset(calls)
        return self.write()

    def fail(self, **calls: int) -> FakeDriver:
        """Let calls fail."""
        self.fails = calls
        return self.write()

    def xid(self, uuid: str, xid: int, gpu_instance: int = NO_INSTANCE, compute_instance: int = NO_INSTANCE) -> None:
        """Send an event. A UUID that no GPU has is one of a GPU that cannot be told."""
        self.events.append(f"event\t{len(self.events) + 1}\t{uuid}\t{xid}\t{gpu_instance}\t{compute_instance}")
        self.write()

    def write(self) -> FakeDriver:
        lines = [f"init\t{self.init}"]
        lines += [f"hang\t{call}" for call in sorted(self.hangs)]
        lines += [f"fail\t{call}\t{code}" for call, code in self.fails.items()]
        for g in self.gpus:
            lines.append(
                f"gpu\t{g.uuid}\t{g.bus}\t{g.minor}\t{g.memory}\t{g.error}\t{g.ecc}\t{g.rows}\t{g.recovery}"
                f"\t{g.hot:d}\t{g.corrupt:d}\t{g.mig is not None:d}\t{g.name}"
            )
        for g in self.gpus:
            lines += [
                f"mig\t{g.uuid}\t{m.uuid}\t{m.gpu_instance}\t{m.compute_instance}\t{m.megabytes}\t{m.of_gpu}"
                f"\t{m.of_compute}\t{m.name}"
                for m in g.mig or ()
            ]
            lines += [f"link\t{g.uuid}\t{end}" for end in g.links]
            if g.fabric is not None:
                state, cluster, clique = g.fabric
                lines.append(f"fabric\t{g.uuid}\t{state}\t{cluster}\t{clique}")
        fresh = self.file.with_name(f"{self.file.name}.new")
        fresh.write_text("\n".join([*lines, *self.events]) + "\n")
        os.replace(fresh, self.file)
        return self


def compile_library(folder: Path) -> Path:
    """Make the library in a folder, and return it."""
    compiler = next(
        ([c] for c in map(shutil.which, ("cc", "gcc", "clang")) if c), [sys.executable, "-m", "ziglang", "cc"]
    )
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(
        [*compiler, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-pthread", "-o", library, HERE / "fake_nvml.c"],
        check=True,
    )
    return library


def environment(library: Path, driver: FakeDriver) -> dict[str, str]:
    """Return what a process needs in its environment to load the library."""
    return {"LD_LIBRARY_PATH": str(library.parent), "FAKE_NVML": str(driver.file)}


def as_recorded(gpu: Gpu) -> FakeGpu:
    """Return a recorded GPU, with all its links going to switches."""
    return FakeGpu(
        gpu.uuid,
        bus=f"0000{gpu.pci_address.upper()}",
        minor=gpu.minor if gpu.minor is not None else -1,
        memory=gpu.memory_bytes,
        links=(SWITCH,) * max((links for _, links in gpu.nvlinks), default=0),
        name=gpu.name,
    )
