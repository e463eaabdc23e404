"""Kernel events that may change what a scan sees: uevents and rtnetlink link messages.

Both are read on one thread, from a socket each. Only what they name is passed on: the next look sees what is true then,
so a lost event costs nothing as long as the loss is reported. Layout of uevents: lib/kobject_uevent.c.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from agent.errors import DriverUnavailable
from agent.hardware.netlink.rtnetlink import IFLA_PARENT_DEV_NAME, link_events
from agent.model.change import EVERYTHING, Change, OnEvent, of_function, of_netdev
from agent.model.device import is_pci_address

SUBSYSTEMS = ("pci", "net", "infiniband", "infiniband_verbs", "infiniband_mad", "vdpa", "cxi", "misc")
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

    @classmethod
    def parse(cls, packet: bytes) -> Uevent:
        """Read what the kernel sends: `ACTION@PATH`, then `KEY=VALUE`, each with a zero behind it.

        Raises UnicodeDecodeError for what is no text.
        """
        said = dict(part.partition("=")[::2] for part in packet.decode().split("\0"))
        return cls(said.get("ACTION", ""), said.get("DEVPATH", ""), said.get("SUBSYSTEM", ""))


def change_of(event: Uevent, *, virtual_links: bool = False) -> Change | None:
    """Return what an event is about; None for nothing that a scan shows.

    Interfaces that no hardware stands behind (every pod's veth) are nothing, unless `virtual_links`
    asks for them.
    """
    if event.subsystem not in SUBSYSTEMS:
        return None
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
_KOBJECT_UEVENT, _FROM_KERNEL, _RTMGRP_LINK = 15, 1, 1
_SO_RCVBUFFORCE = 33
_RECEIVE_BYTES = 1 << 16
_JOIN_SECONDS = 5.0


class Uevents:
    """A running watch. `on_event` is called on its thread and must neither block nor raise.

    Interfaces that no hardware stands behind (every pod's veth) are passed over, unless
    `virtual_links` asks for them too. `device_attribute` is where link messages name the function.
    Raises DriverUnavailable where kernel events cannot be heard.
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
        self.unheard: Sequence[str] = ()
        """Why nothing is heard any more."""
        try:
            with ExitStack() as opened:
                self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                opened.callback(os.close, self._stop)
                self._uevents = opened.enter_context(_listening(_KOBJECT_UEVENT, _FROM_KERNEL))
                self._links = opened.enter_context(_listening(socket.NETLINK_ROUTE, _RTMGRP_LINK))
                self._opened = opened.pop_all()
        except OSError as error:
            raise DriverUnavailable(f"kernel events cannot be heard: {error}") from error
        self._thread = threading.Thread(target=self._run, name="uevents", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; the thread has ended when this returns. Closing twice is harmless."""
        if self._thread.is_alive():
            os.eventfd_write(self._stop, 1)
            if self._thread is not threading.current_thread():
                self._thread.join(_JOIN_SECONDS)
        self._opened.close()

    def _run(self) -> None:
        sources = ((self._uevents, self._take_uevent), (self._links, self._take_links))
        poller, ending = select.poll(), select.poll()
        for descriptor in (self._stop, self._uevents, self._links):
            poller.register(descriptor, select.POLLIN)
        ending.register(self._stop, select.POLLIN)
        lost = False
        while True:
            ready = dict(poller.poll(0 if lost else None))
            if self._stop in ready or ending.poll(self._gather_milliseconds):
                return
            lost_now = False
            for source, take in sources:
                try:
                    for packet in _packets(source):
                        take(packet)
                except OSError as error:
                    if error.errno != errno.ENOBUFS:
                        self.unheard = (f"kernel events cannot be heard any more: {error}",)
                        return
                    lost_now = True
            if lost and not lost_now:
                # Not before all is read: until then the kernel drops what comes, and says so no second time
                # (net/netlink/af_netlink.c, netlink_overrun).
                self._on_event("kernel events were lost", EVERYTHING)
            lost = lost_now

    def _take_uevent(self, packet: bytes) -> None:
        try:
            event = Uevent.parse(packet)
        except UnicodeDecodeError:  # an interface comes back from a pod with any name that the pod gave it
            self._on_event("something whose name is no text", EVERYTHING)
            return
        change = change_of(event, virtual_links=self._virtual_links)
        if change is not None:
            self._on_event(str(event), change)

    def _take_links(self, packet: bytes) -> None:
        for what, change in link_events(
            packet, virtual_links=self._virtual_links, device_attribute=self._device_attribute
        ):
            self._on_event(what, change)


def _packets(source: socket.socket) -> Iterator[bytes]:
    """Read all that waits. What a process sent, not the kernel, is dropped."""
    while True:
        try:
            packet, sender = source.recvfrom(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        if sender[0] == 0:
            yield packet


def _listening(protocol: int, group: int) -> socket.socket:
    listening = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, protocol)
    try:
        try:
            listening.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, RECEIVE_BUFFER_BYTES)
        except PermissionError:  # as much as the kernel allows everybody
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        listening.bind((0, group))
    except OSError:
        listening.close()
        raise
    return listening
