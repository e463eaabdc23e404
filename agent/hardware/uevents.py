"""Kernel events that may change what a scan sees: uevents and rtnetlink link messages.

Both are read on one thread, from a netlink socket each. Only what they name is passed on: what is true now is for the
next look to see, so an event that was lost costs nothing as long as the loss is told.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agent.errors import DriverUnavailable
from agent.hardware.netlink.rtnetlink import IFLA_PARENT_DEV_NAME, link_events
from agent.model.change import EVERYTHING, Change, OnEvent, of_function, of_netdev
from agent.model.device import is_pci_address

SUBSYSTEMS = frozenset({"pci", "net", "infiniband", "infiniband_verbs", "infiniband_mad", "vdpa", "cxi", "misc"})
"""Those that a scan looks at."""
_MISC = frozenset({"rdma_cm", "vhost-net", "tun"})
"""Of subsystem misc: devices that come and go with their modules."""
_VIRTUAL_NET = "/devices/virtual/net/"
_COMES_OR_GOES = frozenset({"add", "remove", "change", "move"})
"""What they may do to the PCI bus; `change` ends the making of VFs (drivers/pci/iov.c, sriov_enable)."""


@dataclass(frozen=True, slots=True)
class Uevent:
    action: str
    """add, remove, change, move, online, offline, bind or unbind."""
    path: str
    """Below /sys: /devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/net/ens1f0."""
    subsystem: str

    @property
    def name(self) -> str:
        """The kernel's name of the device."""
        return self.path.rpartition("/")[2]

    def __str__(self) -> str:
        return f"{self.subsystem} {self.action} {self.name}"


def parsed(packet: bytes) -> Uevent | None:
    """Read a message of the kernel: `ACTION@PATH` and the variables, each with a zero (lib/kobject_uevent.c).

    None for a subsystem that no scan looks at. What is no UTF-8 is replaced: pods give their interfaces any name.
    """
    head, *variables = packet.decode(errors="replace").split("\0")
    action, _, path = head.partition("@")
    subsystem = next((v.removeprefix("SUBSYSTEM=") for v in variables if v.startswith("SUBSYSTEM=")), "")
    return Uevent(action, path, subsystem) if subsystem in SUBSYSTEMS else None


def change_of(event: Uevent, *, virtual_links: bool = False) -> Change | None:
    """Say what an event is about; None for nothing that a scan shows.

    Interfaces that no hardware stands behind (every pod's veth) are nothing, unless `virtual_links`
    asks for them.
    """
    function = next((part for part in reversed(event.path.split("/")) if is_pci_address(part)), None)
    if event.subsystem == "pci":
        return of_function(function, bus=event.action in _COMES_OR_GOES) if function is not None else EVERYTHING
    if function is not None:
        return of_function(function)
    if event.subsystem == "net":
        if event.path.startswith(_VIRTUAL_NET) and not virtual_links:
            return None
        return of_netdev(event.name)
    if event.subsystem == "misc" and event.name not in _MISC:
        return None
    return EVERYTHING  # software RDMA, which belongs to the function of its interface; a module's device


RECEIVE_BUFFER_BYTES = 1 << 20
"""Enabling 64 VFs makes some thousand messages within a second."""
GATHER_SECONDS = 0.002
"""An event is seldom alone. And where a pod's start made it, that has its answer out before this thread takes part."""
UEVENTS, LINK_MESSAGES = "uevents", "link messages"
NETLINK_KOBJECT_UEVENT = 15
_PROTOCOLS = {UEVENTS: NETLINK_KOBJECT_UEVENT, LINK_MESSAGES: socket.NETLINK_ROUTE}
_GROUP = 1
"""The kernel's messages of the former; RTMGRP_LINK of the latter."""
_RECEIVE_BYTES = 1 << 16
_JOIN_SECONDS = 5.0

log = logging.getLogger(__name__)


class Uevents:
    """A running watch. `on_event` is called on its thread and must neither block nor raise.

    Uevents and link messages are heard independently of each other: `unheard` tells which of them is not, and why.
    Raises DriverUnavailable where not even a thread can wait for them.

    Interfaces that no hardware stands behind (every pod's veth) are passed over, unless
    `virtual_links` asks for them too. `device_attribute` is where link messages name the function.
    """

    def __init__(
        self,
        on_event: OnEvent,
        *,
        virtual_links: bool = False,
        device_attribute: int = IFLA_PARENT_DEV_NAME,
        gather_seconds: float = GATHER_SECONDS,
    ) -> None:
        self._on_event = on_event
        self._virtual_links = virtual_links
        self._device_attribute = device_attribute
        self._gather_milliseconds = gather_seconds * 1000
        self._unheard: dict[str, str] = {}
        self._sockets: dict[str, socket.socket] = {}
        try:
            self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            raise DriverUnavailable(f"kernel events cannot be waited for: {error}") from error
        for what, protocol in _PROTOCOLS.items():
            try:
                self._sockets[what] = _open(protocol)
            except OSError as error:
                self._unheard[what] = f"{what} cannot be heard: {error}"
        self._thread = threading.Thread(target=self._run, name="uevents", daemon=True)
        self._thread.start()

    @property
    def unheard(self) -> Sequence[str]:
        """What cannot be heard of now, each with the reason."""
        return tuple(self._unheard.values())

    def close(self) -> None:
        """Stop watching; the thread has ended when this returns. Closing twice is harmless."""
        if self._stop < 0:
            return
        os.eventfd_write(self._stop, 1)
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)
        os.close(self._stop)
        self._stop = -1
        for source in self._sockets.values():
            source.close()

    def _run(self) -> None:
        stop = self._stop
        sources = {source.fileno(): (what, source) for what, source in self._sockets.items()}
        poller = select.poll()
        for descriptor in (stop, *sources):
            poller.register(descriptor, select.POLLIN)
        ending = select.poll()
        ending.register(stop, select.POLLIN)
        lost = False
        while True:
            ready = dict(poller.poll(0 if lost else None))
            if stop in ready or ending.poll(self._gather_milliseconds):
                return
            lost_now = False
            for descriptor in ready:
                what, source = sources[descriptor]
                try:
                    for packet in _packets(source):
                        self._tell(what, packet)
                except OSError as error:
                    if error.errno == errno.ENOBUFS:
                        lost_now = True
                    else:
                        poller.unregister(descriptor)
                        self._unheard[what] = f"{what} cannot be heard any more: {error}"
            if lost and not lost_now:
                # Not before all is read: until then the kernel drops what comes, and says so no second time
                # (net/netlink/af_netlink.c, netlink_overrun).
                self._on_event("kernel events were lost", EVERYTHING)
            lost = lost_now

    def _tell(self, what: str, packet: bytes) -> None:
        if what == LINK_MESSAGES:
            for text, change in link_events(
                packet, virtual_links=self._virtual_links, device_attribute=self._device_attribute
            ):
                self._on_event(text, change)
        elif (event := parsed(packet)) is not None:
            found = change_of(event, virtual_links=self._virtual_links)
            if found is not None:
                self._on_event(str(event), found)


def _packets(source: socket.socket) -> Iterator[bytes]:
    """Read all that waits. What a process sent, not the kernel, is dropped."""
    while True:
        try:
            packet, sender = source.recvfrom(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        if sender[0] == 0:
            yield packet


def _open(protocol: int) -> socket.socket:
    source = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, protocol)
    try:
        source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        source.bind((0, _GROUP))
    except OSError:
        source.close()
        raise
    return source
