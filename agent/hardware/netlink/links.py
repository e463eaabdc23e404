"""Interfaces, their addresses and routes through rtnetlink.

Links are `rtnetlink`'s, with a socket for each call at a time. Lists of addresses and routes are
pyroute2's, whose sockets belong to the thread that opened them and to the namespace that thread was
in. So what it is to do in the host's namespace goes through one socket on one thread; in a pod's
namespace it opens a socket of its own on a thread that entered it. It is imported when the first such
list is asked for: that takes longer than anything else the agent imports, and a start needs none.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, TypeVar

from agent.errors import HardwareError
from agent.hardware import netns as namespaces
from agent.hardware.host import NO_POLICY, Child, Link, LinkChange, LinkPolicy, Route, TcxProgram
from agent.hardware.netlink import configuring
from agent.hardware.netlink.rtnetlink import (
    IFF_ALLMULTI,
    IFF_LOWER_UP,
    IFF_MULTICAST,
    IFF_NOARP,
    IFF_PROMISC,
    IFF_UP,
    IFLA_ADDRESS,
    IFLA_ALT_IFNAME,
    IFLA_BROADCAST,
    IFLA_IFNAME,
    IFLA_LINKMODE,
    IFLA_MASTER,
    IFLA_MTU,
    IFLA_PARENT_DEV_NAME,
    IFLA_PHYS_PORT_NAME,
    IFLA_PROP_LIST,
    IFLA_XDP,
    IFLA_XDP_FD,
    IFLA_XDP_FLAGS,
    NLA_F_NESTED,
    NLM_F_CREATE,
    NLM_F_EXCL,
    RTM_DELLINK,
    RTM_DELLINKPROP,
    RTM_NEWLINK,
    RTM_NEWLINKPROP,
    LinkMessage,
    NetlinkSocket,
    attribute,
    creation,
    decode,
    failed,
    link_body,
    text_attribute,
    translated,
    word,
)
from agent.hardware.tcx import TcxPrograms
from agent.model.device import names_representor, uplink_rank

if TYPE_CHECKING:
    from pyroute2 import IPRoute

MAX_KEPT, MAX_KEPT_BYTES = 512, 4096
"""So many descriptions of links are remembered as read, each of at most so many bytes: in a pod one may have 64 KiB of
other names. A VF's is mostly the same when it is given to the next pod."""

_MOST_IDLE = 4
"""Sockets in the host's namespace that are kept between questions: to open one takes as long as to ask."""
_XDP_FLAGS = {1: (4,), 2: (2,), 3: (8,), 4: (2, 4, 8)}
"""XDP_ATTACHED_{DRV,SKB,HW,MULTI} to XDP_FLAGS_{DRV,SKB,HW}_MODE: the kernel detaches in the mode that is named."""

T = TypeVar("T")


def parent_device(message: LinkMessage) -> str | None:
    """Return the bus address of the device below an interface (Linux 5.14 and later tell it)."""
    return message.text(IFLA_PARENT_DEV_NAME)


class Netlink:
    """Interfaces, in the host's network namespace and in pods'."""

    def __init__(self, device_of: Callable[[LinkMessage], str | None] = parent_device) -> None:
        """`device_of` names the device of a link message; a simulated node has another rule."""
        self._device_of = device_of
        self._kept = lru_cache(MAX_KEPT)(self._found)
        self._host_netns = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="netlink")
        self._socket: IPRoute | None = None
        self._idle: deque[NetlinkSocket] = deque()
        self._tcx = TcxPrograms()
        self._closed = False

    def close(self) -> None:
        """Close the sockets and end the thread. Whoever comes later gets a HardwareError."""
        if self._closed:
            return
        self._closed = True
        while self._idle:
            self._idle.pop().close()
        self._thread.submit(self._close_socket).result()
        self._thread.shutdown()
        # A detach that is late must not take for the host what gets this number next: a pod's namespace, say.
        descriptor, self._host_netns = self._host_netns, -1
        os.close(descriptor)

    # ------------------------------------------------------------------- links

    def find(self, name: str, netns: int | None = None) -> Link | None:
        """Look an interface up by name."""
        with self._links(netns, f"look up interface {name}") as links:
            found = links.described(name)
        return self._read(found).link if found is not None else None

    def find_device(self, device: str, netns: int | None = None) -> Link | None:
        """Look for the interface of a device, whatever its name is. Looks at all interfaces there."""
        with self._links(netns, f"look for the interface of {device}") as links:
            found = links.chosen(partial(self._link_of, device))
        return found[-1] if found else None

    def find_own(self, names: list[str], device: str) -> Link | None:
        """Find, among the names that sysfs lists for a function, its own interface: no VF's representor.

        Names that rank alike count in the order given.
        """
        best: tuple[tuple[int, int, str], _Found] | None = None
        with self._links(None, f"look up the interface of {device}") as links:
            for number, name in enumerate(names):
                described = links.described(name)
                found = self._read(described) if described is not None else None
                if found is None or found.parent not in (None, device):
                    continue  # the name is another's by now
                rank = uplink_rank(found.port, number, name)
                if best is None or rank < best[0]:
                    best = rank, found
        if best is None or names_representor(best[1].port):
            return None
        link = best[1].link
        return link if link.device == device else replace(link, device=device)

    def listed(self, netns: int | None = None, wanted: Callable[[Link], bool] | None = None) -> tuple[Link, ...]:
        """List the interfaces there, those that are wanted or all."""

        def read(message: LinkMessage) -> Link | None:
            link = self._link(message)
            return link if wanted is None or wanted(link) else None

        with self._links(netns, "list interfaces") as links:
            return tuple(links.chosen(read))

    def by_device(self, netns: int | None = None) -> dict[str, Link]:
        """List the interfaces that have a device below them, by its bus address."""
        return {link.device: link for link in self.listed(netns) if link.device is not None}

    def move_in(self, link: Link, netns: int, change: LinkChange) -> None:
        """Move a host interface into a namespace and apply the change.

        One RTM_NEWLINK does it all: the kernel moves first and changes the rest there, so the
        pod's namespace need not be entered (net/core/rtnetlink.c, do_setlink). Should it refuse the
        rest after the move, the interface is in the namespace; the caller's undo looks for it there.
        """
        self._move(link, None, netns, change)

    def move_out(self, link: Link, netns: int, change: LinkChange) -> None:
        """Move an interface from a namespace back to the host and apply the change."""
        self._move(link, netns, self._host_netns, change)

    def change(self, link: Link, change: LinkChange, netns: int | None = None) -> None:
        """Change an interface where it is."""
        lowered = link.up and change.name is not None
        with self._links(netns, f"change interface {link.name}") as links:
            if lowered:
                links.change(link.ifindex, LinkChange(up=False))  # before Linux 6.2 a rename needs that
            try:
                links.change(link.ifindex, change)
            except OSError:
                if lowered:
                    links.change(link.ifindex, LinkChange(up=True))
                raise

    def create(self, child: Child, parent: Link | None, netns: int | None) -> None:
        """Make an interface, upon one of the host or by itself, in the namespace of a descriptor or in the host."""
        upon, index = (f" upon {parent.name}", parent.ifindex) if parent is not None else ("", None)
        with self._links(None, f"make {child.kind} interface {child.name}{upon}") as links:
            links.ask(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, creation(child, index, netns))

    def remove(self, link: Link, netns: int | None = None) -> None:
        """Remove an interface of software. One that is gone is success."""
        with self._links(netns, f"remove interface {link.name}") as links:
            try:
                links.ask(RTM_DELLINK, 0, link_body(link.ifindex))
            except OSError as error:
                if error.errno != errno.ENODEV:
                    raise

    def change_altnames(
        self, link: Link, *, add: tuple[str, ...] = (), remove: tuple[str, ...] = (), netns: int | None = None
    ) -> None:
        """Give an interface other names, and take some away. What is so already is success."""
        with self._links(netns, f"change the alternative names of interface {link.name}") as links:
            for name in remove:
                try:
                    links.ask(RTM_DELLINKPROP, 0, _altname(link, name))
                except OSError as error:
                    if error.errno != errno.ENOENT:
                        raise
            for name in add:
                try:
                    links.ask(RTM_NEWLINKPROP, 0, _altname(link, name))
                except OSError as error:
                    found = links.find(name) if error.errno == errno.EEXIST else None
                    if found is None or found.ifindex != link.ifindex:
                        raise

    def detach_xdp(self, link: Link, netns: int | None = None) -> None:
        """Detach the XDP programs that `link.xdp` tells of."""
        with self._links(netns, f"detach the XDP program of interface {link.name}") as links:
            for flag in _XDP_FLAGS.get(link.xdp, ()):
                nothing = attribute(IFLA_XDP_FD, b"\xff" * 4) + word(IFLA_XDP_FLAGS, flag)
                links.ask(RTM_NEWLINK, 0, link_body(link.ifindex) + attribute(IFLA_XDP | NLA_F_NESTED, nothing))

    def tcx_programs(self, link: Link) -> tuple[TcxProgram, ...]:
        """List the tcx programs on an interface of the host."""
        with translated(f"list the tcx programs of interface {link.name}"):
            return self._tcx.attached(link.ifindex)

    def detach_tcx(self, link: Link, programs: tuple[int, ...], links: tuple[int, ...]) -> tuple[TcxProgram, ...]:
        """Detach all tcx programs of an interface of the host but these. Return what another bpf_link holds."""
        with translated(f"detach a tcx program of interface {link.name}"):
            return self._tcx.detach(link.ifindex, programs, links)

    def configure(
        self,
        ifname: str,
        netns: int | None,
        addresses: tuple[str, ...],
        routes: tuple[Route, ...],
        policy: LinkPolicy = NO_POLICY,
    ) -> None:
        """Give an interface its addresses and routes, and what else there is."""
        with self._links(netns, f"look up interface {ifname}") as links:
            configuring.configure(links, ifname, netns, addresses, routes, policy)

    def policy(self, ifname: str, netns: int) -> LinkPolicy:
        """Read an interface's settings and lasting neighbours, and all rules of its namespace that name a table."""
        with self._links(netns, f"look up interface {ifname}") as links:
            if (found := links.find(ifname)) is None:
                return NO_POLICY
        return self._run(netns, partial(configuring.read_policy, link=found))

    def addresses(self, ifname: str, netns: int | None) -> tuple[str, ...]:
        """List an interface's global addresses as CIDR."""
        link = self.find(ifname, netns)
        return self._run(netns, partial(configuring.read_addresses, link=link)) if link is not None else ()

    def routes(self, netns: int | None, ifname: str | None = None) -> tuple[Route, ...]:
        """List the routes there, or those through one interface, whoever made them."""
        link = self.find(ifname, netns) if ifname is not None else None
        if ifname is not None and link is None:
            return ()
        return self._run(netns, partial(configuring.read_routes, link=link))

    # ---------------------------------------------------------------- plumbing

    def _move(self, link: Link, source: int | None, target: int, change: LinkChange) -> None:
        name = f" as {change.name}" if change.name else ""
        with self._links(source, f"move interface {link.name}{name} to another network namespace") as links:
            links.change(link.ifindex, change, target)

    def _read(self, described: bytes) -> _Found:
        return self._kept(described) if len(described) <= MAX_KEPT_BYTES else self._found(described)

    def _found(self, described: bytes) -> _Found:
        message = decode(described)
        parent, port = message.text(IFLA_PARENT_DEV_NAME), message.text(IFLA_PHYS_PORT_NAME) or ""
        return _Found(self._link(message), parent, port)

    def _link_of(self, device: str, message: LinkMessage) -> Link | None:
        return self._link(message) if self._device_of(message) == device else None

    def _link(self, message: LinkMessage) -> Link:
        mtu, master = message.numbers(IFLA_MTU, IFLA_MASTER)
        return Link(
            name=message.text(IFLA_IFNAME) or "",
            ifindex=message.ifindex,
            mac=message.attributes.get(IFLA_ADDRESS, b"").hex(":"),
            mtu=mtu,
            up=bool(message.flags & IFF_UP),
            carrier=bool(message.flags & IFF_LOWER_UP),
            device=self._device_of(message),
            altnames=message.altnames,
            promisc=bool(message.flags & IFF_PROMISC),
            allmulti=bool(message.flags & IFF_ALLMULTI),
            arp=not message.flags & IFF_NOARP,
            multicast=bool(message.flags & IFF_MULTICAST),
            broadcast=message.attributes.get(IFLA_BROADCAST, b"").hex(":"),
            link_mode=message.attributes.get(IFLA_LINKMODE, b"\0")[0],
            xdp=message.xdp,
            master=master or None,
            kind=message.kind,
        )

    def _links(self, netns: int | None, action: str) -> _Links:
        if self._closed:
            raise HardwareError("netlink is closed: the agent is ending")
        return _Links(self._idle, netns, action)

    def _run(self, netns: int | None, work: Callable[[IPRoute], T]) -> T:
        from pyroute2 import IPRoute

        if self._closed:
            raise HardwareError("netlink is closed: the agent is ending")
        if netns is None:
            return self._thread.submit(self._on_own_socket, work).result()

        def inside() -> T:
            with IPRoute() as ipr:
                return work(ipr)

        return namespaces.run_in(netns, inside)

    def _on_own_socket(self, work: Callable[[IPRoute], T]) -> T:
        from pyroute2 import IPRoute

        if self._socket is None:
            self._socket = IPRoute()
        return work(self._socket)

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


@dataclass(frozen=True, slots=True)
class _Found:
    """A link, and what tells which function's it is."""

    link: Link
    parent: str | None
    """Bus address of the device below it, where the kernel tells."""
    port: str
    """IFLA_PHYS_PORT_NAME; empty where there is none."""


class _Links:
    """A socket for one action, in the host's namespace or that of a descriptor. NetlinkFailed for its OSErrors."""

    __slots__ = ("_action", "_idle", "_netns", "_socket")

    def __init__(self, idle: deque[NetlinkSocket], netns: int | None, action: str) -> None:
        self._idle = idle
        self._netns = netns
        self._action = action

    def __enter__(self) -> NetlinkSocket:
        try:
            self._socket = self._idle.pop() if self._idle and self._netns is None else NetlinkSocket(self._netns)
        except IndexError:  # another thread was faster
            self._socket = NetlinkSocket()
        except OSError as error:
            raise failed(self._action, error) from error
        return self._socket

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        # After an error an answer may still be on its way to this socket.
        if self._netns is None and error is None and len(self._idle) < _MOST_IDLE:
            self._idle.append(self._socket)
        else:
            self._socket.close()
        if isinstance(error, OSError):
            raise failed(self._action, error) from error


def _altname(link: Link, name: str) -> bytes:
    return link_body(link.ifindex) + attribute(IFLA_PROP_LIST | NLA_F_NESTED, text_attribute(IFLA_ALT_IFNAME, name))
