"""Kernel events that may change what a scan sees: uevents and rtnetlink link messages.

Both are read on one thread. Only the fact of a change is passed on: what is true now is for the
next scan to see, so a lost event costs nothing as long as some event arrives.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from agent.errors import DriverUnavailable
from agent.hardware.link_messages import link_events

SUBSYSTEMS = ("pci", "net", "infiniband", "infiniband_verbs", "infiniband_mad", "misc")
"""misc: rdma_cm comes and goes with its module."""
RECEIVE_BUFFER_BYTES = 1 << 20
"""Enabling 64 VFs makes some thousand messages within a second."""
_RTMGRP_LINK = 1
_VIRTUAL_NET = "/devices/virtual/net/"
_JOIN_SECONDS = 5.0

log = logging.getLogger(__name__)


class Uevents:
    """A running watch. `on_event(what)` is called on its thread and must neither block nor raise.

    Interfaces that no hardware stands behind (every pod's veth) are passed over, unless
    `virtual_links` asks for them too.
    """

    def __init__(self, on_event: Callable[[str], None], *, virtual_links: bool = False) -> None:
        self._on_event = on_event
        self._virtual_links = virtual_links
        self._monitor = _open_monitor()
        self._links = _open_link_socket()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="uevents", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; the thread has ended when this returns. Closing twice is harmless."""
        if self._stop < 0:
            return
        os.eventfd_write(self._stop, 1)
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)
        os.close(self._stop)
        self._stop = -1
        self._links.close()
        self._monitor = None  # its descriptor closes with the last reference

    def _run(self) -> None:
        stop, uevents, links = self._stop, self._monitor.fileno(), self._links.fileno()
        poller = select.poll()
        for descriptor in (stop, uevents, links):
            poller.register(descriptor, select.POLLIN)
        while True:
            ready = dict(poller.poll())
            if stop in ready:
                return
            try:
                if uevents in ready:
                    self._uevent_batch()
                if links in ready:
                    self._link_batch()
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    log.error("kernel events cannot be read, only the timer finds changes from now on: %s", error)
                    return
                self._on_event("kernel events were lost")

    def _uevent_batch(self) -> None:
        monitor = self._monitor
        for device in iter(partial(monitor.poll, 0), None):
            path = str(device.device_path)
            if path.startswith(_VIRTUAL_NET) and not self._virtual_links:
                continue
            self._on_event(f"{device.subsystem} {device.action} {path.rpartition('/')[2]}")

    def _link_batch(self) -> None:
        while True:
            try:
                message = self._links.recv(1 << 16)
            except BlockingIOError:
                return
            for event in link_events(message, virtual_links=self._virtual_links):
                self._on_event(event)


def _open_monitor() -> Any:
    try:
        import pyudev

        monitor = pyudev.Monitor.from_netlink(pyudev.Context(), source="kernel")
    except (ImportError, OSError) as error:  # ImportError: pyudev without libudev.so
        raise DriverUnavailable(f"kernel uevents cannot be watched: {error}: is libudev installed?") from error
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
    except OSError as error:
        links.close()
        raise DriverUnavailable(f"link events cannot be watched: {error}") from error
    return links
