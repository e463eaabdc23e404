"""An interface on its way into a pod's namespace, whatever stands in its way. `returning` is the way back."""

from __future__ import annotations

import errno
import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from agent.errors import HardwareError, NetlinkFailed
from agent.hardware.host import Host, Link, LinkChange, TcxProgram
from agent.model.allocation import Attachment, Undo
from agent.model.device import Snapshot
from cni.netconf import NetConf

SETTLE_SECONDS = 2.0
"""How long a driver may take until a change of the interface holds."""
POLL_SECONDS = 0.02
MAX_KEPT = 512
"""So many records are remembered: a pod waits for its VF's, and that says mostly what it said for the pod before."""
MAC_REFUSED = frozenset((errno.EADDRNOTAVAIL, errno.EPERM, errno.EACCES))
"""What drivers answer when their PF enforces a MAC: igbvf; ixgbevf and others; iavf."""

log = logging.getLogger(__name__)


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
        xdp=link.xdp,
        tcx=tuple(found.program for found in programs),
        tcx_links=tuple(found.link for found in programs if found.link) or None,
        mode=mode,
    )


def move_in(
    host: Host,
    link: Link,
    where: Whereabouts,
    netns: int,
    change: LinkChange,
    altnames: tuple[str, ...] = (),
    cpu: int | None = None,
) -> None:
    """Move an interface of the host into a namespace, changed, with these alternative names more.

    One request if nothing is in the way. An alternative name of its own that is taken in the pod (the kernel
    then refuses the move), or that is the name it is to have there, is taken away: the undo record has it.
    """
    if change.name in link.altnames:
        host.links.change_altnames(link, remove=(str(change.name),))
    try:
        host.links.move_in(link, netns, change, cpu)
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
    deadline = time.monotonic() + SETTLE_SECONDS
    link = where.there(netns)
    while link is not None and change.mac is not None and link.mac != change.mac:
        if time.monotonic() > deadline:
            raise HardwareError(f"{where.device} was given the MAC {change.mac} without an error but has {link.mac}")
        time.sleep(POLL_SECONDS)
        link = where.there(netns)
    if link is None:
        raise HardwareError(f"{where.device} was moved into the pod but is not there")
    if altnames:
        host.links.change_altnames(link, add=altnames, netns=netns)


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


def link_differences(link: Link | None, ifname: str, mac: str, mtu: int, altnames: tuple[str, ...]) -> list[str]:
    """Tell what about a pod's interface is not as it was set up."""
    if link is None:
        return [f"interface {ifname} is not in the pod"]
    found = []
    if link.name != ifname:
        found.append(f"interface {ifname} is not in the pod: it is called {link.name} there")
    if not link.up:
        found.append(f"{ifname} is down")
    if link.mtu != mtu:
        found.append(f"{ifname} has MTU {link.mtu}, not {mtu}")
    if link.mac != mac:
        found.append(f"{ifname} has MAC {link.mac}, not {mac}")
    missing = [name for name in altnames if name not in link.altnames]
    return found + [f"{ifname} lacks the alternative name {name}" for name in missing]
