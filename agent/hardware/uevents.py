"""Kernel events that may change what a scan sees: uevents and rtnetlink link messages.

Both are read on one thread, from a socket each. Only what they name is passed on: what is true now is for the next look
to see, so an event that was lost costs nothing as long as the loss is told.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

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


LIBUDEV = "libudev.so.1"
RECEIVE_BUFFER_BYTES = 1 << 20
"""Enabling 64 VFs makes some thousand messages within a second."""
GATHER_SECONDS = 0.002
"""An event is seldom alone. And where a pod's start made it, that has its answer out before this thread takes part."""
UEVENTS, LINK_MESSAGES = "uevents", "link messages"
_RTMGRP_LINK = 1
_RECEIVE_BYTES = 1 << 16
_JOIN_SECONDS = 5.0

T = TypeVar("T")

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
        try:
            self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            raise DriverUnavailable(f"kernel events cannot be waited for: {error}") from error
        self._monitor = self._opened(UEVENTS, _open_monitor)
        self._links = self._opened(LINK_MESSAGES, _open_link_socket)
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
        if self._links is not None:
            self._links.close()
        self._monitor = None  # its descriptor closes with the last reference

    def _opened(self, what: str, opening: Callable[[], T]) -> T | None:
        try:
            return opening()
        except OSError as error:
            self._unheard[what] = f"{what} cannot be heard: {error}"
            return None

    def _run(self) -> None:
        stop = self._stop
        sources: dict[int, tuple[str, Callable[[], None]]] = {}
        if self._monitor is not None:
            sources[self._monitor.fileno()] = UEVENTS, partial(self._uevent_batch, self._monitor)
        if self._links is not None:
            sources[self._links.fileno()] = LINK_MESSAGES, partial(self._link_batch, self._links)
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
                what, batch = sources[descriptor]
                try:
                    batch()
                except OSError as error:
                    # pyudev says of an overflow only that there is an error, and leaves it on the socket.
                    if (error.errno or _taken_error(descriptor)) == errno.ENOBUFS:
                        lost_now = True
                    else:
                        poller.unregister(descriptor)
                        self._unheard[what] = f"{what} cannot be heard any more: {error}"
            if lost and not lost_now:
                # Not before all is read: until then the kernel drops what comes, and says so no second time
                # (net/netlink/af_netlink.c, netlink_overrun).
                self._on_event("kernel events were lost", EVERYTHING)
            lost = lost_now

    def _uevent_batch(self, monitor: Any) -> None:
        while (device := monitor.poll(0)) is not None:
            try:
                event = Uevent(str(device.action), str(device.device_path), str(device.subsystem))
            except UnicodeDecodeError:  # an interface comes back from a pod with any name that the pod gave it
                self._on_event("something whose name is no text", EVERYTHING)
                continue
            change = change_of(event, virtual_links=self._virtual_links)
            if change is not None:
                self._on_event(str(event), change)

    def _link_batch(self, links: socket.socket) -> None:
        for packet in _packets(links):
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


def _taken_error(descriptor: int) -> int:
    """Take the error that waits off a socket, and return its number; 0 if none does."""
    same = socket.socket(fileno=descriptor)  # no descriptor more: there may be none left
    try:
        return same.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    finally:
        same.detach()


def _open_monitor() -> Any:
    from pyudev import Monitor

    monitor = Monitor.from_netlink(_open_udev(), source="kernel")
    for subsystem in SUBSYSTEMS:
        monitor.filter_by(subsystem)
    try:
        monitor.set_receive_buffer_size(RECEIVE_BUFFER_BYTES)
    except OSError as error:
        log.info("uevents keep the kernel's default buffer: %s", error)
    monitor.start()
    return monitor


def _open_udev() -> Any:
    """Make a `pyudev.Context` with libudev by its soname. Raises OSError without one.

    pyudev would ask `ctypes.util.find_library`, which starts ldconfig or gcc. The agent's image has no such programs,
    and on a host one would be forked beside gRPC.
    """
    from pyudev import Context
    from pyudev._ctypeslib.libudev import ERROR_CHECKERS, SIGNATURES

    library = ctypes.CDLL(LIBUDEV, use_errno=True)
    for name, (arguments, result) in SIGNATURES.items():
        # As pyudev._ctypeslib.utils.load_ctypes_library does it.
        function = getattr(library, name, None)
        if function is not None:
            function.argtypes, function.restype = arguments, result
            if (checker := ERROR_CHECKERS.get(name)) is not None:
                function.errcheck = checker
    context = Context.__new__(Context)
    context._libudev = library
    context._as_parameter_ = library.udev_new()
    return context


def _open_link_socket() -> socket.socket:
    links = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        links.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        links.bind((0, _RTMGRP_LINK))
    except OSError:
        links.close()
        raise
    return links
