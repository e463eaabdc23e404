"""A node file as a `Host`: its sysfs from a file, its interfaces real kernel links."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from agent.errors import HardwareError
from agent.hardware import recorded
from agent.hardware.host import Link, RdmaLink, Watch
from agent.hardware.machine import lifelines, passing_on, with_newest_gpus
from agent.hardware.netlink.links import Netlink
from agent.hardware.netlink.rtnetlink import IFLA_IFALIAS
from agent.hardware.nvml.monitor import GpuMonitor, GpuWatch, Times
from agent.hardware.sysfs import counters
from agent.hardware.sysfs import scan as sysfs
from agent.hardware.uevents import Uevents
from agent.model.allocation import VfSettings
from agent.model.change import Change, OnEvent
from agent.model.counters import Counters
from agent.model.device import Gpu, Netdev, PciDevice, Snapshot
from agent.model.device_health import GpuEvent
from hack import node_file
from hack.sim import fabric, uevents
from hack.sim.fabric import Fabric
from hack.sim.rdma import SimulatedRdma

IGB_LIKE = VfSettings(
    mac="00:00:00:00:00:00",
    vlan=0,
    vlan_qos=0,
    vlan_proto="802.1q",
    min_tx_rate=0,
    max_tx_rate=0,
    spoofchk=True,
    trust=False,
    link_state="auto",
)


NO_GUID = "00:00:00:00:00:00:00:00"


class RecordedVfControl:
    """VF settings in a file: a veth has no PF that could enforce them. Any process can look at it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, pf_netdev: str, vf_index: int) -> VfSettings:
        """Read all settings of one VF."""
        return VfSettings(**self._load().get(f"{pf_netdev}/{vf_index}", asdict(IGB_LIKE)))

    def apply(self, pf_netdev: str, vf_index: int, settings: VfSettings) -> None:
        """Set those fields that are not None."""
        with self._changing() as document:
            changed = {k: v for k, v in asdict(settings).items() if v is not None}
            document[f"{pf_netdev}/{vf_index}"] = asdict(self.read(pf_netdev, vf_index)) | changed

    @contextmanager
    def _changing(self) -> Iterator[dict[str, dict[str, object]]]:
        with open(self._path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            document = self._load()
            yield document
            fresh = self._path.with_suffix(".new")
            fresh.write_text(json.dumps(document, indent=1))
            os.rename(fresh, self._path)

    def guids(self, pf_netdev: str, vf_index: int) -> tuple[str, str] | None:
        """Read the node and port GUID of a VF."""
        found = self._load().get(f"{pf_netdev}/{vf_index} guids", {"node": NO_GUID, "port": NO_GUID})
        return str(found["node"]), str(found["port"])

    def set_guids(self, pf_netdev: str, vf_index: int, node: str, port: str) -> None:
        """Set both GUIDs of a VF."""
        with self._changing() as document:
            document[f"{pf_netdev}/{vf_index} guids"] = {"node": node, "port": port}

    def _load(self) -> dict[str, dict[str, object]]:
        try:
            document: dict[str, dict[str, object]] = json.loads(self._path.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise HardwareError(f"the simulated VF settings {self._path} cannot be read: {error}") from error
        return document


@dataclass(frozen=True)
class SimulatedMachine:
    """A node from a file, in a folder of its own, in the network namespace of this process."""

    root: Path
    links: Netlink
    vf_control: RecordedVfControl
    gpus: tuple[Gpu, ...]
    """As recorded."""
    monitor: GpuMonitor | None
    """Shows the GPUs of the NVIDIA library that is found, in place of the recorded ones, on a node with `gpus.live`.

    The file may say at which pace: {"quick": 0.1}.
    """
    fabric: Fabric | None
    rdma: SimulatedRdma
    _recorded: list[Snapshot] = field(default_factory=list)
    """What the recorded sysfs was at the last look, without the real links."""

    @classmethod
    def create(cls, folder: Path, node: recorded.Node, *, with_links: bool = True) -> None:
        """Lay a node file out in a folder and make its links. `open` then opens it, in any process."""
        root = folder / "root"
        root.mkdir(parents=True)
        recorded.unpack(node, root)
        (folder / "gpus.json").write_text(json.dumps([node_file.plain_gpu(gpu) for gpu in node.gpus]))
        if with_links:
            Fabric.build(folder, sysfs.scan(root))

    @staticmethod
    def destroy(folder: Path) -> None:
        """End the links of a node that `create` laid out, so that its folder can be removed."""
        Fabric.destroy(folder)

    @classmethod
    def open(cls, folder: Path) -> SimulatedMachine:
        """Open a node that `create` laid out."""
        gpus = recorded.GPUS.validate_json((folder / "gpus.json").read_bytes())
        built = Fabric(folder) if (folder / "links.json").exists() else None
        root = folder / "root"
        settings = RecordedVfControl(folder / "vf-settings.json")
        rdma = SimulatedRdma(folder, root, built.cut if built is not None else None)
        live = folder / "gpus.live"
        monitor = GpuMonitor(Times(**json.loads(live.read_text() or "{}"))) if live.exists() else None
        return cls(root, Netlink(fabric.device_of), settings, gpus, monitor, built, rdma)

    def scan(self) -> Snapshot:
        """Read the recorded sysfs, and the real links in place of the recorded interfaces."""
        exclusive = self.rdma.mode() == "exclusive"  # first: it shows again what came back
        snapshot = sysfs.scan(self.root)
        snapshot = replace(snapshot, gpus=self.gpus, rdma_exclusive=exclusive)
        if self.monitor is not None:
            snapshot = with_newest_gpus(snapshot, self.monitor)
        self._recorded[:] = [snapshot]
        if self.fabric is None:
            return snapshot
        simulated = {d.address for d in snapshot.devices if self._has_link(d.address)}
        links = self.links.by_device()
        if self.fabric.revive(simulated - links.keys()):
            links = self.links.by_device()
        return replace(
            snapshot,
            devices=tuple(
                _with_link(d, links.get(d.address)) if d.address in simulated else d for d in snapshot.devices
            ),
        )

    def counters(self, snapshot: Snapshot, held: Set[str]) -> Counters:
        """Read what the recorded adapters count; the PFs of simulated VFs tell nothing of them."""
        return counters.read(self.root, snapshot, held, _tells_nothing)

    def rescan(self, old: Snapshot, change: Change) -> Snapshot:
        """Bring a snapshot up to date: the recorded sysfs, and the links that changed."""
        if change.everything or not self._recorded:
            return self.scan()
        exclusive = self.rdma.mode() == "exclusive"  # first: it shows again what came back
        before = self._recorded[0]
        snapshot = sysfs.rescan(self.root, before, change)
        snapshot = replace(snapshot, rdma_exclusive=exclusive)
        if self.monitor is not None:
            snapshot = with_newest_gpus(snapshot, self.monitor)
        self._recorded[:] = [snapshot]
        if self.fabric is None:
            return snapshot
        fresh = {d.address for d in snapshot.devices if before.by_address.get(d.address) is not d} | change.functions
        names = {n.name for address in fresh & old.by_address.keys() for n in old.by_address[address].netdevs}
        links = self._links_of(fresh, change.netdevs | names)
        absent = set(fresh)
        if change.netdevs - {link.name for link in links.values()}:  # something ended, a namespace with it maybe
            absent |= {d.address for d in old.devices if not d.netdevs}
        missing = {address for address in absent if self._has_link(address)} - links.keys()
        if self.fabric.revive(missing):
            links |= self._links_of(missing, ())
        fresh |= links.keys()
        devices = []
        for device in snapshot.devices:
            address, known = device.address, old.by_address.get(device.address)
            if known is None or address in fresh:
                now = _with_link(device, links.get(address)) if self._has_link(address) else device
                device = known if known == now and known is not None else now
            else:
                device = known
            devices.append(device)
        return replace(snapshot, devices=tuple(devices))

    def _links_of(self, devices: Collection[str], names: Collection[str]) -> dict[str, Link]:
        """Look for the links of some devices, and for some links, by name: a list of all takes too long."""
        assert self.fabric is not None
        ports = [self.fabric.ports[device] for device in devices if device in self.fabric.ports]
        found: dict[str, Link] = {}
        for name in dict.fromkeys((*names, *(n for p in ports for n in (p.netdev, fabric.revived_name(p))))):
            link = self.links.find(name)
            if link is not None and link.device is not None:
                found[link.device] = link
        return found

    def _has_link(self, device: str) -> bool:
        return self.fabric is not None and device in self.fabric.ports and self._has_driver(device)

    def find_netdev(self, device: str) -> Link | None:
        """Find the link that stands for a PCI device, in the host's namespace."""
        port = self.fabric.ports.get(device) if self.fabric is not None else None
        if self.fabric is None or port is None:
            return None
        if not os.path.lexists(f"{self.root}/sys/bus/pci/devices/{device}"):
            return None  # unplugged
        link = self.links.find(port.netdev)
        if link is not None and link.device == device:
            return link  # which a device without a driver has not: `unbind` ends it
        if not self._has_driver(device):
            return None
        link = self.links.find_device(device)
        if link is None and self.fabric.revive([device]):
            link = self.links.find_device(device)
        return link

    def find_rdma(self, device: str) -> RdmaLink | None:
        """Find the RDMA device of a PCI function in the host's namespace."""
        found = [rdma for rdma, function in self.rdma.with_functions() if function == device]
        if len(found) > 1:
            raise HardwareError(f"{device} has more than one RDMA device: {', '.join(r.name for r in found)}")
        return found[0] if found else None

    def unbind(self, device: str) -> None:
        """Free a PCI function from its driver: its interface and its RDMA device end, wherever they are."""
        if self.fabric is None or not self._has_driver(device):
            return
        (self.root / "sys/bus/pci/devices" / device / "driver").unlink(missing_ok=True)
        self.rdma.withdraw(device)
        self.fabric.cut(device)
        uevents.emit("unbind", self._devpath(device), "pci")

    def bind(self, device: str, driver: str) -> None:
        """Bind a PCI function to a driver: its devices come anew, under other names, with the GUID of its PF."""
        folder, target = self.root / "sys/bus/pci/devices" / device, self.root / "sys/bus/pci/drivers" / driver
        if not target.is_dir():
            raise HardwareError(f"{device} cannot be bound to {driver}: No such file or directory")
        if not (folder / "driver").is_symlink():
            (folder / "driver").symlink_to(os.path.relpath(target, folder.resolve()))
        facts = sysfs.scan(self.root).by_address[device]
        pf, guids = self.find_netdev(facts.physfn or ""), None
        if pf is not None and facts.vf_index is not None:
            guids = self.vf_control.guids(pf.name, facts.vf_index)
        self.rdma.announce(device, guids[0] if guids is not None else NO_GUID)
        uevents.emit("bind", self._devpath(device), "pci")

    def _devpath(self, device: str) -> str:
        return uevents.devpath(self.root, self.root / "sys/bus/pci/devices" / device)

    def _has_driver(self, device: str) -> bool:
        # Plain text: the real machine has looked into sysfs before a Path is made.
        return os.path.lexists(f"{self.root}/sys/bus/pci/devices/{device}/driver")

    def lifelines(self) -> Mapping[str, str]:
        """Tell which interfaces carry the default route, of the namespace that the simulation is in."""
        return lifelines(None)

    def watch(self, on_event: OnEvent) -> Watch:
        """Call `on_event` at link events, and at what `uevents.emit` says of the recorded sysfs."""
        heard = on_event
        if self.monitor is not None:
            self.monitor.follow(on_change=on_event)
            heard = passing_on(on_event, self.monitor, self.root)
        return Uevents(heard, virtual_links=True, device_attribute=IFLA_IFALIAS)

    def watch_gpus(self, on_event: Callable[[GpuEvent], None]) -> Watch:
        """Call `on_event` at the errors of live GPUs; recorded ones have none."""
        monitor = self.monitor or GpuMonitor(is_installed=_no_library)
        monitor.follow(on_event=on_event)
        return GpuWatch(monitor)

    def pause_gpus(self, seconds: float, addresses: Sequence[str]) -> bool:
        """Let go of NVML for so long; recorded GPUs need none."""
        return self.monitor is None or self.monitor.pause(seconds, addresses)

    def close(self) -> None:
        """Let go of sockets and threads."""
        self.links.close()
        if self.monitor is not None:
            self.monitor.close()


def _tells_nothing(pf_netdev: str) -> None:
    """Be a PF that counts nothing of its VFs."""


def _no_library() -> bool:
    return False


def _with_link(device: PciDevice, link: Link | None) -> PciDevice:
    recorded_netdev = device.netdev
    if link is None or recorded_netdev is None:
        return replace(device, netdevs=())
    return replace(device, netdevs=(_netdev(link, recorded_netdev),))


def _netdev(link: Link, recorded_netdev: Netdev) -> Netdev:
    return replace(
        recorded_netdev,
        name=link.name,
        ifindex=link.ifindex,
        mac=link.mac,
        mtu=link.mtu,
        operstate="up" if link.carrier else "down",
        carrier=link.carrier if link.up else None,
    )
