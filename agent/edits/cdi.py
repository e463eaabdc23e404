"""Container edits, and Container Device Interface specs: our own files, and the names in those of others.

https://github.com/cncf-tags/container-device-interface, SPEC.md: the runtime reads every .json and
.yaml file of its spec folders; a file names one kind, such as nvidia.com/gpu. A name is looked up when a
container is created, so what it means may change until then.

The folder of our files is on a tmpfs, and a reboot voids what is in it: so a file need be whole (a runtime may read at
any moment), and not on any disk.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from agent.errors import Unavailable, UnitUnhealthy
from agent.model.device import PciDevice, Snapshot
from agent.model.mounts import Mount
from agent.offer.offer import Unit


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device file of the host."""

    path: str
    """Where the container finds it."""
    permissions: str = "rw"
    host_path: str = ""
    """Where the host has it; empty for the same path."""


@dataclass(frozen=True, slots=True)
class ContainerEdits:
    """What one container gets."""

    envs: tuple[tuple[str, str], ...] = ()
    devices: tuple[DeviceNode, ...] = ()
    cdi_devices: tuple[str, ...] = ()
    annotations: tuple[tuple[str, str], ...] = ()
    mounts: tuple[Mount, ...] = ()

    def __add__(self, other: ContainerEdits) -> ContainerEdits:
        return ContainerEdits(
            envs=self.envs + other.envs,
            devices=self.devices + other.devices,
            cdi_devices=self.cdi_devices + other.cdi_devices,
            annotations=self.annotations + other.annotations,
            mounts=self.mounts + other.mounts,
        )


def device_of(unit: Unit, snapshot: Snapshot) -> PciDevice:
    """Find the device of a unit. Raises UnitUnhealthy for one that is gone."""
    device = snapshot.by_address.get(unit.device)
    if device is None:
        what = f"unit {unit.unit_id} of {unit.resource_name}"
        raise UnitUnhealthy(f"{what}: {unit.device} is not on this node any more")
    return device


def vfio_nodes(unit: Unit, device: PciDevice) -> tuple[DeviceNode, DeviceNode]:
    """List the files of a device that is left to programs; without an IOMMU the host has one under another name.

    Raises UnitUnhealthy for one that has no IOMMU group.
    """
    if device.iommu_group is None:
        raise UnitUnhealthy(
            f"unit {unit.unit_id} of {unit.resource_name}: {device.address} is bound to {device.driver} but has no"
            " IOMMU group: enable the IOMMU in the firmware and on the kernel command line"
        )
    renamed = f"/dev/vfio/noiommu-{device.iommu_group}" if device.noiommu else ""
    return DeviceNode("/dev/vfio/vfio"), DeviceNode(f"/dev/vfio/{device.iommu_group}", host_path=renamed)


SPEC_FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
MAX_SPEC_BYTES = 4 << 20
SPEC_VERSION = "0.5.0"
"""Old enough for containerd 1.7 and CRI-O 1.24; nothing newer is needed."""
SPEC_SUFFIX = ".json"
OWN_PREFIX = "nodefabric-"


_WRITING = threading.Lock()
"""Held while a file is being put in place: what is half written is not a killed process's then."""


Stamp = tuple[int, int, int]


def write_whole(file: Path, text: str, mode: int, *, parents: bool = True) -> Stamp:
    """Put a file in its place whole, with its folder, and return its stamp. Raises OSError.

    With few system calls: kubelet may wait for many files.
    """
    path = str(file)
    folder, _, name = path.rpartition("/")
    fresh = f"{folder}/.{name}.{os.getpid()}"  # whose suffix no runtime reads
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(fresh, flags, mode)
    except FileNotFoundError:
        file.parent.mkdir(mode=0o755, parents=parents, exist_ok=True)
        descriptor = os.open(fresh, flags, mode)
    except FileExistsError:  # of a process that was killed, and had this one's number
        os.unlink(fresh)
        descriptor = os.open(fresh, flags, mode)
    try:
        with open(descriptor, "wb", buffering=0) as opened:
            data = text.encode()
            if opened.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            stamp = _stamp(os.fstat(descriptor))
        os.rename(fresh, path)
    except OSError:
        os.unlink(fresh)
        raise
    return stamp


def stamp_of(file: Path) -> Stamp | None:
    """What tells a file from another, and from what it was before somebody wrote it; None if there is none."""
    try:
        return _stamp(os.stat(file))
    except OSError:
        return None


def _stamp(found: os.stat_result) -> Stamp:
    return found.st_ino, found.st_size, found.st_mtime_ns


class SpecFiles:
    """Our files of one sort, whose names begin and end alike. A runtime takes `nodefabric-<name>.json` for a spec."""

    def __init__(self, folder: Path, start: str, whose: str, suffix: str = SPEC_SUFFIX, mode: int = 0o644) -> None:
        """`start` is how their names begin, and `whose` says in an error who gets no container without one.

        With another `suffix` they are no specs, and no runtime reads them.
        """
        self.folder = folder
        self._start = start
        self._whose = whose
        self._suffix = suffix
        self._mode = mode
        self._read: dict[str, tuple[object, Stamp]] = {}
        """Name → what a spec was read or written to say, and of which file."""

    def path(self, name: str) -> Path:
        """Tell where a spec is."""
        return self.folder / f"{OWN_PREFIX}{name}{self._suffix}"

    def write(self, name: str, text: str, what: object = None) -> None:
        """Write a spec, in place of an earlier one. Raises Unavailable. `what` as of `says`."""
        file = self.path(name)
        try:
            with _WRITING:
                self._read[name] = text if what is None else what, write_whole(file, text, self._mode)
        except OSError as error:
            raise Unavailable(
                f"the CDI spec {file} cannot be written ({error.strerror}): without it the runtime creates no"
                f" container for {self._whose}; mount the folder read-write into the agent (cdiDir)"
            ) from error

    def remove(self, name: str) -> None:
        """Remove a spec. One that is not there is removed already. Raises Unavailable."""
        try:
            self.path(name).unlink(missing_ok=True)
            self._read.pop(name, None)
        except OSError as error:
            raise Unavailable(f"the CDI spec {self.path(name)} cannot be removed: {error.strerror}") from error

    def read(self, name: str) -> bytes:
        """Read a spec. Raises OSError."""
        with self.path(name).open("rb") as stream:
            return stream.read(MAX_SPEC_BYTES)

    def is_there(self, name: str) -> bool:
        """Whether there is such a spec, whatever it says."""
        return stamp_of(self.path(name)) is not None

    def says(self, name: str, text: str | Callable[[], str], what: object = None) -> bool:
        """Whether a spec is there and says this. The same file is read again only for another text.

        `what` stands for a text that takes long to make: equal ones have equal texts.
        """
        stamp = stamp_of(self.path(name))
        key = text if what is None else what
        if stamp is None or self._read.get(name) == (key, stamp):
            return stamp is not None
        wanted = (text if isinstance(text, str) else text()).encode()
        try:
            is_same = stamp[1] == len(wanted) and self.read(name) == wanted
        except OSError:
            return False
        if is_same:
            self._read[name] = key, stamp
        return is_same

    def names(self) -> frozenset[str]:
        """List the specs that are there. What a killed process has half written is removed."""
        found = set()
        for path in self._entries():
            if path.name.startswith(f".{OWN_PREFIX}{self._start}"):
                with _WRITING, contextlib.suppress(OSError):  # no runtime reads it
                    path.unlink()
            elif path.name.startswith(f"{OWN_PREFIX}{self._start}") and path.suffix == self._suffix:
                found.add(path.name.removeprefix(OWN_PREFIX).removesuffix(self._suffix))
        return frozenset(found)

    def _entries(self) -> list[Path]:
        try:
            return list(self.folder.iterdir())
        except OSError:
            return []


def text_of(kind: str, devices: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Spell a spec: its kind, and for each device its name and its containerEdits."""
    spelt = [{"name": name, "containerEdits": dict(edits)} for name, edits in devices]
    # Without indent, or the encoder is the slow one that is written in Python, and kubelet waits for it.
    return json.dumps({"cdiVersion": SPEC_VERSION, "kind": kind, "devices": spelt}) + "\n"


_SUFFIXES = (".json", ".yaml", ".yml")
_LOADER = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
"""Leaves all as text: a name may look like a number."""

Named = tuple[str, frozenset[str]]
"""A spec's kind, and the names of its devices."""

log = logging.getLogger(__name__)


@dataclass
class SpecNames:
    """Which devices of a kind the node's specs name. Not for two threads at once.

    A spec of NVIDIA's toolkit describes every driver file of the host: some hundred kilobytes of YAML, of
    which only the names matter here. So a file is read once, until it is another one.
    """

    folders: Sequence[Path] = SPEC_FOLDERS
    _named: dict[tuple[Path, Stamp], Named] = field(default_factory=dict)

    def of_kind(self, kind: str) -> frozenset[str]:
        """List the names of the devices of a kind. A file that cannot be read counts for nothing."""
        files = [(file, stamp) for file in self._files() if (stamp := stamp_of(file)) is not None]
        self._named = found = {key: self._named.get(key) or read_spec(key[0]) for key in files}
        return frozenset(name for spec_kind, names in found.values() if spec_kind == kind for name in names)

    def _files(self) -> Iterator[Path]:
        for folder in self.folders:
            with contextlib.suppress(OSError):
                yield from sorted(
                    p for p in folder.iterdir() if p.suffix in _SUFFIXES and not p.name.startswith(OWN_PREFIX)
                )


def read_spec(file: Path) -> Named:
    """Read a spec's kind and the names of its devices; no kind if it is no spec."""
    try:
        with file.open("rb") as stream:
            text = stream.read(MAX_SPEC_BYTES)
        document = json.loads(text) if file.suffix == ".json" else yaml.load(text, _LOADER)  # noqa: S506
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        log.debug("%s is not a CDI spec: %s", file, error)
        return "", frozenset()
    if not isinstance(document, dict) or not isinstance(document.get("kind"), str):
        return "", frozenset()
    devices = document.get("devices")
    names = (d.get("name") for d in devices if isinstance(d, dict)) if isinstance(devices, list) else ()
    return document["kind"], frozenset(name for name in names if isinstance(name, str))
