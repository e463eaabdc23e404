"""What keeps a device that a call names out of a pod: kubelet gave it to another, or `cni.protect` names it.

Who writes a network attachment could take any device of the node by its name. One that a resource offers comes only
into the pod that kubelet gave it, and none that `cni.protect` names comes into any. kubelet's PodResources is the
authority: the books may still hold a grant whose pod is gone, and not know yet whose a new one is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from agent.config.networks import OF_SHARES
from agent.errors import NotAllowed
from agent.hardware.host import Link
from agent.hardware.sysfs.netdev import with_lower
from agent.hardware.sysfs.read import Attributes
from agent.model.allocation import PodRef
from agent.model.device import PciDevice, Snapshot, is_pci_address
from cni.call import Call, Holding, Node
from cni.netconf import NetConf
from cni.pod_devices import HeldDevices

REMEDY = "or set cni.requireGrant: false in the agent's configuration"
MAX_HOLDERS = 3


@dataclass(frozen=True, slots=True)
class Named:
    """What a configuration names."""

    text: str
    """As it is called there."""
    devices: tuple[str, ...]
    """PCI addresses: of an interface upon others (a VLAN, a bond) those of the others."""
    names: frozenset[str]
    """The interface and those below it, with all their names."""
    stays: bool
    """It stays in the host, and the pod gets an interface upon it."""


def device_names(device: PciDevice, snapshot: Snapshot) -> frozenset[str]:
    """List what a device may be called in `cni.protect`; a VF is called as its PF is, too."""
    parent = snapshot.parent(device)
    found = {device.address, *(netdev.name for netdev in device.netdevs)}
    return frozenset(found | (device_names(parent, snapshot) if parent is not None else set()))


def refusal(
    named: Named,
    offered: Mapping[str, str],
    vfs: Mapping[str, str],
    holding: Holding | None,
    pod: PodRef,
    holders: Sequence[str] = (),
) -> str | None:
    """Return why a pod may not have what it names; None if it may.

    `offered` are those of the named devices that a resource offers, with its name; `vfs` the VFs of them that one
    offers; `holders` the pods that have them by the books. Of what stays in the host a share is enough; who takes it
    away must have it alone.
    """
    if not offered and (named.stays or not vfs):
        return None
    mine: frozenset[str] = frozenset() if holding is None else holding.whole
    if holding is not None and named.stays:
        mine |= holding.shared
    if not mine.isdisjoint(named.devices):
        return None
    if not offered:
        vf, resource = next(iter(vfs.items()))
        more = " and others" if len(vfs) > 1 else ""
        return (
            f"{named.text} would take VFs along that {resource} offers ({vf}{more}): let the pod ask for {resource},"
            f" {REMEDY}"
        )
    device, resource = next(iter(offered.items()))
    what = f"{named.text} belongs to {resource}"
    if not pod.name:
        return (
            f"{what}, so it comes only into the pod that kubelet gave it, and this call names no pod in CNI_ARGS"
            f" (K8S_POD_NAMESPACE, K8S_POD_NAME): call it for a pod, {REMEDY}"
        )
    if holding is None:
        return f"{what}, and kubelet knows no pod {pod} that it could have given it to: create the pod, {REMEDY}"
    if device in holding.shared:
        return f"{what}, and pod {pod} has only a share of it: build upon it (mode macvlan, ipvlan or ipoib), {REMEDY}"
    given = f"kubelet has given it to {' and '.join(holders)}" if holders else "kubelet has given it to no known pod"
    return (
        f"{what}, and {given}, not to {pod}: let the pod ask for {resource}, with Multus through a network whose"
        f" annotation k8s.v1.cni.cncf.io/resourceName says so, {REMEDY}"
    )


class Permission:
    """Looks at what calls name. Methods block, and may be called on many threads at once."""

    def __init__(self, node: Node, held: HeldDevices) -> None:
        self._node = node
        self._held = held

    def check(self, call: Call, conf: NetConf, mode: str, device: str, *, is_granted: bool) -> None:
        """Raise NotAllowed for a device that the call's pod may not have, Unavailable if kubelet does not answer.

        `device` is the ledger's key of what is to be attached, `is_granted` tells that it is what kubelet gave.
        """
        settings = self._held.settings
        needs_grant = settings.require_grant and not is_granted
        if not (needs_grant or settings.protect):
            return
        if any(row.device == device for row in self._node.ledger.attachments_of(call.container_id, call.ifname)):
            return  # a repeated call
        named = self._named(conf, mode, device)
        if settings.protect:
            words = self._words(named, is_granted)
            if entry := next((entry for entry in settings.protect if entry in words), None):
                raise NotAllowed(
                    f"{named.text} is the host's alone, since cni.protect of the agent's configuration names {entry}:"
                    " name another, or take it out of that list"
                )
        if needs_grant:
            self._require_grant(call, named)

    def _named(self, conf: NetConf, mode: str, device: str) -> Named:
        stays = mode in OF_SHARES
        address = device if not stays else conf.device if conf.master is None else None
        bond = self._bond_of(conf) if stays and mode != "ipoib" else None
        if bond is None and address is not None and is_pci_address(address):
            return Named(conf.device or conf.master or address, (address,), frozenset(), stays)
        name = conf.master or device
        link = bond or self._node.host.links.find(name)
        below = with_lower(Attributes(self._node.host.root), [link.name if link is not None else name])
        links = [link for one in sorted(below) if (link := self._node.host.links.find(one)) is not None]
        devices = {link.device for link in links if link.device is not None and is_pci_address(link.device)}
        if not devices:  # virtio, say, whose interfaces are on a bus of their own
            devices = {d.address for d in self._node.scans.value.devices if any(n.name in below for n in d.netdevs)}
        text = f"{conf.master or conf.device}, a port of {bond.name}," if bond is not None else name
        return Named(text, tuple(sorted(devices)), below | {alt for link in links for alt in link.altnames}, stays)

    def _bond_of(self, conf: NetConf) -> Link | None:
        """Find the bond that a child is built upon when a port of it is named; None for what is no port of one."""
        from cni.modes.child import BONDS, bond_above  # a VF's ADD does without it

        host = self._node.host
        found = host.links.find(conf.master) if conf.master is not None else host.find_netdev(conf.device or "")
        above = bond_above(host, found) if found is not None and found.master is not None else None
        return above if above is not None and above.kind in BONDS else None

    def _words(self, named: Named, is_granted: bool) -> frozenset[str]:
        """List all by which `cni.protect` may mean a device. A VF that a resource offers is not meant by its PF."""
        snapshot, words = self._node.scans.value, {*named.names, *named.devices}
        for device in named.devices:
            found = snapshot.by_address.get(device)
            chain = [device]
            if found is not None and not (is_granted or self._resource_of([device])):
                words |= device_names(found, snapshot)
                chain += [found.physfn] if found.physfn is not None else []
            elif found is not None:
                words |= {netdev.name for netdev in found.netdevs}
            for link in (self._node.host.find_netdev(one) for one in chain) if not is_granted else ():
                words |= {link.name, *link.altnames} if link is not None else set()
        return frozenset(words)

    def _require_grant(self, call: Call, named: Named) -> None:
        devices = self._node.scans.value.by_address
        found = (devices.get(address) for address in named.devices)
        vfs = [vf for device in found if device is not None for vf in device.vfs] if not named.stays else []
        of_devices, of_vfs = self._resource_of(named.devices), self._resource_of(vfs)
        holding = self._held.holding(call.pod) if of_devices and call.pod.name else None
        why = refusal(named, of_devices, of_vfs, holding, call.pod, self._holders(of_devices))
        if why is not None:
            raise NotAllowed(why)

    def _resource_of(self, devices: Iterable[str]) -> Mapping[str, str]:
        """Return which of some devices a resource offers, or was offered by until a pod got it, and which resource."""
        offered = self._held.offered()
        named = ((device, offered.get(device) or self._node.ledger.resource_held(device)) for device in devices)
        return {device: resource for device, resource in named if resource is not None}

    def _holders(self, devices: Collection[str]) -> tuple[str, ...]:
        """List pods that have devices, as far as the books know: an adapter may have been shared out to many."""
        ledger = self._node.ledger
        holds = [hold for device in devices for hold in ledger.holds_on(device)]
        claims = (ledger.claim(hold.claim_uid) for hold in holds)
        pods = {hold.pod for hold in holds} | {pod for claim in claims if claim is not None for pod in claim.pods}
        return tuple(sorted(str(pod) for pod in pods if pod is not None))[:MAX_HOLDERS]
