"""Links by rtnetlink, encoded and decoded here, since a pod's start waits for them.

A library that knows all of netlink takes longer to decode one link than the kernel takes for the
whole request, and a list of a thousand links keeps the other threads waiting for most of a second.
Layout: include/uapi/linux/netlink.h, rtnetlink.h, if_link.h and if.h.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from agent.errors import NetlinkFailed
from agent.hardware import netns as namespaces
from agent.hardware.host import Child, LinkChange
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
    WORD,
    attribute,
    attribute_table,
    attributes,
    messages,
    request,
    text,
    word,
)
from agent.model.change import Change
from agent.model.device import is_pci_address

RTM_NEWLINK = 16
RTM_DELLINK = 17
IFLA_ADDRESS, IFLA_BROADCAST, IFLA_IFNAME, IFLA_MTU, IFLA_LINK, IFLA_MASTER = 1, 2, 3, 4, 5, 10
IFLA_LINKMODE, IFLA_LINKINFO, IFLA_IFALIAS = 17, 18, 20
IFLA_NET_NS_FD, IFLA_EXT_MASK, IFLA_PHYS_PORT_NAME, IFLA_XDP = 28, 29, 38, 43
IFLA_PROP_LIST, IFLA_ALT_IFNAME = 52, 53
IFLA_PARENT_DEV_NAME, IFLA_PARENT_DEV_BUS_NAME = 56, 57
"""Since Linux 5.14, both."""
IFLA_INFO_KIND, IFLA_INFO_DATA = 1, 2
IFLA_MACVLAN_MODE = 1
IFLA_IPVLAN_MODE = 1
IFLA_BOND_MODE, IFLA_BOND_MIIMON, IFLA_BOND_FAIL_OVER_MAC, IFLA_BOND_NUM_PEER_NOTIF = 1, 3, 13, 16
IFLA_BOND_ARP_INTERVAL, IFLA_BOND_ARP_IP_TARGET, IFLA_BOND_ARP_VALIDATE = 7, 8, 9
IFLA_IPOIB_PKEY, IFLA_IPOIB_MODE, IFLA_IPOIB_UMCAST = 1, 2, 3
MACVLAN_MODES = {"private": 1, "vepa": 2, "bridge": 4, "passthru": 8}
IPVLAN_MODES = {"l2": 0, "l3": 1, "l3s": 2}
BOND_MODES = {"active-backup": 1}
BOND_MILLISECONDS = 100
"""How often a bond looks at its ports' links."""
BOND_ARP_MILLISECONDS = 200
"""How often a bond asks its targets: without an answer for half a second the port is taken for lost."""
BOND_NOTICES = 3
"""So often a bond tells its neighbours of another MAC: one that is lost would cost until they ask."""
FAIL_OVER_MAC_ACTIVE = 1
ARP_VALIDATE_ACTIVE = 1
"""Only answers count. Otherwise whatever comes in does, from VFs beside it, say, behind a dead cable."""
IPOIB_MODES = {"datagram": 0, "connected": 1}
IFLA_XDP_FD, IFLA_XDP_ATTACHED, IFLA_XDP_FLAGS = 1, 2, 3
IFNAMSIZ = 16
"""With the zero at its end: only alternative names may be longer, and are asked for as such."""
IFF_UP = 0x1
IFF_NOARP = 0x80
IFF_PROMISC = 0x100
IFF_ALLMULTI = 0x200
IFF_MULTICAST = 0x1000
IFF_LOWER_UP = 0x10000

LINK = struct.Struct("=BxHiII")
_ZERO = bytes(WORD.size)


@dataclass(frozen=True, slots=True)
class LinkMessage:
    """What the kernel says of one link."""

    ifindex: int
    flags: int
    attributes: Mapping[int, bytes]

    def text(self, kind: int) -> str | None:
        """Return a textual attribute, None if it is absent or empty."""
        return text(self.attributes.get(kind, b"")) or None

    def numbers(self, *kinds: int) -> list[int]:
        """Return 32-bit attributes, 0 for one that is absent."""
        get, unpack = self.attributes.get, WORD.unpack
        return [unpack(get(kind, _ZERO))[0] for kind in kinds]

    @property
    def altnames(self) -> tuple[str, ...]:
        """The other names the link answers to, in the kernel's order.

        They may be any bytes, and whoever takes one away must say the same ones.
        """
        content = self.attributes.get(IFLA_PROP_LIST)
        if content is None:
            return ()
        return tuple(
            value.rstrip(b"\0").decode("utf-8", "surrogateescape")
            for kind, value in attributes(content)
            if kind == IFLA_ALT_IFNAME
        )

    @property
    def kind(self) -> str:
        """The kind of a link of software, such as macvlan; empty for hardware."""
        content = self.attributes.get(IFLA_LINKINFO)
        if content is None:
            return ""
        found = attribute_table(content)
        return text(found.get(IFLA_INFO_KIND, b""))

    @property
    def xdp(self) -> int:
        """How an XDP program is attached (XDP_ATTACHED_*); 0 if none is."""
        return attribute_table(self.attributes.get(IFLA_XDP, b"")).get(IFLA_XDP_ATTACHED, b"\0")[0]


def link_events(
    packet: bytes, *, virtual_links: bool = False, device_attribute: int = IFLA_PARENT_DEV_NAME
) -> Iterator[tuple[str, Change]]:
    """Name the link changes in a netlink packet, `link eth0 changed` or `link eth0 gone`, and what is to be looked at.

    Without `virtual_links` links of software only (veth, bridge, …) are passed over. An interface
    of a bus device says its bus; older kernels do not, but only software links have a kind.
    `device_attribute` holds the PCI address of the function below; a simulated node has another.
    """
    for kind, _, body in messages(packet):
        if kind in (RTM_NEWLINK, RTM_DELLINK):
            found = attribute_table(body, LINK.size)
            on_a_bus = IFLA_PARENT_DEV_BUS_NAME in found
            if virtual_links or on_a_bus or IFLA_LINKINFO not in found:
                name = text(found.get(IFLA_IFNAME, b"?"))
                device = text(found.get(device_attribute, b""))
                # Something else than a function may be below, such as virtio's bus.
                change = Change(frozenset((device,) if is_pci_address(device) else ()), frozenset((name,)))
                yield f"link {name} {'changed' if kind == RTM_NEWLINK else 'gone'}", change


def decode(payload: bytes) -> LinkMessage:
    """Read the body of a link message."""
    _, _, ifindex, flags, _ = LINK.unpack_from(payload)
    return LinkMessage(ifindex, flags, attribute_table(payload, LINK.size))


def creation(child: Child, parent: int | None, netns: int | None) -> bytes:
    """Make the body of an RTM_NEWLINK that creates a child; one without a parent has none.

    The parent's index counts in the namespace of the socket; the child is made in the namespace of the
    descriptor (net/core/rtnetlink.c, rtnl_newlink_create), so it is never seen anywhere else.
    """
    up = IFF_UP if child.up else 0
    body = LINK.pack(socket.AF_UNSPEC, 0, 0, up, up)
    body += attribute(IFLA_IFNAME, child.name.encode() + b"\0")
    if parent is not None:
        body += word(IFLA_LINK, parent)
    if netns is not None:
        body += word(IFLA_NET_NS_FD, netns)
    if child.mac is not None:
        body += attribute(IFLA_ADDRESS, bytes.fromhex(child.mac.replace(":", "")))
    if child.mtu is not None:
        body += word(IFLA_MTU, child.mtu)
    info = attribute(IFLA_INFO_KIND, child.kind.encode())
    if child.kind in _DATA:
        info += attribute(IFLA_INFO_DATA, _DATA[child.kind](child))
    return body + attribute(IFLA_LINKINFO, info)


def _macvlan(child: Child) -> bytes:
    return word(IFLA_MACVLAN_MODE, MACVLAN_MODES[child.mode])


def _ipvlan(child: Child) -> bytes:
    return attribute(IFLA_IPVLAN_MODE, struct.pack("=H", IPVLAN_MODES[child.mode]))


def _bond(child: Child) -> bytes:
    data = attribute(IFLA_BOND_MODE, bytes((BOND_MODES[child.mode],)))
    if child.arp_targets:  # it does the one or the other
        asked = (attribute(n, socket.inet_aton(target)) for n, target in enumerate(child.arp_targets))
        data += word(IFLA_BOND_ARP_INTERVAL, BOND_ARP_MILLISECONDS)
        data += attribute(IFLA_BOND_ARP_IP_TARGET, b"".join(asked))
        data += word(IFLA_BOND_ARP_VALIDATE, ARP_VALIDATE_ACTIVE)
    else:
        data += word(IFLA_BOND_MIIMON, BOND_MILLISECONDS)
    data += attribute(IFLA_BOND_FAIL_OVER_MAC, bytes((FAIL_OVER_MAC_ACTIVE,)))
    return data + attribute(IFLA_BOND_NUM_PEER_NOTIF, bytes((BOND_NOTICES,)))


def _ipoib(child: Child) -> bytes:
    data = attribute(IFLA_IPOIB_PKEY, struct.pack("=H", child.pkey or 0)) if child.pkey is not None else b""
    data += attribute(IFLA_IPOIB_MODE, struct.pack("=H", IPOIB_MODES[child.mode]))
    return data + attribute(IFLA_IPOIB_UMCAST, struct.pack("=H", 1))


_DATA: Mapping[str, Callable[[Child], bytes]] = MappingProxyType(
    {"macvlan": _macvlan, "ipvlan": _ipvlan, "ipoib": _ipoib, "bond": _bond}
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
        """Change what a PF enforces on a VF: an attribute of `vf_control`. Raises OSError."""
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

    def change(self, ifindex: int, wanted: LinkChange, netns: int | None = None) -> None:
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
        if wanted.broadcast is not None:
            request += attribute(IFLA_BROADCAST, bytes.fromhex(wanted.broadcast.replace(":", "")))
        if wanted.link_mode is not None:
            request += attribute(IFLA_LINKMODE, bytes((wanted.link_mode,)))
        if wanted.mtu is not None:
            request += word(IFLA_MTU, wanted.mtu)
        if wanted.master is not None:
            request += word(IFLA_MASTER, wanted.master)
        self._ask(RTM_NEWLINK, NLM_F_ACK, request)

    def create(self, body: bytes) -> None:
        """Make a link: a body from `creation`. Raises OSError, EEXIST if the name is taken."""
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
