"""The scan: PCI devices with their interfaces, RDMA devices and NUMA nodes, from /sys and /proc.

`rescan` reads again what changed since a snapshot, and only that: the folders of all classes are listed each time, so
what came, went or was renamed is found whether an event named it or not; attributes are read of those functions alone
that events named, or on which something came or went. `scan` does that where nothing is known: all functions came.
After a quiet moment the result is what a full scan would give, but for what has no events: NUMA nodes and their
hugepages, boot ID, GPUs, RDMA's mode. What NVML knows of GPUs is `nvml`'s business. The root may be a node file's
folder instead of `/`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from posixpath import basename

from agent.errors import HardwareError
from agent.hardware.sysfs.accelerators import read_accelerators
from agent.hardware.sysfs.netdev import needed_ways, read_default_routes
from agent.hardware.sysfs.numa import read_numa_nodes
from agent.hardware.sysfs.pci import (
    INFINIBAND,
    MAD,
    NET,
    PCI_DEVICES,
    VERBS,
    Classes,
    IsOwn,
    Names,
    all_own,
    function_below,
    function_in,
    read_function,
    read_vdpa_devices,
    vhost_net_present,
)
from agent.hardware.sysfs.rdma import (
    CharDevices,
    in_order,
    rdma_cm_present,
    read_char_device,
)
from agent.hardware.sysfs.read import Attributes, shown
from agent.model.change import Change
from agent.model.cloud_topology import AS_SHOWN, Places, known_places, nccl_places
from agent.model.device import (
    CharDevice,
    Gpu,
    PciDevice,
    Problem,
    Snapshot,
    is_accelerator,
    is_pci_address,
)

_DMI = "/sys/class/dmi/id"


def scan(root: Path, is_own: IsOwn = all_own) -> Snapshot:
    """Read the node's hardware below root. What cannot be read is in `problems`.

    `is_own` tells software RDMA devices of this namespace from those of pods.

    A device that vanishes meanwhile is left out without a problem. Raises HardwareError where no descriptor is left
    to read with: all that is there would seem to be gone.
    """
    read = Attributes(root)
    found = _Look(read, Snapshot(), Change(bus=True), is_own).snapshot()
    found = replace(
        found,
        numa_nodes=read_numa_nodes(read),
        boot_id=read.text("/proc/sys/kernel/random/boot_id") or "",
        machine=" ".join(filter(None, (read.text(f"{_DMI}/{name}") for name in ("sys_vendor", "product_name")))),
        places=known_places(
            (gpu.pci_address for gpu in found.accelerators), (d.address for d in found.devices if len(d.path) == 2)
        ),
        problems=read.problems,
    )
    read.check_complete()
    return found


def rescan(root: Path, old: Snapshot, change: Change, is_own: IsOwn = all_own) -> Snapshot:
    """Bring a snapshot of this root up to date. What cannot be read is in `problems`.

    `is_own` is what the full scan was given. Raises HardwareError where no descriptor is left to read with, as that
    does.
    """
    read = Attributes(root)
    found = _Look(read, old, change, is_own).snapshot()
    read.check_complete()
    return found


class _Entries:
    """The entries of one class folder, and the function each hangs on: looked up where that may be another now."""

    def __init__(
        self,
        read: Attributes,
        folder: str,
        known: Mapping[str, str],
        below: Callable[[str], str | None],
        told: Collection[str] = (),
    ) -> None:
        """`known` are the functions of names when they were last read, `below` looks one up, `told` are to be read."""
        self.folder = folder
        self._known = known
        self._below = below
        self._told = told
        self._owners = {name: known.get(name) for name in read.names(folder)}
        self.looked: set[str] = set()
        """Names of which nothing known before counts any more."""
        self._gone = {known[name] for name in known.keys() - self._owners.keys()}

    def __contains__(self, name: object) -> bool:
        return name in self._shown

    @cached_property
    def _shown(self) -> frozenset[str]:
        return frozenset(map(shown, self._owners))

    def owner(self, name: str) -> str | None:
        """Tell which function an entry hangs on; None for one that is not there, too."""
        return self._owners.get(name)

    def settle(self, affected: Collection[str]) -> Iterator[str]:
        """Look at what affected functions had, and at what nobody had; name the functions that this affects."""
        yield from self._gone
        for name, owner in self._owners.items():
            before = self._known.get(name)
            told = before is None or name in self._told
            if name not in self.looked and (told or owner in affected):
                self.looked.add(name)
                self._owners[name] = now = self._below(name)
                if now != before or told:
                    yield from (address for address in (before, now) if address is not None)

    def of(self, functions: Collection[str]) -> Names:
        """Group the names by function."""
        found: defaultdict[str, list[str]] = defaultdict(list)
        for name, owner in self._owners.items():
            if owner is not None and owner in functions:
                found[owner].append(name)
        return found

    def read_again(self, functions: Collection[str]) -> Iterator[str]:
        """Name the folders of which nothing known before counts any more."""
        yield from (f"{self.folder}/{name}" for name in self.looked)
        yield from (f"{self.folder}/{n}" for n, owner in self._known.items() if owner in functions)


class _Look:
    """A look at what may be another than an older snapshot says."""

    def __init__(self, read: Attributes, old: Snapshot, change: Change, is_own: IsOwn) -> None:
        self._read = read
        self._old = old
        self._affected = {address for address in change.functions if is_pci_address(address)}
        self._listed: frozenset[str] | None = None
        if change.bus:
            self._listed = frozenset(name for name in read.names(PCI_DEVICES) if is_pci_address(name))
            self._affected |= self._listed ^ old.by_address.keys()
        netdevs = {n.name: d.address for d in old.devices for n in d.netdevs}
        rdma = {r.name: d.address for d in old.devices for r in d.rdma_devices if not r.absent}
        files = [
            (c.kind, basename(c.path), d.address) for d in old.devices for r in d.rdma_devices for c in r.char_devices
        ]
        verbs = {name: address for kind, name, address in files if kind == "uverbs"}
        mad = {name: address for kind, name, address in files if kind != "uverbs"}
        self._netdevs = _Entries(read, NET, netdevs, partial(function_below, read, NET), change.netdevs)
        self._rdma = _Entries(read, INFINIBAND, rdma, partial(function_below, read, INFINIBAND, is_own=is_own))
        self._files = [_Entries(read, f, known, partial(self._below, f)) for f, known in ((VERBS, verbs), (MAD, mad))]
        self._classes = (self._netdevs, self._rdma, *self._files)
        self._vdpa = read_vdpa_devices(read)
        self._affected |= {d.address for d in old.devices if d.vdpa != self._vdpa.get(d.address)}

    def snapshot(self) -> Snapshot:
        fresh, indices = self._functions()
        # A VF may have been seen before it was linked to its PF, and may say no more (drivers/pci/iov.c: after
        # device_add, and without a bind where sriov_drivers_autoprobe is off).
        unlinked = {a for a in indices.keys() - fresh.keys() if (d := self._old.by_address.get(a)) and not d.is_vf}
        if unlinked:
            self._affected |= unlinked
            fresh, indices = self._functions()
        default_routes = read_default_routes(self._read)
        devices = self._devices(fresh, indices)
        return replace(
            self._old,
            devices=devices,
            accelerators=self._accelerators(devices),
            rdma_cm=rdma_cm_present(self._read),
            vhost_net=vhost_net_present(self._read),
            default_routes=default_routes,
            only_ways=needed_ways(self._read, default_routes),
            problems=self._problems(),
        )

    def _functions(self) -> tuple[dict[str, PciDevice | None], dict[str, int]]:
        """Read all functions that must be, and the indices that PFs among them tell of their VFs."""
        self._settle()
        affected = self._affected
        char_devices, absent = self._char_devices()
        classes = Classes(self._netdevs.of(affected), self._rdma.of(affected), char_devices, absent, self._vdpa)
        indices: dict[str, int] = {}
        return {a: read_function(self._read, a, classes, indices) for a in sorted(affected)}, indices

    def _settle(self) -> None:
        """Find all functions that must be read, until none draws in another."""
        # Where all are read, a VF draws in none.
        looked_for_pf: set[str] = set(self._affected) if self._affected == set(self._listed or ()) else set()
        while True:
            more = {address for entries in self._classes for address in entries.settle(self._affected)}
            for address in self._affected - looked_for_pf:
                looked_for_pf.add(address)
                more.update(self._pfs_to_read(address))
            if more <= self._affected:
                return
            self._affected |= more

    def _below(self, folder: str, name: str) -> str | None:
        """Find the function of a character device; of software RDMA that of its RDMA device."""
        function = function_in(self._read.link(f"{folder}/{name}"))
        if function is None and (found := read_char_device(self._read, folder, name)) is not None:
            return self._rdma.owner(found[0])
        return function

    def _char_devices(self) -> tuple[CharDevices, Names]:
        """Read those that may be another RDMA device's now; list RDMA devices of other namespaces by function, too."""
        found: defaultdict[str, list[CharDevice]] = defaultdict(list)
        absent: defaultdict[str, list[str]] = defaultdict(list)
        for entries in self._files:
            for name in sorted(entries.looked):
                now, function = read_char_device(self._read, entries.folder, name), entries.owner(name)
                if now is None:
                    continue
                ibdev, device = now
                found[ibdev].append(device)
                if device.kind == "uverbs" and ibdev not in self._rdma and function and ibdev not in absent[function]:
                    absent[function].append(ibdev)
        return {ibdev: in_order(devices) for ibdev, devices in found.items()}, absent

    def _pfs_to_read(self, address: str) -> Iterator[str]:
        """Name the PFs of which a function became or is no longer a VF: only they tell its number.

        One that went and came again since looks as if it had stayed, and may have another number.
        """
        known = self._old.by_address.get(address)
        if known is not None:
            before = known.physfn
        else:  # it may have been left out, and its PF says that it has it
            before = next((d.address for d in self._old.devices if address in d.vfs), None)
        link = self._read.link(f"{PCI_DEVICES}/{address}/physfn")
        now = basename(link) if link else None
        came_or_went = self._listed is not None
        if now != before or known is None or came_or_went:
            yield from (pf for pf in (before, now) if pf is not None)

    def _devices(self, fresh: Mapping[str, PciDevice | None], indices: Mapping[str, int]) -> tuple[PciDevice, ...]:
        kept = {d.address: d for d in self._old.devices if d.address not in fresh}
        for address, device in fresh.items():
            if device is not None:
                before = self._old.by_address.get(address)
                if before is not None and before.physfn == device.physfn and device.physfn not in fresh:
                    device = replace(device, vf_index=before.vf_index)
                kept[address] = replace(device, vf_index=indices[address]) if address in indices else device
        for address, device in kept.items():
            if device.physfn in fresh and device.vf_index != indices.get(address):
                kept[address] = replace(device, vf_index=indices.get(address))
        # Equal values stay the same objects: whoever compares snapshots has little to do.
        for address in fresh.keys() & kept.keys():
            if kept[address] == (before := self._old.by_address.get(address)) and before is not None:
                kept[address] = before
        return tuple(kept[address] for address in sorted(kept))

    def _accelerators(self, devices: tuple[PciDevice, ...]) -> tuple[Gpu, ...]:
        """Read the accelerators anew if one of them came, went, or is another now."""
        before = {gpu.pci_address for gpu in self._old.accelerators}
        now = {device.address for device in devices if is_accelerator(device)}
        return read_accelerators(self._read, devices) if (before | now) & self._affected else self._old.accelerators

    def _problems(self) -> tuple[Problem, ...]:
        """Keep the problems of what was not read this time."""
        again = {f"{PCI_DEVICES}/{address}" for address in self._affected} | {"/sys/bus/vdpa"}
        again.update(*(entries.read_again(self._affected) for entries in self._classes))
        below = tuple(f"{folder}/" for folder in again)
        kept = (p for p in self._old.problems if not (p.path.startswith(below) or _is_listing(p)))
        return tuple(sorted((*kept, *self._read.problems), key=attrgetter("path")))


def _is_listing(problem: Problem) -> bool:
    """Others than the scan say something of a folder, too."""
    return problem.path in _ALWAYS_READ and problem.text.startswith("cannot be read")


_ALWAYS_READ = frozenset({NET, INFINIBAND, VERBS, MAD, "/proc/net/route"})


MOST_TOPOLOGY_BYTES = 1 << 20


def _read_nccl_topology(path: Path) -> Places:
    """Read the file; nothing of a node that has none. Raises HardwareError for one that cannot be read."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_TOPOLOGY_BYTES).decode("utf-8", "replace")
        return nccl_places(text, str(path))
    except FileNotFoundError:
        return AS_SHOWN
    except OSError as error:
        raise HardwareError(f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise HardwareError(str(error)) from error


def with_nccl_topology(found: Snapshot, file: Path | None) -> Snapshot:
    """Put devices where the file says they stand. One that cannot be read is a problem of the snapshot."""
    if file is None:
        return found
    try:
        places = _read_nccl_topology(file)
    except HardwareError as error:
        return replace(found, problems=(*found.problems, Problem(str(file), str(error))))
    return replace(found, places=places) if places.source else found
