"""RDMA netlink: the system's namespace mode, RDMA devices, their character devices, and their moves.

Attributes follow the netlink header at once, there is no family header. Numbers: include/uapi/rdma/rdma_netlink.h.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import attrgetter
from typing import TypeVar

from agent.errors import DeviceBusy, DriverUnavailable, HardwareError, NetlinkFailed
from agent.hardware import netns as namespaces
from agent.hardware.host import RdmaLink
from agent.hardware.netlink.rtnetlink import NetlinkSocket, attribute, attribute_table, text, text_attribute, word

WAIT_SECONDS = 20.0
"""How long a device waits for another's step. A driver that hangs in one must not hold up every other pod for ever."""
NETLINK_RDMA = 20
RDMA_NL_NLDEV = 5
CMD_GET, CMD_SET, CMD_PORT_GET, CMD_SYS_GET, CMD_GET_CHARDEV = 1, 2, 5, 6, 15
DEV_INDEX, DEV_NAME, PORT_INDEX, NODE_GUID, NETDEV_INDEX = 1, 2, 3, 6, 50
NETNS_MODE, NET_NS_FD, CHARDEV_TYPE, CHARDEV_NAME = 66, 68, 69, 70
MODES = ("exclusive", "shared")  # RDMA_NLDEV_SYS_ATTR_NETNS_MODE: 0 exclusive, 1 shared

_ANSWER_SECONDS = 60.0
_ABSENT = (errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT)

Attributes = Mapping[int, bytes]
T = TypeVar("T")

log = logging.getLogger(__name__)


def decode_mode(found: Attributes) -> str:
    """Name the mode in an answer to SYS_GET. Kernels without the attribute know shared only."""
    number = found.get(NETNS_MODE, b"\1")[0]
    return MODES[number] if number < len(MODES) else f"unknown mode {number}"


def decode_device(found: Attributes) -> RdmaLink:
    """Read one device of an answer to GET."""
    digits = f"{_number(found, NODE_GUID):016x}"
    guid = ":".join(digits[i : i + 4] for i in range(0, 16, 4))  # as sysfs node_guid spells it
    return RdmaLink(_number(found, DEV_INDEX), text(found.get(DEV_NAME, b"")), guid)


def _number(found: Attributes, kind: int) -> int:
    return int.from_bytes(found.get(kind, b""), sys.byteorder)


def _name(found: Attributes) -> bytes:
    return found.get(DEV_NAME, b"").rstrip(b"\0")


class RdmaNetlink:
    """`host.Rdma` on the real kernel. A socket for each call; any thread may call."""

    def __init__(self, connect: Callable[[], NetlinkSocket] | None = None, wait_seconds: float = WAIT_SECONDS) -> None:
        """`connect` opens a socket in the namespace of the calling thread; a test may have another kernel.

        `wait_seconds` is how long one device waits for another's step that renumbers.
        """
        self._connect = connect or partial(NetlinkSocket, None, NETLINK_RDMA, _ANSWER_SECONDS)
        self._host_netns = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self._renumbering = Renumbering(wait_seconds)

    def close(self) -> None:
        """Let go of the host's namespace. Whoever comes later gets a HardwareError."""
        if self._host_netns >= 0:
            # A device that is late must not take for the host what gets this number next.
            descriptor, self._host_netns = self._host_netns, -1
            os.close(descriptor)

    def mode(self) -> str | None:
        """Return `shared` or `exclusive`, None where the kernel has no RDMA."""
        try:
            return decode_mode(self._answer("query the RDMA namespace mode", None, CMD_SYS_GET, b""))
        except DriverUnavailable:
            return None

    def devices(self, netns: int | None = None) -> tuple[RdmaLink, ...]:
        """List the RDMA devices that are seen in a namespace, by index."""
        return tuple(sorted(map(decode_device, self._all(netns)), key=attrgetter("index")))

    def find(self, names: Collection[str]) -> RdmaLink | None:
        """Find a device of the host by its name, as a folder is listed: a pod may have called it anything."""
        for found in self._all(None):
            if os.fsdecode(_name(found)) in names:
                return decode_device(found)
        return None

    def is_over_own_interface(self, name: str) -> bool:
        """Tell whether a device, named as a folder is listed, runs over an interface of the host.

        The kernel names a port's interface to its own namespace only (drivers/infiniband/core/nldev.c,
        fill_port_info), while sysfs spells the name of any. Who cannot be asked about is not taken for one.
        """
        try:
            found = self.find({name})
            if found is None:
                return False
            body = word(DEV_INDEX, found.index) + word(PORT_INDEX, 1)
            action = f"look up the interface of RDMA device {found.name}"
            return NETDEV_INDEX in self._answer(action, None, CMD_PORT_GET, body)
        except HardwareError as error:
            log.warning("an RDMA device of software is left out: %s", error)
            return False

    def char_device(self, device: RdmaLink, kind: str, port: int | None = None, netns: int | None = None) -> str:
        """Name a character device: `uverbs`, or `umad` and `issm`, which need the port."""
        body = word(DEV_INDEX, device.index) + text_attribute(CHARDEV_TYPE, kind)
        if port is not None:
            body += word(PORT_INDEX, port)
        found = self._answer(f"look up {kind} of RDMA device {device.name}", netns, CMD_GET_CHARDEV, body)
        return text(found.get(CHARDEV_NAME, b""))

    def move_in(self, device: RdmaLink, netns: int) -> None:
        """Move a device from the host into a namespace."""
        self._move(device, None, netns)

    def move_out(self, device: RdmaLink, netns: int) -> None:
        """Move a device from a namespace back to the host."""
        self._move(device, netns, self._host_netns)

    def rename(self, device: RdmaLink, name: str, netns: int | None = None) -> None:
        """Rename a device. Names are unique over all namespaces of the system."""
        body = word(DEV_INDEX, device.index) + text_attribute(DEV_NAME, name)
        self._set(f"rename RDMA device {device.name} to {name}", netns, body)

    def renumbering(self, device: str) -> AbstractContextManager[object]:
        """Keep everybody else from moving devices. The agent is the only one of its node. Raises DeviceBusy."""
        return self._renumbering.held(device)

    def _move(self, device: RdmaLink, source: int | None, target: int) -> None:
        body = word(DEV_INDEX, device.index) + attribute(NET_NS_FD, struct.pack("=i", target))
        with self._renumbering.held(device.name):
            self._set(f"move RDMA device {device.name} to another network namespace", source, body)

    def _set(self, action: str, netns: int | None, body: bytes) -> None:
        self._within(action, netns, lambda rdma: rdma.ask(_command(CMD_SET), 0, body))

    def _all(self, netns: int | None) -> list[Attributes]:
        return self._within("list RDMA devices", netns, lambda rdma: rdma.dump(_command(CMD_GET), b"", attribute_table))

    def _answer(self, action: str, netns: int | None, command: int, body: bytes) -> Attributes:
        found = self._within(action, netns, lambda rdma: rdma.answer(_command(command), body, ()))
        return attribute_table(found or b"")

    def _within(self, action: str, netns: int | None, work: Callable[[NetlinkSocket], T]) -> T:
        if self._host_netns < 0:
            raise HardwareError("RDMA netlink is closed: the agent is ending")

        def asked() -> T:
            with self._connect() as rdma:
                return work(rdma)

        with _translated(action):
            # Not only the socket but the asking thread must be in the namespace: the kernel takes a
            # device out of that of `current` (drivers/infiniband/core/device.c, ib_device_set_netns_put).
            return asked() if netns is None else namespaces.run_in(netns, asked)


def _command(number: int) -> int:
    return RDMA_NL_NLDEV << 10 | number


class Renumbering:
    """A lock that a thread may take again while it has it, and that knows which device it is held for."""

    def __init__(self, seconds: float = WAIT_SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.RLock()
        self._holder = ""

    @contextmanager
    def held(self, device: str) -> Iterator[None]:
        """Hold the lock for a device's step. Raises DeviceBusy if another's is not over in time."""
        if not self._lock.acquire(timeout=self._seconds):
            raise DeviceBusy(
                f"{device} has waited {self._seconds:g} s for the RDMA devices' numbers: {self._holder or 'another'}"
                " is still being moved or bound again; if that goes on, look at dmesg for what its driver waits for"
            )
        outer, self._holder = self._holder, self._holder or device
        try:
            yield
        finally:
            self._holder = outer
            self._lock.release()


@contextmanager
def _translated(action: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _ABSENT:
            raise DriverUnavailable(f"{action}: the kernel has no RDMA: load the ib_core module") from error
        raise NetlinkFailed(action, error.errno or 0, error.strerror or str(error)) from error
