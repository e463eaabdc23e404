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
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

from agent.errors import NetlinkFailed
from agent.hardware import netns as namespaces
from agent.hardware.host import LinkChange
from agent.hardware.netlink.codec import (
    HEADER,
    NLA_F_NESTED,
    NLM_F_ACK,
    NLM_F_CREATE,
    NLM_F_DUMP,
    NLM_F_DUMP_INTR,
    NLM_F_EXCL,
    NLMSG_DONE,
    NLMSG_ERROR,
    attribute,
    messages,
    request,
    word,
)
from agent.hardware.netlink.link_messages import (
    IFF_ALLMULTI,
    IFF_MULTICAST,
    IFF_NOARP,
    IFF_PROMISC,
    IFF_UP,
    IFLA_ADDRESS,
    IFLA_ALT_IFNAME,
    IFLA_EXT_MASK,
    IFLA_IFNAME,
    IFLA_MASTER,
    IFLA_MTU,
    IFLA_NET_NS_FD,
    IFLA_PROP_LIST,
    IFLA_XDP,
    IFLA_XDP_FD,
    IFLA_XDP_FLAGS,
    IFNAMSIZ,
    LINK,
    RTM_DELLINK,
    RTM_NEWLINK,
    LinkMessage,
    decode,
)

RTM_GETLINK, RTM_SETLINK = 18, 19
RTM_NEWLINKPROP, RTM_DELLINKPROP = 108, 109
RTEXT_FILTER_VF, RTEXT_FILTER_SKIP_STATS = 1, 8

_XDP_FLAGS = {1: (4,), 2: (2,), 3: (8,), 4: (2, 4, 8)}
"""XDP_ATTACHED_{DRV,SKB,HW,MULTI} to XDP_FLAGS_{DRV,SKB,HW}_MODE: the kernel detaches in the mode that is named."""

_ERROR = struct.Struct("=i")
_DUMP_TRIES = 20
_RECEIVE_BYTES = 96 << 10
"""A link may have 64 KiB of other names (net/core/rtnetlink.c, rtnl_alt_ifname), and its device is told after them."""
_RECEIVE_BYTES_WITH_VFS = 1 << 20
"""More than 4,000 VFs take; a longer answer would be cut, and VFs that are cut off are not found."""

_MOST_IDLE = 4

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
        self._send(RTM_GETLINK, 0, _ANY_LINK + attribute(kind, encoded))
        answer = self._receive(_RECEIVE_BYTES)  # one message
        if HEADER.unpack_from(answer)[1] == RTM_NEWLINK:
            return answer[HEADER.size :]
        try:
            _raise(answer, HEADER.size)
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise
        return None

    def find_with_vfs(self, name: str, *, statistics: bool = False) -> tuple[int, bytes] | None:
        """Look a PF up by name, with all its VFs: its index, and the attributes as they came. Raises OSError."""
        mask = word(IFLA_EXT_MASK, RTEXT_FILTER_VF | (0 if statistics else RTEXT_FILTER_SKIP_STATS))
        body = _link(0) + mask + _text(IFLA_IFNAME, name)
        self._send(RTM_GETLINK, 0, body)
        for answer, _, payload in messages(self._receive(_RECEIVE_BYTES_WITH_VFS)):
            if answer == NLMSG_ERROR:
                try:
                    _raise(payload)
                except OSError as error:
                    if error.errno != errno.ENODEV:
                        raise
            if answer == RTM_NEWLINK:
                return decode(payload[: LINK.size]).ifindex, payload[LINK.size :]
        return None

    def set_vf(self, ifindex: int, attribute: bytes) -> None:
        """Change what a PF enforces on a VF: an attribute of `vf_settings`. Raises OSError."""
        self._ask(RTM_SETLINK, NLM_F_ACK, _link(ifindex) + attribute)

    def all(self) -> list[LinkMessage]:
        """List all links. Raises OSError."""
        return self.chosen(_as_it_is)

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
        self, ifindex: int, wanted: LinkChange, netns: int | None = None
    ) -> None:
        """Change a link in one request; with `netns` it moves to that namespace first. Raises OSError."""
        no_arp = not wanted.arp if wanted.arp is not None else None
        asked = (
            *((IFF_UP, wanted.up), (IFF_PROMISC, wanted.promisc), (IFF_ALLMULTI, wanted.allmulti)),
            *((IFF_NOARP, no_arp), (IFF_MULTICAST, wanted.multicast)),
        )
        flags = change = 0
        for bit, on in asked:
            if on is not None:
                change |= bit
                flags |= bit if on else 0
        request = _link(ifindex, flags=flags, change=change)
        if netns is not None:
            request += word(IFLA_NET_NS_FD, netns)
        if wanted.name is not None:
            request += _text(IFLA_IFNAME, wanted.name)
        if wanted.mac is not None:
            request += attribute(IFLA_ADDRESS, bytes.fromhex(wanted.mac.replace(":", "")))
        if wanted.mtu is not None:
            request += word(IFLA_MTU, wanted.mtu)
        if wanted.master is not None:
            request += word(IFLA_MASTER, wanted.master)
        self._ask(RTM_NEWLINK, NLM_F_ACK, request)

    def create(self, body: bytes) -> None:
        """Make a link: a body of `link_messages`. Raises OSError, EEXIST if the name is taken."""
        self._ask(RTM_NEWLINK, NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL, body)

    def remove(self, ifindex: int) -> None:
        """Remove a link of software. One that is gone is success. Raises OSError."""
        try:
            self._ask(RTM_DELLINK, NLM_F_ACK, _link(ifindex))
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise

    def ask_all(self, asked: Sequence[tuple[int, int, bytes]]) -> dict[int, int]:
        """Ask for one thing after the other in one go: type, flags and body of each.

        Returns the error numbers of what was refused, by its place among them. Raises OSError.
        """
        last, refused = len(asked) - 1, dict[int, int]()
        # What is refused is told anyhow (net/netlink/af_netlink.c, netlink_rcv_skb), the last one in any case.
        acked = [*asked[:-1], *((kind, flags | NLM_F_ACK, body) for kind, flags, body in asked[-1:])]
        self._socket.send(b"".join(request(*one, number) for number, one in enumerate(acked)))
        while True:
            answer = self._receive(_RECEIVE_BYTES)
            _, kind, _, number, _ = HEADER.unpack_from(answer)
            if kind == NLMSG_ERROR:
                if negative := _ERROR.unpack_from(answer, HEADER.size)[0]:
                    refused[number] = -negative
                if number == last:
                    return refused

    def add_altname(self, ifindex: int, altname: str) -> None:
        """Give a link another name. Raises OSError, EEXIST if any link has it, this one included."""
        self._ask(RTM_NEWLINKPROP, NLM_F_ACK, _link(ifindex) + _altname(altname))

    def remove_altname(self, ifindex: int, altname: str) -> None:
        """Take another name away from a link. Raises OSError, ENOENT if it has none such."""
        self._ask(RTM_DELLINKPROP, NLM_F_ACK, _link(ifindex) + _altname(altname))

    def detach_xdp(self, ifindex: int, attached: int) -> None:
        """Detach XDP programs, `attached` being what `LinkMessage.xdp` told. Raises OSError, EBUSY for a bpf_link's."""
        for flag in _XDP_FLAGS.get(attached, ()):
            nothing = attribute(IFLA_XDP_FD, _ERROR.pack(-1)) + word(IFLA_XDP_FLAGS, flag)
            self._ask(RTM_NEWLINK, NLM_F_ACK, _link(ifindex) + attribute(IFLA_XDP | NLA_F_NESTED, nothing))

    def _ask(self, kind: int, flags: int, body: bytes, take: Callable[[LinkMessage], None] | None = None) -> None:
        self._send(kind, flags, body)
        disturbed = False
        while True:
            for answer, marks, payload in messages(self._receive(_RECEIVE_BYTES)):
                disturbed = disturbed or bool(marks & NLM_F_DUMP_INTR)
                if answer == RTM_NEWLINK and take is not None:
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
        self._socket.send(request(kind, flags, body))


class IdleSockets:
    """Sockets in the process's namespace that are kept between questions: to open one takes as long as to ask."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._idle: list[LinkSocket] = []
        self._closed = False

    def close(self) -> None:
        """Close those that wait, and those in use once they are given back."""
        with self._guard:
            self._closed = True
            idle, self._idle = self._idle, []
        for links in idle:
            links.close()

    def take(self) -> LinkSocket:
        """Lend a socket to one thread. Raises OSError."""
        with self._guard:
            links = self._idle.pop() if self._idle else None
        return links or LinkSocket()

    def give_back(self, links: LinkSocket, *, sound: bool) -> None:
        """Take a socket back. One that is not sound is not lent again: an answer may still be on its way."""
        with self._guard:
            kept = sound and not self._closed and len(self._idle) < _MOST_IDLE
            if kept:
                self._idle.append(links)
        if not kept:
            links.close()


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


def _as_it_is(link: LinkMessage) -> LinkMessage:
    return link


def _open() -> socket.socket:
    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)


def _raise(payload: bytes, start: int = 0) -> None:
    (negative,) = _ERROR.unpack_from(payload, start)
    if negative < 0:
        raise OSError(-negative, os.strerror(-negative))


def _link(ifindex: int, *, flags: int = 0, change: int = 0) -> bytes:
    return LINK.pack(socket.AF_UNSPEC, 0, ifindex, flags, change)


def _altname(altname: str) -> bytes:
    return attribute(IFLA_PROP_LIST | NLA_F_NESTED, _text(IFLA_ALT_IFNAME, altname))


def _text(kind: int, value: str) -> bytes:
    return attribute(kind, value.encode(errors="surrogateescape") + b"\0")


_ANY_LINK = _link(0) + word(IFLA_EXT_MASK, RTEXT_FILTER_SKIP_STATS)
"""What asks for links without their statistics begins so."""
