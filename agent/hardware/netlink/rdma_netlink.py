"""RDMA netlink: the system's namespace mode, RDMA devices, their character devices, and their moves.

Encoding and decoding are pure; `RdmaNetlink` puts a socket around them. Attributes follow the
netlink header at once, there is no family header. Numbers: include/uapi/rdma/rdma_netlink.h.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import attrgetter

from agent.errors import DeviceBusy, DriverUnavailable, HardwareError, NetlinkFailed
from agent.hardware import netns as namespaces
from agent.hardware.host import RdmaLink
from agent.hardware.netlink.codec import (
    NLM_F_ACK,
    NLM_F_DUMP,
    NLMSG_DONE,
    NLMSG_ERROR,
    attribute,
    attribute_table,
    messages,
    request,
    text,
)

WAIT_SECONDS = 20.0
"""How long a device waits for another's step. A driver that hangs in one must not hold up every other pod for ever."""
NETLINK_RDMA = 20
RDMA_NL_NLDEV = 5
CMD_GET, CMD_SET, CMD_PORT_GET, CMD_SYS_GET, CMD_GET_CHARDEV = 1, 2, 5, 6, 15
DEV_INDEX, DEV_NAME, PORT_INDEX, NODE_GUID, NETDEV_INDEX = 1, 2, 3, 6, 50
NETNS_MODE, NET_NS_FD, CHARDEV_TYPE, CHARDEV_NAME = 66, 68, 69, 70
MODES = ("exclusive", "shared")  # RDMA_NLDEV_SYS_ATTR_NETNS_MODE: 0 exclusive, 1 shared

_ERROR = struct.Struct("=i")
_ANSWER_SECONDS = 60.0
_RECEIVE_BYTES = 1 << 16
_ABSENT = (errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT)

Attributes = Mapping[int, bytes]

log = logging.getLogger(__name__)


# ------------------------------------------------------------------------ codec


def encode(command: int, flags: int, *attached: tuple[int, int | str]) -> bytes:
    """Make a request. A number becomes 32 bits; a text ends with a zero."""
    body = b"".join(_attribute(kind, value) for kind, value in attached)
    return request(RDMA_NL_NLDEV << 10 | command, flags, body)


def decode_mode(found: Attributes) -> str:
    """Name the mode in an answer to SYS_GET. Kernels without the attribute know shared only."""
    number = found.get(NETNS_MODE, b"\1")[0]
    return MODES[number] if number < len(MODES) else f"unknown mode {number}"


def decode_device(found: Attributes) -> RdmaLink:
    """Read one device of an answer to GET."""
    digits = f"{_number(found, NODE_GUID):016x}"
    guid = ":".join(digits[i : i + 4] for i in range(0, 16, 4))  # as sysfs node_guid spells it
    return RdmaLink(_number(found, DEV_INDEX), text(found.get(DEV_NAME, b"")), guid)


def _attribute(kind: int, value: int | str) -> bytes:
    return attribute(kind, value.encode() + b"\0" if isinstance(value, str) else struct.pack("=I", value))


def _number(found: Attributes, kind: int) -> int:
    return int.from_bytes(found.get(kind, b""), "little" if struct.pack("=H", 1) == b"\1\0" else "big")


def _name(found: Attributes) -> bytes:
    return found.get(DEV_NAME, b"").rstrip(b"\0")


# ----------------------------------------------------------------------- socket


class RdmaNetlink:
    """`host.Rdma` on the real kernel. A socket for each call; any thread may call."""

    def __init__(self, connect: Callable[[], socket.socket] | None = None, wait_seconds: float = WAIT_SECONDS) -> None:
        """`connect` opens a socket in the namespace of the calling thread; a test may have another kernel.

        `wait_seconds` is how long one device waits for another's step that renumbers.
        """
        self._connect = connect or _connect
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
            return decode_mode(self._ask_one("query the RDMA namespace mode", None, encode(CMD_SYS_GET, 0)))
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
            request = encode(CMD_PORT_GET, 0, (DEV_INDEX, found.index), (PORT_INDEX, 1))
            return NETDEV_INDEX in self._ask_one(f"look up the interface of RDMA device {found.name}", None, request)
        except HardwareError as error:
            log.warning("an RDMA device of software is left out: %s", error)
            return False

    def char_device(self, device: RdmaLink, kind: str, port: int | None = None, netns: int | None = None) -> str:
        """Name a character device: `uverbs`, or `umad` and `issm`, which need the port."""
        wanted: list[tuple[int, int | str]] = [(DEV_INDEX, device.index), (CHARDEV_TYPE, kind)]
        if port is not None:
            wanted.append((PORT_INDEX, port))
        action = f"look up {kind} of RDMA device {device.name}"
        return text(self._ask_one(action, netns, encode(CMD_GET_CHARDEV, 0, *wanted)).get(CHARDEV_NAME, b""))

    def move_in(self, device: RdmaLink, netns: int) -> None:
        """Move a device from the host into a namespace."""
        self._move(device, None, netns)

    def move_out(self, device: RdmaLink, netns: int) -> None:
        """Move a device from a namespace back to the host."""
        self._move(device, netns, self._host_netns)

    def rename(self, device: RdmaLink, name: str, netns: int | None = None) -> None:
        """Rename a device. Names are unique over all namespaces of the system."""
        request = encode(CMD_SET, NLM_F_ACK, (DEV_INDEX, device.index), (DEV_NAME, name))
        self._ask(f"rename RDMA device {device.name} to {name}", netns, request)

    def renumbering(self, device: str) -> AbstractContextManager[object]:
        """Keep everybody else from moving devices. The agent is the only one of its node. Raises DeviceBusy."""
        return self._renumbering.held(device)

    def _move(self, device: RdmaLink, source: int | None, target: int) -> None:
        if self._host_netns < 0:
            raise HardwareError("RDMA netlink is closed: the agent is ending")
        request = encode(CMD_SET, NLM_F_ACK, (DEV_INDEX, device.index), (NET_NS_FD, target))
        with self._renumbering.held(device.name):
            self._ask(f"move RDMA device {device.name} to another network namespace", source, request)

    def _all(self, netns: int | None) -> list[Attributes]:
        return self._ask("list RDMA devices", netns, encode(CMD_GET, NLM_F_DUMP))

    def _ask_one(self, action: str, netns: int | None, request: bytes) -> Attributes:
        found = self._ask(action, netns, request)
        if not found:
            raise HardwareError(f"{action}: the kernel says yes, but nothing more")
        return found[0]

    def _ask(self, action: str, netns: int | None, request: bytes) -> list[Attributes]:
        if self._host_netns < 0:
            raise HardwareError("RDMA netlink is closed: the agent is ending")
        with _translated(action):
            # Not only the socket but the asking thread must be in the namespace: the kernel takes a
            # device out of that of `current` (drivers/infiniband/core/device.c, ib_device_set_netns_put).
            if netns is None:
                return exchange(request, self._connect)
            return namespaces.run_in(netns, partial(exchange, request, self._connect))


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


def exchange(request: bytes, connect: Callable[[], socket.socket]) -> list[Attributes]:
    """Send a request and return the attributes of each answer. Raises OSError with the kernel's errno."""
    is_dump = struct.unpack_from("=H", request, 6)[0] & NLM_F_DUMP == NLM_F_DUMP
    found: list[Attributes] = []
    with connect() as rdma:
        rdma.send(request)
        while True:
            for kind, _, payload in messages(rdma.recv(_RECEIVE_BYTES)):
                if kind not in (NLMSG_ERROR, NLMSG_DONE):
                    found.append(attribute_table(payload))
                    continue
                (negative,) = _ERROR.unpack_from(payload)
                if negative < 0:
                    raise OSError(-negative, os.strerror(-negative))
                return found
            if found and not is_dump:
                return found


def _connect() -> socket.socket:
    rdma = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_RDMA)
    rdma.settimeout(_ANSWER_SECONDS)
    return rdma


@contextmanager
def _translated(action: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _ABSENT:
            raise DriverUnavailable(f"{action}: the kernel has no RDMA: load the ib_core module") from error
        raise NetlinkFailed(action, error.errno or 0, error.strerror or str(error)) from error
