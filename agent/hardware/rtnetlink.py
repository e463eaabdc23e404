"""rtnetlink's link requests, spoken directly: a pod's start waits for them.

A library that knows all of netlink takes longer to decode one link than the kernel takes for the
whole request, and a list of a thousand links keeps the other threads waiting for most of a second.
Nothing but links is known here. Layout: include/uapi/linux/netlink.h, rtnetlink.h and if_link.h.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeVar

from agent.errors import NetlinkFailed
from agent.hardware import netns as namespaces
from agent.hardware.address_messages import RTM_GETROUTE, RTM_NEWADDR, RTM_NEWROUTE, default_question, default_ways
from agent.hardware.link_messages import (
    IFF_ALLMULTI,
    IFF_MULTICAST,
    IFF_NOARP,
    IFF_PROMISC,
    IFF_UP,
    IFLA_ADDRESS,
    IFLA_ALT_IFNAME,
    IFLA_BROADCAST,
    IFLA_EXT_MASK,
    IFLA_GROUP,
    IFLA_IFALIAS,
    IFLA_IFNAME,
    IFLA_LINKMODE,
    IFLA_MTU,
    IFLA_NET_NS_FD,
    IFLA_PROP_LIST,
    IFLA_TXQLEN,
    IFLA_XDP,
    IFLA_XDP_FD,
    IFLA_XDP_FLAGS,
    IFNAMSIZ,
    OFFLOAD_LIMITS,
    RTM_DELLINK,
    RTM_NEWLINK,
    LinkMessage,
    decode,
    messages,
)

NLMSG_ERROR, NLMSG_DONE, RTM_GETLINK, RTM_SETLINK = 2, 3, 18, 19
RTM_NEWLINKPROP, RTM_DELLINKPROP = 108, 109
NLM_F_REPLACE, NLM_F_EXCL, NLM_F_CREATE = 0x100, 0x200, 0x400
NLM_F_REQUEST, NLM_F_ACK, NLM_F_DUMP_INTR, NLM_F_DUMP = 0x1, 0x4, 0x10, 0x300
NLA_F_NESTED = 0x8000
RTEXT_FILTER_VF, RTEXT_FILTER_SKIP_STATS = 1, 8

_XDP_FLAGS = {1: (4,), 2: (2,), 3: (8,), 4: (2, 4, 8)}
"""XDP_ATTACHED_{DRV,SKB,HW,MULTI} to XDP_FLAGS_{DRV,SKB,HW}_MODE: the kernel detaches in the mode that is named."""

_HEADER = struct.Struct("=IHHII")
_LINK = struct.Struct("=BxHiII")
_ATTRIBUTE = struct.Struct("=HH")
_WORD = struct.Struct("=I")
_ERROR = struct.Struct("=i")
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EINVAL)
"""There is none, or one that refuses: unreachable, prohibit, blackhole."""
_DUMP_TRIES = 20
_RECEIVE_BYTES = 96 << 10
"""A link may have 64 KiB of other names (net/core/rtnetlink.c, rtnl_alt_ifname), and its device is told after them."""
_RECEIVE_BYTES_WITH_VFS = 1 << 20
"""More than 4,000 VFs take; a longer answer would be cut, and VFs that are cut off are not found."""

NO_REMEDIES: Mapping[int, str] = MappingProxyType({})

T = TypeVar("T")


class LinkSocket:
    """A socket in one network namespace, whichever thread uses it. One question at a time; close it."""

    def __init__(self, netns: int | None = None) -> None:
        """`netns` is the descriptor of a namespace; None for that of the calling thread."""
        self._socket = _open() if netns is None else namespaces.run_in(netns, _open)

    def __enter__(self) -> LinkSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def find(self, name: str) -> LinkMessage | None:
        """Look a link up by its name, or by another name of it. Raises OSError."""
        found = self.described(name)
        return decode(found) if found is not None else None

    def described(self, name: str) -> bytes | None:
        """Look a link up as `find` does, and return what `decode` takes."""
        encoded = name.encode(errors="surrogateescape") + b"\0"
        kind = IFLA_IFNAME if len(encoded) <= IFNAMSIZ else IFLA_ALT_IFNAME
        self._send(RTM_GETLINK, NLM_F_REQUEST, _ANY_LINK + _attribute(kind, encoded))
        answer = self._receive(_RECEIVE_BYTES)  # one message
        if _HEADER.unpack_from(answer)[1] == RTM_NEWLINK:
            return answer[_HEADER.size :]
        try:
            _raise(answer, _HEADER.size)
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise
        return None

    def find_with_vfs(self, name: str, *, statistics: bool = False) -> tuple[int, bytes] | None:
        """Look a PF up by name, with all its VFs: its index, and the attributes as they came. Raises OSError."""
        mask = _attribute(IFLA_EXT_MASK, _WORD.pack(RTEXT_FILTER_VF | (0 if statistics else RTEXT_FILTER_SKIP_STATS)))
        body = _link(0) + mask + _text(IFLA_IFNAME, name)
        self._send(RTM_GETLINK, NLM_F_REQUEST, body)
        for answer, _, payload in messages(self._receive(_RECEIVE_BYTES_WITH_VFS)):
            if answer == NLMSG_ERROR:
                try:
                    _raise(payload)
                except OSError as error:
                    if error.errno != errno.ENODEV:
                        raise
            if answer == RTM_NEWLINK:
                return decode(payload[: _LINK.size]).ifindex, payload[_LINK.size :]
        return None

    def set_vf(self, ifindex: int, attribute: bytes) -> None:
        """Change what a PF enforces on a VF: an attribute of `vf_settings`. Raises OSError."""
        self._ask(RTM_SETLINK, NLM_F_ACK, _link(ifindex) + attribute)

    def all(self) -> list[LinkMessage]:
        """List all links. Raises OSError."""
        return self.chosen(lambda link: link)

    def chosen(self, read: Callable[[LinkMessage], T | None]) -> list[T]:
        """List what is made of the links, but None. Raises OSError.

        Nothing else is kept: a pod may have made thousands of links, each of 64 KiB.
        """
        for _ in range(_DUMP_TRIES):
            try:
                return self._chosen(read)
            except InterruptedError:
                continue  # links came or went meanwhile, and some may be missing
        raise OSError(errno.EAGAIN, "the list of interfaces changes all the time")

    def _chosen(self, read: Callable[[LinkMessage], T | None]) -> list[T]:
        found: list[T] = []

        def take(link: LinkMessage) -> None:
            if (made := read(link)) is not None:
                found.append(made)

        self._ask(RTM_GETLINK, NLM_F_DUMP, _ANY_LINK, take)
        return found

    def change(
        self,
        ifindex: int,
        *,
        name: str | None = None,
        mac: str | None = None,
        mtu: int | None = None,
        up: bool | None = None,
        promisc: bool | None = None,
        allmulti: bool | None = None,
        arp: bool | None = None,
        multicast: bool | None = None,
        tx_queue: int | None = None,
        group: int | None = None,
        alias: str | None = None,
        broadcast: str | None = None,
        link_mode: int | None = None,
        limits: tuple[int, ...] | None = None,
        netns: int | None = None,
    ) -> None:
        """Change a link in one request; with `netns` it moves to that namespace first. Raises OSError."""
        no_arp = not arp if arp is not None else None
        asked = (
            *((IFF_UP, up), (IFF_PROMISC, promisc), (IFF_ALLMULTI, allmulti)),
            *((IFF_NOARP, no_arp), (IFF_MULTICAST, multicast)),
        )
        flags = change = 0
        for bit, on in asked:
            if on is not None:
                change |= bit
                flags |= bit if on else 0
        request = _link(ifindex, flags=flags, change=change)
        if netns is not None:
            request += _attribute(IFLA_NET_NS_FD, _WORD.pack(netns))
        if name is not None:
            request += _text(IFLA_IFNAME, name)
        if mac is not None:
            request += _attribute(IFLA_ADDRESS, bytes.fromhex(mac.replace(":", "")))
        if mtu is not None:
            request += _attribute(IFLA_MTU, _WORD.pack(mtu))
        if tx_queue is not None:
            request += _attribute(IFLA_TXQLEN, _WORD.pack(tx_queue))
        if group is not None:
            request += _attribute(IFLA_GROUP, _WORD.pack(group))
        if alias is not None:
            request += _attribute(IFLA_IFALIAS, alias.encode())
        if broadcast is not None:
            request += _attribute(IFLA_BROADCAST, bytes.fromhex(broadcast.replace(":", "")))
        if link_mode is not None:
            request += _attribute(IFLA_LINKMODE, bytes((link_mode,)))
        for kind, limit in zip(OFFLOAD_LIMITS, limits or (), strict=False):
            if limit:
                request += _attribute(kind, _WORD.pack(limit))
        self._ask(RTM_NEWLINK, NLM_F_ACK, request)

    def create(self, body: bytes) -> None:
        """Make a link: a body of `child_messages`. Raises OSError, EEXIST if the name is taken."""
        self._ask(RTM_NEWLINK, NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL, body)

    def remove(self, ifindex: int) -> None:
        """Remove a link of software. One that is gone is success. Raises OSError."""
        try:
            self._ask(RTM_DELLINK, NLM_F_ACK, _link(ifindex))
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise

    def put_address(self, body: bytes) -> None:
        """Give a link an address: a body of `address_messages`. One that it has is success. Raises OSError."""
        self._ask(RTM_NEWADDR, NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE, body)

    def put_route(self, body: bytes) -> None:
        """Make a route: a body of `address_messages`. One that is there is success. Raises OSError.

        Before those to the same destination through other interfaces, not in their place: what is bound to one of
        these, as RDMA-CM is by its address, needs its own. As the library of the CNI plugins does.
        """
        try:
            self._ask(RTM_NEWROUTE, NLM_F_ACK | NLM_F_CREATE, body)
        except OSError as error:
            if error.errno != errno.EEXIST:
                raise

    def default_ways(self) -> tuple[int, ...]:
        """List the interfaces that the default route of IPv4 goes through, by number. Raises OSError."""
        self._send(RTM_GETROUTE, NLM_F_REQUEST, default_question())
        answer = self._receive(_RECEIVE_BYTES)
        if _HEADER.unpack_from(answer)[1] == RTM_NEWROUTE:
            return default_ways(answer[_HEADER.size :])
        try:
            _raise(answer, _HEADER.size)
        except OSError as error:
            if error.errno not in _NO_ROUTE:
                raise
        return ()

    def add_altname(self, ifindex: int, altname: str) -> None:
        """Give a link another name. Raises OSError, EEXIST if any link has it, this one included."""
        self._ask(RTM_NEWLINKPROP, NLM_F_ACK, _link(ifindex) + _altname(altname))

    def remove_altname(self, ifindex: int, altname: str) -> None:
        """Take another name away from a link. Raises OSError, ENOENT if it has none such."""
        self._ask(RTM_DELLINKPROP, NLM_F_ACK, _link(ifindex) + _altname(altname))

    def detach_xdp(self, ifindex: int, attached: int) -> None:
        """Detach XDP programs, `attached` being what `LinkMessage.xdp` told. Raises OSError, EBUSY for a bpf_link's."""
        for flag in _XDP_FLAGS.get(attached, ()):
            nothing = _attribute(IFLA_XDP_FD, _ERROR.pack(-1)) + _attribute(IFLA_XDP_FLAGS, _WORD.pack(flag))
            self._ask(RTM_NEWLINK, NLM_F_ACK, _link(ifindex) + _attribute(IFLA_XDP | NLA_F_NESTED, nothing))

    def _ask(self, kind: int, flags: int, body: bytes, take: Callable[[LinkMessage], None] = lambda link: None) -> None:
        self._send(kind, NLM_F_REQUEST | flags, body)
        disturbed = False
        while True:
            for answer, marks, payload in messages(self._receive(_RECEIVE_BYTES)):
                disturbed = disturbed or bool(marks & NLM_F_DUMP_INTR)
                if answer == RTM_NEWLINK:
                    take(decode(payload))
                if answer in (NLMSG_ERROR, NLMSG_DONE):
                    _raise(payload)
                    if disturbed:
                        raise InterruptedError(errno.EINTR, "the list was disturbed")
                    return

    def _receive(self, most: int) -> bytes:
        """Receive what the kernel says. What a process sends, a pod's for one, is dropped."""
        while True:
            packet, sender = self._socket.recvfrom(most)
            if sender[0] == 0:
                return packet

    def _send(self, kind: int, flags: int, body: bytes) -> None:
        self._socket.send(_HEADER.pack(_HEADER.size + len(body), kind, flags, 1, 0) + body)


def failed(action: str, error: OSError, remedies: Mapping[int, str] = NO_REMEDIES) -> NetlinkFailed:
    """Say what was attempted when an error came, and what helps against one of this number."""
    number, text = error.errno or 0, error.strerror or str(error)
    return NetlinkFailed(action, number, f"{text}: {remedies[number]}" if number in remedies else text)


class translated:
    """Raise NetlinkFailed, with what was attempted and what may help, for an OSError."""

    __slots__ = ("_action", "_remedies")

    def __init__(self, action: str, remedies: Mapping[int, str] = NO_REMEDIES) -> None:
        self._action = action
        self._remedies = remedies

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, OSError):
            raise failed(self._action, error, self._remedies) from error


def _open() -> socket.socket:
    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)


def _raise(payload: bytes, start: int = 0) -> None:
    (negative,) = _ERROR.unpack_from(payload, start)
    if negative < 0:
        raise OSError(-negative, os.strerror(-negative))


def _link(ifindex: int, *, flags: int = 0, change: int = 0) -> bytes:
    return _LINK.pack(socket.AF_UNSPEC, 0, ifindex, flags, change)


def _altname(altname: str) -> bytes:
    return _attribute(IFLA_PROP_LIST | NLA_F_NESTED, _text(IFLA_ALT_IFNAME, altname))


def _text(kind: int, value: str) -> bytes:
    return _attribute(kind, value.encode(errors="surrogateescape") + b"\0")


def _attribute(kind: int, payload: bytes) -> bytes:
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(payload), kind) + payload + b"\0" * (-len(payload) % 4)


_ANY_LINK = _link(0) + _attribute(IFLA_EXT_MASK, _WORD.pack(RTEXT_FILTER_SKIP_STATS))
"""What asks for links without their statistics begins so."""
