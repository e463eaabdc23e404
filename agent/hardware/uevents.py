"""Kernel events that may change what a scan sees: uevents and rtnetlink link messages.

Both are read on one thread, from a socket each. Only what they name is passed on: what is true now is for the next look
to see, so an event that was lost costs nothing as long as the loss is told.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from agent.errors import DriverUnavailable
from agent.hardware.link_messages import IFLA_PARENT_DEV_NAME, link_events
from agent.hardware.uevent_messages import SUBSYSTEMS, Uevent, change_of
from agent.model.change import EVERYTHING, OnEvent

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

    from agent.hardware.libudev import UdevContext

    monitor = Monitor.from_netlink(UdevContext(), source="kernel")
    for subsystem in SUBSYSTEMS:
        monitor.filter_by(subsystem)
    try:
        monitor.set_receive_buffer_size(RECEIVE_BUFFER_BYTES)
    except OSError as error:
        log.info("uevents keep the kernel's default buffer: %s", error)
    monitor.start()
    return monitor


def _open_link_socket() -> socket.socket:
    links = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        links.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        links.bind((0, _RTMGRP_LINK))
    except OSError:
        links.close()
        raise
    return links
