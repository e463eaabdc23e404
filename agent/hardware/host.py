"""`Host`: the node's hardware behind one face, so that a simulated node can take its place.

Everything above this package reaches the kernel through a Host. `agent.hardware.machine.Machine`
is the real one; `hack.sim.machine` puts a node file in its place, on real kernel links.
All methods block; call them from a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from agent.model.allocation import VfSettings
from agent.model.change import Change, OnEvent
from agent.model.counters import Counters
from agent.model.device import Snapshot
from agent.model.device_health import GpuEvent

if TYPE_CHECKING:
    from agent.hardware.netlink.links import Netlink


@dataclass(frozen=True, slots=True)
class Link:
    """A network interface as rtnetlink shows it."""

    name: str
    ifindex: int
    mac: str
    mtu: int
    up: bool
    """Administratively up (IFF_UP)."""
    carrier: bool
    device: str | None = None
    """Bus address of the device below it, where the kernel tells."""
    altnames: tuple[str, ...] = ()
    promisc: bool = False
    """Set by somebody with `ip link`; what packet sockets ask for is not counted."""
    allmulti: bool = False
    arp: bool = True
    """Asks for its neighbours' addresses, and answers for its own (no IFF_NOARP)."""
    multicast: bool = True
    """Takes part in multicast, and so in IPv6's discovery of neighbours (IFF_MULTICAST)."""
    broadcast: str = ""
    """The hardware address that reaches everybody."""
    link_mode: int = 0
    """Whether carrier alone makes it usable (IF_LINK_MODE_*); 0 if it does."""
    xdp: int = 0
    """How an XDP program is attached (XDP_ATTACHED_*); 0 if none is."""
    master: int | None = None
    """Index of the bridge, bond … it is a port of."""
    kind: str = ""
    """macvlan, ipvlan, ipoib, bond, veth …; empty for hardware."""


@dataclass(frozen=True, slots=True)
class TcxProgram:
    """A tcx program on an interface."""

    program: int
    """The kernel's ID of it."""
    link: int
    """ID of the bpf_link that holds it, which may change its program; 0 if none does."""


@dataclass(frozen=True, slots=True)
class LinkChange:
    """What to change about an interface while it moves. None: leave alone."""

    name: str | None = None
    mac: str | None = None
    mtu: int | None = None
    up: bool | None = None
    promisc: bool | None = None
    allmulti: bool | None = None
    arp: bool | None = None
    multicast: bool | None = None
    broadcast: str | None = None
    link_mode: int | None = None
    master: int | None = None
    """Index of the bond that it is to be a port of; it must be down."""


@dataclass(frozen=True, slots=True)
class Route:
    destination: str
    """CIDR"""
    gateway: str | None
    mtu: int | None = None
    advmss: int | None = None
    priority: int | None = None
    """The metric; a lower one goes first."""
    table: int | None = None
    scope: int | None = None
    """0 universe, 253 link, 254 host (RT_SCOPE_*)."""
    source: str | None = None
    """The address that what goes this way has by default."""
    onlink: bool = False
    """The gateway is a neighbour, whatever its address."""
    protocol: int | None = None
    """Who made it (RTPROT_*)."""
    by_itself: bool = False
    """Of a route that was found: it comes with an address, or from a router, and nobody need give it."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule that says which packets look for their way in a table. None: any."""

    table: int
    priority: int
    """A lower one goes first."""
    source: str | None = None
    """CIDR"""
    destination: str | None = None
    iif: str | None = None
    oif: str | None = None
    fwmark: int | None = None
    version: int = 4
    """Of IP; each has rules of its own."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """An address whose MAC is known for good."""

    address: str
    mac: str


@dataclass(frozen=True, slots=True)
class LinkPolicy:
    """What an interface in a pod is given, or has, beside addresses and routes."""

    rules: tuple[Rule, ...] = ()
    """Given with the interface; they are of its namespace."""
    neighbours: tuple[Neighbour, ...] = ()
    settings: Mapping[str, int] = field(default_factory=dict, hash=False)
    """By their names in net.ipv4.conf and net.ipv6.conf (`agent.config.routing.SYSCTLS`)."""
    table: int | None = None
    """Its own table: rules that are there for it are of an interface that had its name before, and are taken away."""


NO_POLICY = LinkPolicy()


@dataclass(frozen=True, slots=True)
class Child:
    """An interface to be made, upon another one or, a bond, to be put over others."""

    kind: str
    """macvlan, ipvlan, ipoib or bond"""
    name: str
    mode: str
    """macvlan: bridge, private, vepa or passthru; ipvlan: l2, l3 or l3s; ipoib: datagram or connected; bond:
    active-backup"""
    mac: str | None = None
    """None: the kernel chooses."""
    mtu: int | None = None
    up: bool = True
    pkey: int | None = None
    """ipoib: the partition, with the bit of full members."""
    arp_targets: tuple[str, ...] = ()
    """bond: IPv4 addresses it asks over the port that carries; without any it goes by its ports' links."""


class VfControl(Protocol):
    """What PFs enforce on their VFs."""

    def read(self, pf_netdev: str, vf_index: int) -> VfSettings:
        """Read all settings of one VF. Raises HardwareError."""

    def apply(self, pf_netdev: str, vf_index: int, settings: VfSettings) -> None:
        """Set those fields that are not None, and read them back. Raises HardwareError."""

    def guids(self, pf_netdev: str, vf_index: int) -> tuple[str, str] | None:
        """Read the node and port GUID that an InfiniBand PF has for a VF; None if it does not tell."""

    def set_guids(self, pf_netdev: str, vf_index: int, node: str, port: str) -> None:
        """Give both GUIDs to a VF, which takes them when its driver is bound anew. Raises HardwareError."""


@dataclass(frozen=True, slots=True)
class RdmaLink:
    """An RDMA device as RDMA netlink shows it."""

    index: int
    """Unique on the system; it stays over moves and renames, and is another after the driver was rebound."""
    name: str
    node_guid: str
    """As sysfs spells it: 0002:c903:00a1:b2c3."""


class Rdma(Protocol):
    """RDMA devices, in the host's network namespace and in pods'."""

    def mode(self) -> str | None:
        """Return `exclusive` if RDMA devices belong to one namespace each, `shared`, or None without RDMA."""

    def devices(self, netns: int | None = None) -> tuple[RdmaLink, ...]:
        """List the RDMA devices that are seen in the host or in the namespace of a descriptor."""

    def char_device(self, device: RdmaLink, kind: str, port: int | None = None, netns: int | None = None) -> str:
        """Name a device's `uverbs`, or a port's `umad` or `issm`: uverbs0, whose file is in /dev/infiniband."""

    def move_in(self, device: RdmaLink, netns: int) -> None:
        """Move a device from the host into a namespace."""

    def move_out(self, device: RdmaLink, netns: int) -> None:
        """Move a device from a namespace back to the host."""

    def rename(self, device: RdmaLink, name: str, netns: int | None = None) -> None:
        """Rename a device where it is."""

    def renumbering(self, device: str) -> AbstractContextManager[object]:
        """Keep everybody else from moving and rebinding devices: each such step frees minor numbers and takes others.

        Two at once could leave two pods with each other's character devices. `device` is whose step it is, for
        those who wait. Entering raises DeviceBusy if another's step is not over in time.
        """


class Watch(Protocol):
    @property
    def unheard(self) -> Sequence[str]:
        """What cannot be heard of now, each with the reason. Any thread may ask."""

    def close(self) -> None:
        """Stop watching."""


class Host(Protocol):
    """All of a node's hardware."""

    @property
    def root(self) -> Path:
        """Where this node's /sys, /proc and /dev are."""

    @property
    def links(self) -> Netlink:
        """The node's interfaces."""

    @property
    def vf_control(self) -> VfControl:
        """The node's PFs."""

    @property
    def rdma(self) -> Rdma:
        """The node's RDMA devices."""

    def scan(self) -> Snapshot:
        """Read the hardware. What cannot be read is named in the snapshot's problems.

        Raises HardwareError where nothing can be read, for want of descriptors say.
        """

    def rescan(self, old: Snapshot, change: Change) -> Snapshot:
        """Bring an earlier snapshot of this host up to date: read what changed, and no more. Raises as `scan` does."""

    def counters(self, snapshot: Snapshot, held: Set[str]) -> Counters:
        """Read what the adapters of a snapshot count. `held` are the VFs (PCI addresses) in pods."""

    def find_netdev(self, device: str) -> Link | None:
        """Find the interface of a PCI device in the host's namespace, live, whatever its name is now."""

    def find_rdma(self, device: str) -> RdmaLink | None:
        """Find the RDMA device of a PCI function in the host's namespace, live, whatever its name is now.

        Raises HardwareError for a function that has several.
        """

    def lifelines(self) -> Mapping[str, str]:
        """Tell which interfaces the node itself lives by, and why: name to reason."""

    def unbind(self, device: str) -> None:
        """Free a PCI function from its driver. One without is success. Raises HardwareError."""

    def bind(self, device: str, driver: str) -> None:
        """Bind a PCI function to a driver; its devices come in their own time. Raises HardwareError."""

    def watch(self, on_event: OnEvent) -> Watch:
        """Call `on_event(what, change)` from any thread at each kernel event that may change a scan's result."""

    def watch_gpus(self, on_event: Callable[[GpuEvent], None]) -> Watch:
        """Call `on_event(event)` from any thread at each error that a GPU's driver tells of."""

    def pause_gpus(self, seconds: float, addresses: Sequence[str]) -> bool:
        """Let go of the GPUs' driver for so long, and look then at the GPUs at some PCI addresses as if found anew.

        Tells whether the driver is let go; it is not if it hangs. 0 seconds end a pause.
        """

    def close(self) -> None:
        """Let go of sockets and threads."""
