"""The real machine as a `Host`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path

from agent.errors import HardwareError
from agent.hardware.host import Link, RdmaLink, Watch
from agent.hardware.netlink.default_routes import Ways, read_ways
from agent.hardware.netlink.links import Netlink
from agent.hardware.netlink.rdma_netlink import RdmaNetlink
from agent.hardware.netlink.vf_control import PfNetlink
from agent.hardware.nvml.library import Reading
from agent.hardware.nvml.monitor import DEFAULT_TIMES, GpuMonitor, GpuWatch, Times
from agent.hardware.sysfs import counters, pci
from agent.hardware.sysfs import scan as sysfs
from agent.hardware.sysfs.netdev import LOOPBACK, needed_ways, read_default_routes, with_lower
from agent.hardware.sysfs.read import Attributes, shown
from agent.hardware.uevents import Uevents
from agent.model.change import Change, OnEvent
from agent.model.counters import Counters
from agent.model.device import DefaultRoute, Gpu, Problem, Snapshot
from agent.model.device_health import GpuEvent

GPU_DRIVER = "nvidia"
_DISPLAY = 0x03
"""Base class of GPUs; NVSwitches, which have a driver of that family, are bridges."""
_NETWORK_CLASSES = ("0x02", "0x0c06", "0x00ff")
"""Network and InfiniBand controllers, and adapters without a class (eRDMA), as sysfs begins to spell them."""
_RENAMES = 3
"""How often an interface may be renamed (by udev) between the list of names and the look at it."""


@dataclass(frozen=True)
class Machine:
    """The machine this process runs on."""

    root: Path
    links: Netlink
    vf_control: PfNetlink
    gpus: GpuMonitor
    rdma: RdmaNetlink
    api_server: str | None = None
    """IP address of the cluster's API server."""
    _ways: list[Ways | None] = field(default_factory=lambda: [None])
    """The kernel's last answer about the ways out, alone in its list."""

    @classmethod
    def open(cls, root: Path = Path("/"), api_server: str | None = None, gpu_times: Times = DEFAULT_TIMES) -> Machine:
        """Open the machine whose /sys, /proc and /dev are found under `root`."""
        return cls(root, Netlink(), PfNetlink(root=root), GpuMonitor(gpu_times), RdmaNetlink(), api_server)

    def scan(self) -> Snapshot:
        """Read the hardware."""
        snapshot = sysfs.scan(self.root, self._is_own)
        problems: tuple[Problem, ...] = ()
        mode = None
        if os.path.isdir(f"{self.root}/sys/class/infiniband"):
            try:
                mode = self.rdma.mode()
            except HardwareError as error:
                problems = (Problem("/sys/class/infiniband", f"taken for shared by namespaces: {error}"),)
        snapshot = replace(snapshot, rdma_exclusive=mode == "exclusive", problems=snapshot.problems + problems)
        return with_newest_gpus(self._with_default_ways(snapshot), self.gpus)

    def rescan(self, old: Snapshot, change: Change) -> Snapshot:
        """Bring a snapshot up to date. The mode of RDMA has no event, so a full scan alone looks at it."""
        if change.everything:
            return self.scan()
        snapshot = sysfs.rescan(self.root, old, change, self._is_own)
        return with_newest_gpus(self._with_default_ways(snapshot), self.gpus)

    def _with_default_ways(self, snapshot: Snapshot) -> Snapshot:
        """Add what /proc does not show of default routes, and the way to the API server."""
        if self.root != Path("/"):
            return snapshot  # another machine's files
        with contextlib.suppress(OSError):  # else what was known last
            self._ways[:] = [read_ways(self.api_server)]
        [ways] = self._ways
        read = Attributes(self.root)
        if ways is None:  # the kernel has not answered yet
            routes, needed = snapshot.default_routes, needed_ways(read, snapshot.default_routes)
        else:
            routes = all_default_routes(snapshot.default_routes, ways)
            needed = needed_ways(read, routes) | with_lower(read, ways.to_api)
        return replace(snapshot, default_routes=routes, only_ways=needed - {LOOPBACK})

    def counters(self, snapshot: Snapshot, held: Set[str]) -> Counters:
        """Read what the adapters of a snapshot count. `held` are the VFs (PCI addresses) in pods."""
        return counters.read(self.root, snapshot, held, self.vf_control.traffic)

    def find_netdev(self, device: str) -> Link | None:
        """Find the interface of a PCI device in the host's namespace.

        sysfs lists a function's interfaces by itself: no netlink dump of a thousand links to find one.
        """
        for _ in range(_RENAMES):
            names = _entries(f"{self.root}/sys/bus/pci/devices/{device}/net")
            if len(names) > 1:
                names.sort(key=lambda name: (self._dev_port(name), name))
            link = self.links.find_own(names, device) if names else None
            if link is not None or not names:
                return link
        return None

    def _dev_port(self, name: str) -> int:
        try:
            return int((self.root / "sys/class/net" / name / "dev_port").read_text())
        except (OSError, ValueError):  # gone, or renamed just now
            return 0

    def find_rdma(self, device: str) -> RdmaLink | None:
        """Find the RDMA device of a PCI function in the host's namespace: below it, or software over its interface."""
        names = set(_entries(f"{self.root}/sys/bus/pci/devices/{device}/infiniband"))
        if not names:
            netdevs = _entries(f"{self.root}/sys/bus/pci/devices/{device}/net")
            software = f"{self.root}/sys/class/infiniband"
            over = {name for name in _entries(software) if netdevs and _parent(f"{software}/{name}") in netdevs}
            names = set(filter(self._is_own, over))
        if len(names) > 1:
            raise HardwareError(f"{device} has more than one RDMA device: {', '.join(sorted(map(shown, names)))}")
        return self.rdma.find(names) if names else None

    def _is_own(self, rdma: str) -> bool:
        """Tell whether a software RDMA device runs over an interface of the host, and not over a pod's of that name."""
        return self.root != Path("/") or self.rdma.is_over_own_interface(rdma)  # another machine's files

    def lifelines(self) -> Mapping[str, str]:
        """Tell which interfaces the node itself lives by, and why: name to reason."""
        return lifelines(self.api_server)

    def unbind(self, device: str) -> None:
        """Free a PCI function from its driver."""
        pci.unbind(self.root, device)

    def bind(self, device: str, driver: str) -> None:
        """Bind a PCI function to a driver."""
        pci.bind(self.root, device, driver)

    def watch(self, on_event: OnEvent) -> Watch:
        """Call `on_event` at kernel events about PCI, network and RDMA devices, and when a GPU's state changed."""
        self.gpus.follow(on_change=on_event)
        return Uevents(passing_on(on_event, self.gpus, self.root))

    def watch_gpus(self, on_event: Callable[[GpuEvent], None]) -> Watch:
        """Call `on_event` at the driver's errors (XIDs)."""
        self.gpus.follow(on_event=on_event)
        return GpuWatch(self.gpus)

    def pause_gpus(self, seconds: float, addresses: Sequence[str]) -> bool:
        """Let go of NVML for so long."""
        return self.gpus.pause(seconds, addresses)

    def close(self) -> None:
        """Let go of sockets and threads."""
        self.rdma.close()
        self.links.close()
        self.gpus.close()


def lifelines(api_server: str | None) -> Mapping[str, str]:
    """Return which of the host's interfaces it cannot do without at this moment, and why. Raises HardwareError."""
    try:
        ways = read_ways(api_server)
    except OSError as error:
        raise HardwareError(f"the host's default routes cannot be read: {error.strerror or error}") from error
    read = Attributes(Path("/"))
    routes = all_default_routes(read_default_routes(read), ways)
    if problems := read.problems:
        raise HardwareError(f"the host's default routes cannot be read: {problems[0].path}: {problems[0].text}")
    to_api = with_lower(read, ways.to_api) - {LOOPBACK}
    only = needed_ways(read, routes) - {LOOPBACK}
    reasons = dict.fromkeys(to_api, f"is the way to the API server {api_server}")
    return reasons | dict.fromkeys(only, "carries the host's default route")


def all_default_routes(shown: Iterable[DefaultRoute], ways: Ways) -> tuple[DefaultRoute, ...]:
    """Complete the default routes of IPv4 that /proc shows, and add those of IPv6 in the main table."""
    four = [route for route in shown if route.family == 4]
    six = (DefaultRoute(name, 6, metric, advertised) for name, metric, advertised in ways.of_ipv6)
    return (*four, *_further_ways(four, set(ways.default)), *six)


def _further_ways(routes: Sequence[DefaultRoute], ways: Set[str]) -> list[DefaultRoute]:
    """List the ways of the best default route of IPv4 that /proc does not show: it shows the first one only.

    If none of the ways is one of the best route in /proc, they are of another table, or of a half of all addresses;
    they count only if there is no default route.
    """
    metrics = [(route.metric, route.netdev) for route in routes]
    lowest = min(metrics, default=(0, ""))[0]
    shown_ways = {netdev for metric, netdev in metrics if metric == lowest}
    if metrics and shown_ways.isdisjoint(ways):
        return []
    return [DefaultRoute(name, 4, lowest) for name in sorted(ways - shown_ways)]


def passing_on(on_event: OnEvent, gpus: GpuMonitor, root: Path) -> OnEvent:
    """Tell the monitor of GPUs, too, what happens on the PCI bus, but for what happens to network adapters.

    A VF that is bound anew for a pod is no reason to read all GPUs. What is gone from sysfs may have been one.
    """

    def seen(what: str, change: Change) -> None:
        subsystem, _, rest = what.partition(" ")
        if subsystem == "pci":
            action, _, address = rest.partition(" ")
            if not _is_network_adapter(root, address):
                gpus.pci_event(action, address)
        on_event(what, change)

    return seen


def _is_network_adapter(root: Path, address: str) -> bool:
    try:
        return (root / "sys/bus/pci/devices" / address / "class").read_text().startswith(_NETWORK_CLASSES)
    except OSError:
        return False


def with_newest_gpus(snapshot: Snapshot, monitor: GpuMonitor) -> Snapshot:
    """Put the newest reading of the GPUs into a snapshot, and tell who reads them where the snapshot has some."""
    monitor.expect([d.address for d in snapshot.devices if d.driver == GPU_DRIVER and d.pci_class >> 16 == _DISPLAY])
    return with_gpus(snapshot, monitor.latest())


def with_gpus(snapshot: Snapshot, reading: Reading) -> Snapshot:
    """Put a reading of the GPUs into a snapshot, in place of an earlier one."""
    problems = [p for p in snapshot.problems if not p.path.startswith("nvml")]
    problems = sorted([*problems, *reading.problems], key=attrgetter("path"))
    return replace(snapshot, gpus=still_there(reading.gpus, snapshot), problems=tuple(problems))


def still_there(gpus: Sequence[Gpu], snapshot: Snapshot) -> tuple[Gpu, ...]:
    """Leave out GPUs that the driver has lost because they were taken from it: unbound, or removed from the bus."""
    return tuple(
        gpu
        for gpu in gpus
        if "GpuLost" not in gpu.ailments
        or ((device := snapshot.by_address.get(gpu.pci_address)) is not None and device.driver == GPU_DRIVER)
    )


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _parent(folder: str) -> str | None:
    """Name the interface that a software RDMA device runs over, None for a device of hardware."""
    try:
        return Path(folder, "parent").read_text().strip()
    except OSError:
        return None
