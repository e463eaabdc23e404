"""An interface on its way into a pod's namespace and back, where it is made as it was and verified.

What a move does not touch stays with the interface, and is put back: name, MAC, MTU, broadcast address, link mode,
flags, alternative names, XDP and tcx programs. Addresses, routes and queueing disciplines, clsact among them, end with
the move (net/core/dev.c, __dev_change_net_namespace). The way back works from any point, and may be repeated.

A program that is attached through a bpf_link cannot be detached: it stays for as long as a process has the link open
(kernel/bpf/tcx.c, net/core/dev.c). While the pod's namespace lives that process may be the pod's, and the device is
not clean. Once it has ended, so have its processes: who holds the link then is of the host, and has it there for the
host's sake, as agents do that attach to whatever interface appears.
"""

from __future__ import annotations

import errno
import functools
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import TypeVar

from agent.errors import HardwareError, NetlinkFailed
from agent.hardware import netns as namespaces
from agent.hardware.host import Host, Link, LinkChange, TcxProgram
from agent.model.allocation import Attachment, Undo
from agent.model.device import Snapshot, is_pci_address
from agent.model.vf_identity import name_by_place
from cni.modes.mode import InterfaceFacts, Planned
from cni.netconf import NetConf

SETTLE_SECONDS = 2.0
"""How long a driver may take until a change of the interface holds, and udev may take for renaming it."""
RETURN_SECONDS = 2.0
"""How long the kernel may take to bring back an interface from a namespace that went away."""
POLL_SECONDS = 0.02
EVERYBODY = "ff:ff:ff:ff:ff:ff"
"""The broadcast address of Ethernet."""
MAX_KEPT = 512
"""So many records are remembered: a pod waits for its VF's, and that says mostly what it said for the pod before."""
MAC_REFUSED = frozenset((errno.EADDRNOTAVAIL, errno.EPERM, errno.EACCES))
"""What drivers answer when their PF enforces a MAC: igbvf; ixgbevf and others; iavf."""

T = TypeVar("T")

log = logging.getLogger(__name__)


def awaited(look: Callable[[], T | None], seconds: float) -> T | None:
    """Look again and again for so long until something is there. None if nothing is."""
    deadline = time.monotonic() + seconds
    while (found := look()) is None and time.monotonic() <= deadline:
        time.sleep(POLL_SECONDS)
    return found


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """How to find one interface, whatever it is called."""

    device: str
    """For messages, and for a name where its own is taken."""
    home: Callable[[], Link | None]
    """Look for it in the host."""
    there: Callable[[int], Link | None]
    """Look for it in the namespace of a descriptor."""


def by_address(host: Host, device: str, ifname: str) -> Whereabouts:
    """Find the interface of a PCI device; in the pod under its name there first."""

    def there(netns: int) -> Link | None:
        link = host.links.find(ifname, netns)
        if link is None or link.device != device:
            link = host.links.find_device(device, netns)  # renamed in the pod, or not moved in full
        return link

    return Whereabouts(device, partial(host.find_netdev, device), there)


def refuse_needed(snapshot: Snapshot, link: Link) -> None:
    """Raise HardwareError for the interface of a VF that the host itself uses: the move would cut it off."""
    if link.master is not None:
        raise HardwareError(
            f"{link.name} is a port of a bond, bridge or the like: take it out first, or choose another"
        )
    if link.name in snapshot.only_ways:
        raise HardwareError(
            f"{link.name} carries the host's default route, or is the way to the API server: without it this node would"
            " be cut off; choose another VF"
        )


def record(host: Host, link: Link, *, mode: str) -> Undo:
    """Keep all of an interface that a pod may change."""
    return _record(link, host.links.tcx_programs(link), mode)


@functools.lru_cache(MAX_KEPT)
def _record(link: Link, programs: tuple[TcxProgram, ...], mode: str) -> Undo:
    return Undo(
        netdev=link.name,
        mac=link.mac,
        mtu=link.mtu,
        up=link.up,
        altnames=link.altnames,
        promisc=link.promisc,
        allmulti=link.allmulti,
        arp=link.arp,
        multicast=link.multicast,
        broadcast=link.broadcast if len(link.broadcast) == len(EVERYBODY) else None,
        link_mode=link.link_mode,
        xdp=link.xdp,
        tcx=tuple(found.program for found in programs),
        tcx_links=tuple(found.link for found in programs if found.link) or None,
        mode=mode,
    )


def move_in(host: Host, planned: Planned, link: Link, where: Whereabouts, netns: int) -> None:
    """Move an interface of the host into a namespace, changed, with its network's alternative names more.

    One request if nothing is in the way. An alternative name of its own that is taken in the pod (the kernel
    then refuses the move), or that is the name it is to have there, is taken away: the undo record has it.
    """
    change, altnames = planned.change, planned.target.conf.altnames
    if change.name in link.altnames:
        host.links.change_altnames(link, remove=(str(change.name),))
    try:
        host.links.move_in(link, netns, change)
    except NetlinkFailed as error:
        if error.errno == errno.EEXIST:
            _move_past_names(host, link, where, netns, change, error)
        elif error.errno in MAC_REFUSED and change.mac is not None:
            # The kernel moves before it sets the MAC and renames after it: it is in the pod, of whatever name.
            moved = where.there(netns)
            if moved is None:
                raise
            fetch_mac(host, moved, change, netns)
        else:
            raise
    if change.mac is not None or altnames:
        _complete(host, where, netns, change, altnames)


def facts(planned: Planned, mac: str, mtu: int, *, in_kernel: bool = True) -> InterfaceFacts:
    """Say what the answer to ADD says of an interface in its pod, which has this address and MTU."""
    device = planned.target.device
    return InterfaceFacts(planned.target.ifname, mac, mtu, device if is_pci_address(device) else None, in_kernel)


def _move_past_names(
    host: Host, link: Link, where: Whereabouts, netns: int, change: LinkChange, error: NetlinkFailed
) -> None:
    taken = tuple(name for name in link.altnames if host.links.find(name, netns) is not None)
    if not taken or host.links.find(str(change.name), netns) is not None or where.there(netns) is not None:
        raise NetlinkFailed(error.action, error.errno, "an interface of that name is in the pod already") from error
    log.warning("%s loses the names %s while it is in the pod: they are taken there", link.name, ", ".join(taken))
    host.links.change_altnames(link, remove=taken)
    host.links.move_in(link, netns, change)


def _complete(host: Host, where: Whereabouts, netns: int, change: LinkChange, altnames: tuple[str, ...]) -> None:
    """See that the MAC holds, which some drivers (iavf) set later than they say so, and give the names."""

    def has_it() -> Link | None:
        link = there(where, netns)
        return link if change.mac in (None, link.mac) else None

    link = awaited(has_it, SETTLE_SECONDS)
    if link is None:
        mac = there(where, netns).mac
        raise HardwareError(f"{where.device} was given the MAC {change.mac} without an error but has {mac}")
    if altnames:
        host.links.change_altnames(link, add=altnames, netns=netns)


def there(where: Whereabouts, netns: int) -> Link:
    """Find an interface that was moved. Raises HardwareError."""
    link = where.there(netns)
    if link is None:
        raise HardwareError(f"{where.device} was moved into the pod but is not there")
    return link


def fetch_mac(host: Host, link: Link, change: LinkChange, netns: int | None) -> None:
    """Make a change, with the MAC fetched from the PF by a driver that will not be told it.

    Once the PF has set a VF's MAC, igbvf answers EADDRNOTAVAIL even to that same MAC; it asks the PF
    when its interface goes down (drivers/net/ethernet/intel/igbvf: netdev.c, igbvf_down; vf.c,
    e1000_rar_set_vf). Raises HardwareError if the interface then has another MAC.
    """
    for up in (True, False):
        host.links.change(link, LinkChange(up=up), netns)
    host.links.change(link, replace(change, mac=None), netns)
    found = host.links.find(change.name or link.name, netns)
    if found is None or found.mac != change.mac:
        raise HardwareError(f"{link.name} takes no MAC {change.mac}: its PF gives it {found.mac if found else 'none'}")


def expected_mac(attachment: Attachment, conf: NetConf) -> str:
    """Tell which MAC a pod's interface should have: a plugin later in the chain may have changed it, and says so."""
    interfaces = (conf.prev_result or {}).get("interfaces") or []
    told = next((entry.get("mac") for entry in interfaces if entry.get("name") == attachment.ifname), None)
    return str(told or attachment.request["settings"].get("mac") or attachment.undo.mac).lower()


def link_differences(link: Link | None, row: Attachment, mac: str = "") -> list[str]:
    """Tell what about a pod's interface is not as it was set up. Without a MAC any will do."""
    ifname, mtu = row.ifname, row.request["mtu"] or row.undo.mtu
    if link is None:
        return [f"interface {ifname} is not in the pod"]
    found = []
    if link.name != ifname:
        found.append(f"interface {ifname} is not in the pod: it is called {link.name} there")
    if not link.up:
        found.append(f"{ifname} is down")
    if mtu and link.mtu != mtu:
        found.append(f"{ifname} has MTU {link.mtu}, not {mtu}")
    if mac and link.mac != mac:
        found.append(f"{ifname} has MAC {link.mac}, not {mac}")
    missing = [name for name in row.request.get("altnames", ()) if name not in link.altnames]
    return found + [f"{ifname} lacks the alternative name {name}" for name in missing]


def bring_back(host: Host, where: Whereabouts, undo: Undo, netns: int | None, *, keep_mac: bool = False) -> Link | None:
    """Get an interface out of a pod's namespace, if it is open, or wait for the kernel to bring it.

    With `keep_mac` its MAC is left to `settle`. None if it is nowhere to be found.
    """
    if netns is not None:
        try:
            _bring_out(host, where, undo, netns, keep_mac)  # it is there, nearly always
        except HardwareError:
            if where.home() is None:
                raise
    return where.home()


def await_return(where: Whereabouts) -> Link:
    """Wait for the kernel to bring an interface back. Raises HardwareError if it does not."""
    link = awaited(where.home, RETURN_SECONDS)
    if link is None:
        raise HardwareError(
            f"{where.device} has no interface in the host after {RETURN_SECONDS:g} s: it is in a namespace"
            " that still lives, or its driver is gone"
        )
    return link


def _bring_out(host: Host, where: Whereabouts, undo: Undo, netns: int, keep_mac: bool) -> None:
    link = where.there(netns)
    if link is None:
        return
    strange = tuple(name for name in link.altnames if name not in undo.altnames)
    if strange:  # asked for, or given by the pod: in the host they may be another's
        host.links.change_altnames(link, remove=strange, netns=netns)
    change = replace(_lacking(undo, link), name=undo.netdev, up=False)
    if keep_mac:
        change = replace(change, mac=None)
    try:
        host.links.move_out(link, netns, change)
    except NetlinkFailed as error:
        if error.errno != errno.EEXIST or where.home() is not None:  # moved, and only the name is refused
            raise
        taken = tuple(name for name in undo.altnames if host.links.find(name) is not None)
        if taken:
            host.links.change_altnames(link, remove=taken, netns=netns)
        free = host.links.find(undo.netdev) is None
        name = undo.netdev if free else name_by_place(where.device)
        host.links.move_out(link, netns, replace(change, name=name))


def may_hold(row: Attachment, netns: int | None) -> bool:
    """Tell whether processes of a row's pod may hold what is on the interface. `netns` is the pod's, if it is open."""
    if netns is not None:
        return True
    # A row that was found or adopted after its pod's end knows no namespace.
    return row.owner.netns.inode != 0 and namespaces.is_hidden(row.owner.netns, row.netns_path)


def settle(host: Host, where: Whereabouts, undo: Undo, link: Link, *, pod_may_hold: bool) -> None:
    """Make an interface in the host as the undo record says, and verify it.

    Looked at again until it holds: some drivers change things later than they say so, and udev may rename an
    interface that has just come. `pod_may_hold` is `may_hold`'s word.
    Raises HardwareError that names what does not hold.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    _settle_tcx(host, undo, link, pod_may_hold)
    name = _own_name(host, where, undo, link)
    while True:
        _settle_names(host, undo, link)
        lacking = _lacking(replace(undo, netdev=name), link)
        if link.xdp and not undo.xdp and not _detach_xdp(host, link, pod_may_hold):
            undo = replace(undo, xdp=link.xdp)
        if lacking != LinkChange():
            try:
                host.links.change(link, lacking)
            except NetlinkFailed as error:
                if error.errno not in MAC_REFUSED or lacking.mac is None:
                    raise
                fetch_mac(host, link, replace(lacking, up=undo.up), None)
        elif not (link.xdp and not undo.xdp):
            return
        link = where.home() or link
        wrong = _differences(replace(undo, netdev=name), link)
        if not wrong:
            return
        if time.monotonic() > deadline:
            raise HardwareError(f"{where.device} came back with {', '.join(wrong)}")
        time.sleep(POLL_SECONDS)


def _settle_tcx(host: Host, undo: Undo, link: Link, pod_may_hold: bool) -> None:
    if undo.tcx is None:
        return
    held = host.links.detach_tcx(link, undo.tcx, undo.tcx_links or ())
    if not held:
        return
    what = "tcx " + ", ".join(f"program {found.program} of bpf_link {found.link}" for found in held)
    if pod_may_hold:
        raise HardwareError(f"{link.name} carries {what}, which a process of its pod may hold: it must let go first")
    log.warning("%s keeps %s: no pod holds that, so it is the host's", link.name, what)


def _detach_xdp(host: Host, link: Link, pod_may_hold: bool) -> bool:
    """Detach an XDP program, unless it is held for the host's sake."""
    try:
        host.links.detach_xdp(link)
    except NetlinkFailed as error:
        if error.errno != errno.EBUSY or pod_may_hold:
            raise
        log.warning("%s keeps its XDP program: a bpf_link holds it, and no pod does, so it is the host's", link.name)
        return False
    return True


def _own_name(host: Host, where: Whereabouts, undo: Undo, link: Link) -> str:
    if link.name != undo.netdev:
        other = host.links.find(undo.netdev)
        if other is not None and other.ifindex != link.ifindex:
            name = name_by_place(where.device)
            log.warning("%s keeps the name %s: another interface is called %s now", where.device, name, undo.netdev)
            return name
    return undo.netdev


def _settle_names(host: Host, undo: Undo, link: Link) -> None:
    """Take the pod's alternative names away and give back those lost, as far as they are free.

    Not verified: udev gives names too, when it likes.
    """
    strange = tuple(name for name in link.altnames if name not in undo.altnames)
    lost = tuple(name for name in undo.altnames if name not in link.altnames)
    if strange or lost:
        free = tuple(name for name in lost if host.links.find(name) is None)
        for name in set(lost) - set(free):
            log.warning("%s does not get its name %s again: another interface has it", link.name, name)
        host.links.change_altnames(link, remove=strange, add=free)


_SETTLED = tuple(field.name for field in fields(LinkChange) if field.name not in ("name", "master"))


def _lacking(undo: Undo, link: Link) -> LinkChange:
    """What to change about an interface so that it is as it was."""
    changes = {
        name: wanted
        for name in _SETTLED
        if (wanted := getattr(undo, name)) is not None and getattr(link, name) != wanted
    }
    return LinkChange(name=undo.netdev if link.name != undo.netdev else None, **changes)


def _differences(undo: Undo, link: Link) -> list[str]:
    lacking = asdict(_lacking(undo, link))
    found = [f"{name} {getattr(link, name)}, not {value}" for name, value in lacking.items() if value is not None]
    return [*found, "an XDP program"] if link.xdp and not undo.xdp else found
