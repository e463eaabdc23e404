"""Netlink's messages and sockets, and the links of rtnetlink, encoded and decoded here: a pod's start waits for them.

A library that knows all of netlink takes longer to decode one link than the kernel takes for the
whole request, and a list of a thousand links keeps the other threads waiting for most of a second.
Layout: include/uapi/linux/netlink.h, rtnetlink.h, if_link.h and if.h.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from agent.errors import NetlinkFailed
from agent.hardware import netns as namespaces
from agent.hardware.host import Child, LinkChange
from agent.model.change import Change
from agent.model.device import is_pci_address

NLMSG_ERROR, NLMSG_DONE = 2, 3
NLM_F_REQUEST, NLM_F_ACK, NLM_F_DUMP_INTR, NLM_F_DUMP = 0x1, 0x4, 0x10, 0x300
NLM_F_REPLACE, NLM_F_EXCL, NLM_F_CREATE = 0x100, 0x200, 0x400
NLA_F_NESTED = 0x8000
NLA_TYPE_MASK = 0x3FFF
HEADER = struct.Struct("=IHHII")
ATTRIBUTE = struct.Struct("=HH")
"""An attribute's header: its length with this header, and its type."""
WORD = struct.Struct("=I")

RTM_NEWLINK, RTM_DELLINK, RTM_GETLINK, RTM_SETLINK = 16, 17, 18, 19
RTM_NEWLINKPROP, RTM_DELLINKPROP = 108, 109
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


def request(kind: int, flags: int, body: bytes, number: int = 1) -> bytes:
    """Make a message to the kernel. Its answers have its number."""
    return HEADER.pack(HEADER.size + len(body), kind, NLM_F_REQUEST | flags, number, 0) + body


def attribute(kind: int, payload: bytes) -> bytes:
    """Make an attribute."""
    return ATTRIBUTE.pack(ATTRIBUTE.size + len(payload), kind) + payload + b"\0" * (-len(payload) % 4)


def word(kind: int, value: int) -> bytes:
    """Make an attribute of 32 bits."""
    return attribute(kind, WORD.pack(value))


def messages(packet: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield each message of a packet: its type, its flags, its body. Ends at the first that makes no sense."""
    offset = 0
    while offset + HEADER.size <= len(packet):
        length, kind, flags, _, _ = HEADER.unpack_from(packet, offset)
        if length < HEADER.size:
            return
        yield kind, flags, packet[offset + HEADER.size : offset + length]
        offset += (length + 3) & ~3


def attributes(body: bytes, start: int = 0) -> list[tuple[int, bytes]]:
    """List type and content of each attribute. Ends at the first that makes no sense."""
    found = []
    unpack, size, end, offset = ATTRIBUTE.unpack_from, ATTRIBUTE.size, len(body), start
    while offset + size <= end:
        length, kind = unpack(body, offset)
        if length < size:
            break
        found.append((kind & NLA_TYPE_MASK, body[offset + size : offset + length]))
        offset += (length + 3) & ~3
    return found


def attribute_table(body: bytes, start: int = 0) -> dict[int, bytes]:
    """Return the content of each attribute by its type; of several of one type, the last. Ends as `attributes` does."""
    return dict(attributes(body, start))


def text(content: bytes) -> str:
    """Read a text that ends with a zero."""
    return content.rstrip(b"\0").decode("utf-8", "replace")


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


RTEXT_FILTER_SKIP_STATS = 8

_ERROR = struct.Struct("=i")
_DUMP_TRIES = 20
_RECEIVE_BYTES = 96 << 10
"""A link may have 64 KiB of other names (net/core/rtnetlink.c, rtnl_alt_ifname), and its device is told after them."""

NO_REMEDIES: Mapping[int, str] = MappingProxyType({})

T = TypeVar("T")


class NetlinkSocket:
    """A socket in one network namespace, whichever thread uses it. One question at a time; close it."""

    def __init__(
        self, netns: int | None = None, protocol: int = socket.NETLINK_ROUTE, seconds: float | None = None
    ) -> None:
        """`netns` is the descriptor of a namespace; None for that of the calling thread.

        `seconds` is how long an answer is waited for.
        """
        opened = partial(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
        self._socket = opened() if netns is None else namespaces.run_in(netns, opened)
        self._socket.settimeout(seconds)

    def __enter__(self) -> NetlinkSocket:
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
        return self.answer(RTM_GETLINK, _ANY_LINK + attribute(kind, encoded))

    def chosen(self, read: Callable[[LinkMessage], T | None]) -> list[T]:
        """List what is made of the links, but None. Raises OSError."""
        return self.dump(RTM_GETLINK, _ANY_LINK, lambda body: read(decode(body)))

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
        body = link_body(ifindex, flags=flags, change=change)
        if netns is not None:
            body += word(IFLA_NET_NS_FD, netns)
        if wanted.name is not None:
            body += text_attribute(IFLA_IFNAME, wanted.name)
        if wanted.mac is not None:
            body += attribute(IFLA_ADDRESS, bytes.fromhex(wanted.mac.replace(":", "")))
        if wanted.broadcast is not None:
            body += attribute(IFLA_BROADCAST, bytes.fromhex(wanted.broadcast.replace(":", "")))
        if wanted.link_mode is not None:
            body += attribute(IFLA_LINKMODE, bytes((wanted.link_mode,)))
        if wanted.mtu is not None:
            body += word(IFLA_MTU, wanted.mtu)
        if wanted.master is not None:
            body += word(IFLA_MASTER, wanted.master)
        self.ask(RTM_NEWLINK, 0, body)

    def ask(self, kind: int, flags: int, body: bytes) -> None:
        """Have one thing done. Raises OSError."""
        for number in self.ask_all(((kind, flags, body),)).values():
            raise OSError(number, os.strerror(number))

    def ask_all(self, asked: Sequence[tuple[int, int, bytes]]) -> dict[int, int]:
        """Ask for one thing after the other in one go: type, flags and body of each.

        Returns the error numbers of what was refused, by its place among them. Raises OSError.
        """
        last, refused, packet = len(asked) - 1, dict[int, int](), b""
        for number, (kind, flags, body) in enumerate(asked):
            # What is refused is told anyhow (net/netlink/af_netlink.c, netlink_rcv_skb), the last one in any case.
            packet += request(kind, flags | NLM_F_ACK if number == last else flags, body, number)
        self._socket.send(packet)
        while True:
            answer = self._receive(_RECEIVE_BYTES)
            _, kind, _, number, _ = HEADER.unpack_from(answer)
            if kind == NLMSG_ERROR:
                if negative := _ERROR.unpack_from(answer, HEADER.size)[0]:
                    refused[number] = -negative
                if number == last:
                    return refused

    def answer(
        self, kind: int, body: bytes, absent: Collection[int] = (errno.ENODEV,), most: int = _RECEIVE_BYTES
    ) -> bytes | None:
        """Ask for one thing and return its description; None for the errors `absent`. Raises OSError for others."""
        self._socket.send(request(kind, 0, body))
        answer = self._receive(most)  # one message
        if HEADER.unpack_from(answer)[1] != NLMSG_ERROR:
            return answer[HEADER.size :]
        (negative,) = _ERROR.unpack_from(answer, HEADER.size)
        if -negative in absent:
            return None
        raise OSError(-negative, os.strerror(-negative))

    def dump(self, kind: int, body: bytes, read: Callable[[bytes], T | None]) -> list[T]:
        """List what is made of the descriptions of all, but None. Raises OSError.

        Nothing else is kept: a pod may have made thousands of links, each of 64 KiB.
        """
        for _ in range(_DUMP_TRIES):
            self._socket.send(request(kind, NLM_F_DUMP, body))
            found: list[T] = []
            is_disturbed = is_over = False
            while not is_over:
                for answer, marks, payload in messages(self._receive(_RECEIVE_BYTES)):
                    is_disturbed = is_disturbed or bool(marks & NLM_F_DUMP_INTR)
                    if answer in (NLMSG_ERROR, NLMSG_DONE):
                        is_over = True
                        (negative,) = _ERROR.unpack_from(payload)
                        if negative < 0:
                            raise OSError(-negative, os.strerror(-negative))
                    elif (made := read(payload)) is not None:
                        found.append(made)
            if not is_disturbed:
                return found
            # Something came or went meanwhile, and some may be missing.
        raise OSError(errno.EAGAIN, "the list changes all the time")

    def _receive(self, most: int) -> bytes:
        """Receive what the kernel says. What a process sends, a pod's for one, is dropped."""
        while True:
            packet, sender = self._socket.recvfrom(most)
            if sender[0] == 0:
                return packet


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


def link_body(ifindex: int, *, flags: int = 0, change: int = 0) -> bytes:
    """Begin the body of a request about a link."""
    return LINK.pack(socket.AF_UNSPEC, 0, ifindex, flags, change)


def text_attribute(kind: int, value: str) -> bytes:
    """Make an attribute of text."""
    return attribute(kind, value.encode(errors="surrogateescape") + b"\0")


_ANY_LINK = link_body(0) + word(IFLA_EXT_MASK, RTEXT_FILTER_SKIP_STATS)
"""What asks for links without their statistics begins so."""
