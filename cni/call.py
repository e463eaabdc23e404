"""What CNI works on: a call, the node that it is about, and what kubelet gave its pod."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from agent.config.networks import NO_IPAM, Network
from agent.config.routing import NO_ROUTING
from agent.errors import DeviceBusy
from agent.hardware.host import Host
from agent.ledger import Ledger
from agent.model.allocation import Attachment, PodRef
from agent.model.device import Snapshot
from agent.state import Latest
from cni.ipam import plugins as ipam
from cni.netconf import NetConf

BEGUN = "begun"
"""Of the request in a row: when its ADD began, as time.time tells. A row that came otherwise has none."""
MAX_CALLERS = 1024
"""Repeated DELs come within minutes, and a node has some hundred pods."""
Key = tuple[str, str]
"""Container and interface."""
ROUTING = "routing"
"""Of the request in a row: what `Routing.document` made. A row of an earlier version has none."""


@dataclass(frozen=True, slots=True)
class Call:
    """One CNI call, checked. `netns` is an open descriptor, or None."""

    container_id: str
    ifname: str
    netns: int | None
    netns_path: str
    pod: PodRef
    cni_args: str
    cni_path: str
    conf: NetConf
    spooled_at: float | None = None
    """When a DEL was put on disk, as time.time tells; None for one that comes at this moment."""


def request_of(call: Call, conf: NetConf) -> dict[str, Any]:
    """Return what the row must hold for CHECK, GC and the return of leases."""
    network = None
    if conf.ipam is not None:
        # Leases look the same in 1.0.0 and 1.1.0 but for these, and many installed plugins know only the former.
        version = conf.cni_version if _has_newer_routes(conf.ipam) else min(conf.cni_version, "1.0.0")
        told = {"cniVersion": version, "name": conf.name, "type": conf.kind, "ipam": dict(conf.ipam)}
        # The device that it is, not the slot or the key that stood for it: some lease by it, as nv-ipam does.
        told |= {"deviceID": conf.device} if conf.device is not None else {}
        network = {key: value for key, value in conf.for_ipam.items() if key.casefold() != "deviceid"} | told
    return {
        "name": call.conf.name,
        "settings": conf.settings.document(),
        "mtu": conf.mtu,
        "altnames": list(conf.altnames),
        "device_info_file": conf.device_info_file,
        "network": network,
        ROUTING: conf.routing.document() if conf.routing is not NO_ROUTING else {},
        "cni_args": call.cni_args,
        "cni_path": call.cni_path,
    }


def leasing_networks(call: Call, rows: Sequence[Attachment]) -> list[Mapping[str, Any]]:
    """List the networks with addresses that a call is about: its own, and those that rows joined under its name."""
    mine = [request_of(call, call.conf)["network"]]
    of_rows = [row.request["network"] for row in rows if row.request["name"] == call.conf.name]
    found = mine + [network for network in of_rows if network and network["ipam"]["type"] != ipam.WITHOUT_LEASES]
    leasing = [network for network in found if network is not None and network["ipam"]["type"] not in NO_IPAM]
    different = {json.dumps([n["name"], n["ipam"]], sort_keys=True): n for n in leasing}
    return list(different.values())


@dataclass(frozen=True, slots=True)
class LeasingNetwork:
    """A network with addresses, where it counts whose calls wait. Two that only have the same name are two."""

    name: str
    kind: str
    """Type of its IPAM plugin."""
    settings: str
    """All that is said to that plugin, as a digest."""

    @classmethod
    def of(cls, name: str, ipam: Mapping[str, Any]) -> LeasingNetwork:
        """Return the one of this name with these addresses."""
        said = json.dumps(ipam, sort_keys=True).encode()
        return cls(name, ipam["type"], hashlib.blake2b(said, digest_size=16).hexdigest())

    def __str__(self) -> str:
        return f"{self.name} (addresses from {self.kind})"


def counted(network: Mapping[str, Any]) -> LeasingNetwork:
    """Return the network that the document for an IPAM plugin is about."""
    return LeasingNetwork.of(network["name"], network["ipam"])


def counted_of(request: Mapping[str, Any]) -> tuple[LeasingNetwork, str]:
    """Return by which network and namespace the request in a row counts."""
    return counted(request["network"]), ipam.namespace_of(request.get("cni_args", ""))


def joined(first: str, second: str) -> str:
    """Put the folders of one CNI_PATH behind those of another, each once."""
    return ":".join(dict.fromkeys(filter(None, f"{first}:{second}".split(":"))))


def _has_newer_routes(ipam_section: Mapping[str, Any]) -> bool:
    """Return whether routes are configured with what came with CNI 1.1.0: a plugin of an earlier one drops it."""
    routes = ipam_section.get("routes")
    newer = {"mtu", "advmss", "priority", "table", "scope"}
    return isinstance(routes, list) and any(isinstance(route, dict) and newer & route.keys() for route in routes)


# ------------------------------------------------------------------------------------------------------ the node

LOCK_SECONDS = 30.0
STEPS = ("plan", "books", "device", "ipam", "addresses")
"""Of an ADD: finding the device, writing the ledger, the PF and the moves, the IPAM plugin, addresses and routes."""


class Observer:
    """Hears what is done with devices, on any thread. This one leaves it at the log."""

    def not_told(self, pod: PodRef, what: str) -> None:
        """A pod has its devices, but something that its containers asked for is not told to them."""

    def not_put_back(self, device: str, what: str) -> None:
        """A device is back, but the host does not take back something that it had there, such as a route."""


class Node:
    """What all that attaches, detaches and looks shares. Safe for many threads."""

    def __init__(
        self,
        host: Host,
        ledger: Ledger,
        snapshot: Latest[Snapshot],
        observer: Observer | None = None,
        timed: Callable[[Mapping[str, float]], object] = lambda seconds: None,
    ) -> None:
        """`timed` gets what the steps (`STEPS`) of an ADD that has succeeded took, in seconds."""
        self.host = host
        self.ledger = ledger
        self.scans = snapshot
        """The newest scan's cell."""
        self.observer = observer or Observer()
        self.timed = timed
        self.locks = DeviceLocks()


def pf_in_pod(ledger: Ledger, snapshot: Snapshot, device: str, container_id: str) -> Attachment | None:
    """Return the row by which another container than this one has the PF of a VF. None for what is no VF.

    That one would set the VF's MAC and its VLAN, and what it may send.
    """
    found = snapshot.by_address.get(device)
    row = ledger.attachment_on(found.physfn) if found is not None and found.physfn is not None else None
    is_others = row is not None and row.undo.mode == "nic" and row.owner.container_id != container_id
    return row if is_others else None


class InFlight:
    """Which ADDs are in flight, so that a DEL that overtakes one is not lost; and who has called lately.

    A runtime that gives an ADD up sends its DEL at once, and that may come before the ADD has written its row: then
    there is nothing to undo, and nobody would ever come again. So the DEL leaves word here, and the ADD undoes itself.
    Who has called before is no stranger: a DEL without a row is a repeated one then, or its ADD has failed.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._adds: dict[Key, list[Add]] = {}
        self._callers: dict[Key, None] = {}
        """Who has called, the one first who has called longest ago."""

    @contextmanager
    def add(self, container_id: str, ifname: str) -> Iterator[Add]:
        """Register an ADD for as long as the `with` block runs."""
        key, add = (container_id, ifname), Add(self._guard)
        self.remember(*key)
        with self._guard:
            self._adds.setdefault(key, []).append(add)
        try:
            yield add
        finally:
            with self._guard:
                self._adds[key].remove(add)
                if not self._adds[key]:
                    del self._adds[key]

    def overtake(self, container_id: str, ifname: str) -> None:
        """Mark the ADDs in flight as overtaken by their DEL. Call it before looking for rows."""
        with self._guard:
            for add in self._adds.get((container_id, ifname), ()):
                add.overtaken = add.overtaken or not add.closed

    def remember(self, container_id: str, ifname: str) -> None:
        """Note that a call has come, in place of who has called longest ago if there are too many."""
        with self._guard:
            self._callers.pop((container_id, ifname), None)
            self._callers[container_id, ifname] = None
            if len(self._callers) > MAX_CALLERS:
                del self._callers[next(iter(self._callers))]

    def has_called(self, container_id: str, ifname: str) -> bool:
        """Return whether a call is remembered. An agent that has just started remembers none."""
        with self._guard:
            return (container_id, ifname) in self._callers

    def has_add_since(self, container_id: str, ifname: str, moment: float) -> bool:
        """Return whether an ADD is in flight that began after a moment (of time.time)."""
        with self._guard:
            return any(add.begun > moment for add in self._adds.get((container_id, ifname), ()))


class Add:
    """One ADD in flight."""

    __slots__ = ("_guard", "begun", "closed", "overtaken")

    def __init__(self, guard: threading.Lock) -> None:
        self._guard = guard
        self.begun = time.time()
        self.overtaken = False
        """Whether its DEL has come."""
        self.closed = False

    def close(self) -> bool:
        """Take no more word: the rows are written, and a DEL finds them. Returns whether the DEL has come before."""
        with self._guard:
            self.closed = True
            return self.overtaken


class DeviceLocks:
    """One lock for each device, by the ledger's key, so that nobody works on it while another does.

    One that nobody wants is forgotten: each interface made for a pod has another key.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[str, _Wanted] = {}

    @contextmanager
    def hold(self, devices: Iterable[str], seconds: float = LOCK_SECONDS) -> Iterator[None]:
        """Hold the locks of some devices. DeviceBusy if they cannot be had.

        They are taken in one order, so that two calls cannot block each other.
        """
        with ExitStack() as held:
            for device in sorted(set(devices)):
                held.enter_context(self._held(device, seconds))
            yield

    @contextmanager
    def _held(self, device: str, seconds: float) -> Iterator[None]:
        with self._guard:
            wanted = self._locks.setdefault(device, _Wanted())
            wanted.by += 1
        try:
            if not wanted.lock.acquire(timeout=seconds):
                raise DeviceBusy(f"another call has been working on {device} for {seconds:g} s")
            try:
                yield
            finally:
                wanted.lock.release()
        finally:
            with self._guard:
                wanted.by -= 1
                if not wanted.by:
                    del self._locks[device]


class _Wanted:
    """A lock, and how many hold it or wait for it."""

    __slots__ = ("by", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.by = 0


@dataclass(frozen=True, slots=True)
class GrantedDevice:
    """A VF that kubelet granted to a pod, and the network it joins."""

    device: str
    resource_name: str
    network: Network | None
    unit_id: str = ""
    """The unit or slot; empty for a claim."""
    claim_uid: str = ""
    """The DRA claim that it was prepared for; empty for a unit."""
    ifname: str = ""
    """Name of its interface in the pod, with %d where a number is to be; empty for `usual`."""
    usual: str = ""
    """The same, but where another has that name a number comes behind it; empty for the next free one."""
    files_only: bool = False
    """Whether its character devices are all of it that the pod gets."""
    beside: tuple[str, ...] = ()
    """All NICs of the rail that it came with, itself included; none where a unit is one device."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What kubelet gave to one pod, as PCI addresses."""

    whole: frozenset[str] = frozenset()
    """VFs and adapters that are the pod's alone."""
    shared: frozenset[str] = frozenset()
    """Adapters of which it has a share."""
