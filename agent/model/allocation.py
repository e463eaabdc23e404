"""Who holds what: holds, claims, attachments, and the legal steps between their states.

hold (Allocate, or a prepared claim) → pod known → attach (device in the pod) → detach → release.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from agent.model.unit_id import SLOT


@dataclass(frozen=True, slots=True)
class Spec:
    """What the CDI spec of a hold says to its container, and what that is made of."""

    kind: str
    """Of the CDI name: that of the unit's resource (hca, vf, nic, accelerator or rail), or `claim`."""
    edits: Mapping[str, Any] = field(default_factory=dict)
    """containerEdits that follow from the hardware; empty while the device is gone: there is no spec then."""
    added: Mapping[str, Any] = field(default_factory=dict)
    """containerEdits that follow from what became of the device in its pod's network."""
    beside: tuple[str, ...] = ()
    """The units that its container was granted with it, itself included: variables name the devices of all."""
    nodes: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Of a unit with several devices: PCI address → the deviceNodes among the edits that are this device's."""

    @classmethod
    def from_document(cls, document: Mapping[str, Any] | None) -> Spec | None:
        """Read what JSON holds of a spec."""
        return cls(**{**document, "beside": tuple(document["beside"])}) if document is not None else None

    def with_nodes(self, device: str, nodes: Sequence[Mapping[str, Any]]) -> Spec:
        """Say it with other deviceNodes of one of its devices."""
        of_each = {**self.nodes, device: list(nodes)}
        by_path = {node["path"]: node for mine in of_each.values() for node in mine}
        return replace(self, nodes=of_each, edits={**self.edits, "deviceNodes": list(by_path.values())})

    def with_added(self, added: Mapping[str, Any]) -> Spec:
        """Add containerEdits in place of those that were added before. What the device's own say is left out."""
        left = {key: [each for each in listed if each not in self.edits.get(key, ())] for key, listed in added.items()}
        return replace(self, added={key: listed for key, listed in left.items() if listed})

    @property
    def whole(self) -> Mapping[str, Any]:
        """Both together. Of a variable that both have, what was added counts."""
        if not self.edits or not self.added:
            return self.edits
        names = {_variable(each) for each in self.added.get("env", ())}
        env = [each for each in self.edits.get("env", ()) if _variable(each) not in names]
        both = {key: [*self.edits.get(key, ()), *self.added.get(key, ())] for key in {**self.edits, **self.added}}
        return {**both, "env": [*env, *self.added.get("env", ())]}


NO_SPECS: Mapping[str, Spec] = MappingProxyType({})


def _variable(text: str) -> str:
    return text.partition("=")[0]


@dataclass(frozen=True, slots=True)
class Hold:
    """What kubelet gave to a pod, and the devices that stand for it: a unit, a slot, or one result of a claim.

    A slot gets its device at ADD, for as long as one sandbox lives and within one boot.
    """

    key: str
    """The unit's ID; of a claim the name of this result in the claim's CDI spec."""
    resource_name: str
    devices: tuple[str, ...] = ()
    """PCI addresses, or a GPU's UUID. None for a slot that is not bound, several for a rail."""
    since: float = 0.0
    """Seconds since the epoch. That of a claim stands there."""
    pod: PodRef | None = None
    """Known once CNI ADD or PodResources told. Those of a claim stand there, too."""
    spec: Spec | None = None
    """What its container gets by CDI; None where the answer to kubelet named files, or there is nothing to get."""
    kind: str = ""
    """vf, nic or hca, of a bound slot and of a claim."""
    exclusive: bool = False
    """Of claims: nobody else may have the device. A slot's is no other slot's."""

    # Of a slot that is bound.
    container: str = ""
    """Name of the pod's container that uses it."""
    container_id: str = ""
    """The sandbox, as its runtime calls it."""
    cni_ifname: str = ""
    """CNI_IFNAME of the call that it was bound for."""
    bound_at: float = 0.0
    boot_id: str = ""

    # Of a claim.
    claim_uid: str = ""
    request: str = ""
    """As kubelet knows it: without its sub-request."""
    pool: str = ""
    device_name: str = ""
    """In the ResourceSlice."""
    share_id: str = ""
    """Where the device may be allocated several times."""
    admin: bool = False
    """Admin access: it is looked at, and stays where it is."""
    identity: str = ""
    """What finds the device again when a reboot has moved it (`agent.model.vf_identity`); empty if nothing does."""
    network: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Keys of a network (as in the configuration's `networks`, but for the name) that the device is set up with."""
    ifname: str = ""
    """Name of its interface in the pod, with %d where a number is to be; empty for the next free one."""
    shares: int = 1
    """How many of an adapter's shares it takes up."""

    @property
    def device(self) -> str:
        """The device, or the first of a rail's NICs; empty for a slot that is not bound."""
        return self.devices[0] if self.devices else ""

    @property
    def edits(self) -> Mapping[str, Any]:
        """containerEdits that follow from the hardware."""
        return self.spec.edits if self.spec is not None else {}

    @property
    def is_share(self) -> bool:
        """Whether it is a part of a device by a claim, of which others may have parts, too."""
        return bool(self.claim_uid) and not self.exclusive

    @property
    def is_bound(self) -> bool:
        """Whether it is a slot that has a device."""
        return bool(self.devices) and self.is_slot

    @property
    def is_slot(self) -> bool:
        """Whether its device is chosen at ADD."""
        return self.key.startswith(SLOT) and not self.claim_uid

    def is_bound_as(self, other: Hold) -> bool:
        """Tell whether a slot has the same device, for the same sandbox and interface."""
        mine, its = ((hold.container_id, hold.cni_ifname, hold.devices) for hold in (self, other))
        return mine == its

    def excludes(self, other: Hold) -> bool:
        """Tell whether two holds cannot have one device. kubelet is believed in what it gives out twice as units."""
        if self.admin or other.admin or (self.claim_uid and self.claim_uid == other.claim_uid):
            return False
        if self.claim_uid or other.claim_uid:
            return any(hold.claim_uid and hold.exclusive for hold in (self, other))
        return self.is_slot and other.is_slot


@dataclass(frozen=True, slots=True)
class PodRef:
    namespace: str
    name: str
    uid: str = ""
    """Empty where the source (PodResources) does not tell."""

    @property
    def names(self) -> tuple[str, str]:
        """Namespace and name."""
        return self.namespace, self.name

    def is_same(self, other: PodRef) -> bool:
        """Compare UIDs where both are known, else names."""
        return self.uid == other.uid if self.uid and other.uid else self.names == other.names

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class NetnsId:
    """Identity of a network namespace: device and inode of its nsfs file, never its path."""

    device: int
    inode: int

    def __str__(self) -> str:
        return f"{self.device}:{self.inode}"


@dataclass(frozen=True, slots=True)
class Owner:
    """Who an attachment is for: one CNI call's sandbox and interface."""

    container_id: str
    cni_ifname: str
    """CNI_IFNAME of the call. A chained call may make several interfaces under one of these."""
    pod: PodRef
    netns: NetnsId


class AttachmentState(StrEnum):
    ATTACHING = "attaching"
    """Hardware may be touched in part; the undo record says how to get back."""
    ATTACHED = "attached"
    DETACHING = "detaching"
    """Promised to be undone. The answer to DEL may be out already."""


@dataclass(frozen=True, slots=True)
class VfSettings:
    """What a PF enforces on one VF. None: leave alone (in a change) or unknown (in a reading).

    Rates are in Mbit/s, 0 for no limit. Source: rtnetlink IFLA_VF_* (include/uapi/linux/if_link.h).
    """

    mac: str | None = None
    vlan: int | None = None
    vlan_qos: int | None = None
    vlan_proto: str | None = None
    """802.1q or 802.1ad"""
    min_tx_rate: int | None = None
    max_tx_rate: int | None = None
    spoofchk: bool | None = None
    trust: bool | None = None
    link_state: str | None = None
    """auto, enable or disable"""
    trunk: str | None = None
    """VLANs that the VF may send tagged, as 100,200-210; empty: all. Some drivers' own sysfs has it, not rtnetlink."""

    @property
    def is_empty(self) -> bool:
        return self is NO_SETTINGS or self == NO_SETTINGS

    def document(self) -> dict[str, Any]:
        """Return all fields that say something, as JSON holds them."""
        if self.is_empty:
            return {}
        return {name: v for name in VfSettings.__dataclass_fields__ if (v := getattr(self, name)) is not None}


NO_SETTINGS = VfSettings()


_NO_LONGER_PUT_BACK = frozenset({"alias", "group", "limits", "tx_queue"})
"""Stand in rows of earlier versions."""


@dataclass(frozen=True, slots=True)
class Undo:
    """All that is needed to put a device back as it was found. Written before the first change.

    None: not known, so left alone.
    """

    netdev: str
    """Name in the host; empty for a device that has no interface."""
    mac: str
    mtu: int
    up: bool
    pf_netdev: str | None = None
    vf_index: int | None = None
    settings: VfSettings = NO_SETTINGS
    """The PF's settings before; only fields that were about to be changed are set."""
    mode: str = "vf"
    """Which mode brought the device in, and will bring it back."""
    rdma: str | None = None
    """The RDMA device that moved along, as it is called in the host."""
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What only this mode needs; values are as JSON holds them."""
    altnames: tuple[str, ...] = ()
    promisc: bool | None = None
    allmulti: bool | None = None
    arp: bool | None = None
    multicast: bool | None = None
    broadcast: str | None = None
    """The hardware address that reaches everybody; None on InfiniBand, where it changes with the partition."""
    link_mode: int | None = None
    """Whether carrier alone makes it usable (IF_LINK_MODE_*)."""
    xdp: int | None = None
    """How an XDP program was attached (XDP_ATTACHED_*), 0 for none."""
    tcx: tuple[int, ...] | None = None
    """IDs of the tcx programs that were attached."""
    tcx_links: tuple[int, ...] | None = None
    """IDs of the bpf_links that held some of them; None if none did. A link may have another program afterwards."""

    def document(self) -> dict[str, Any]:
        """Return all fields that say something, as JSON holds them."""
        found = {name: v for name in Undo.__dataclass_fields__ if (v := getattr(self, name)) is not None}
        return found | {"settings": self.settings.document(), "extra": dict(self.extra)}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Undo:
        """Read what `document` made, in this version or an earlier one, which kept more of an interface."""
        made = {name: value for name, value in document.items() if name not in _NO_LONGER_PUT_BACK}
        made["settings"] = VfSettings(**document["settings"])
        made |= {name: tuple(made[name]) for name in ("altnames", "tcx", "tcx_links") if name in made}
        return cls(**made)


@dataclass(frozen=True, slots=True)
class Attachment:
    """One device in one pod."""

    attachment_id: int
    owner: Owner
    ifname: str
    """Name of the interface inside the pod."""
    device: str
    """PCI address; for an interface made for the pod `<parent>/<container ID>/<ifname>`."""
    resource_name: str
    state: AttachmentState
    undo: Undo
    boot_id: str
    netns_path: str
    request: Mapping[str, Any]
    """The effective network configuration (for IPAM DEL and CHECK)."""
    result: Mapping[str, Any] | None = None
    """The CNI result that was answered; None until attached."""
    since: float = 0.0
    """Seconds since the epoch of the last state change."""
    claim_uid: str = ""
    """The DRA claim that brought the device; empty if none did."""

    @property
    def parent(self) -> str:
        """The device, or the one that the interface was made on."""
        return self.device.partition("/")[0]


FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 60.0, 6 * 3600.0
"""After a try to give a lease back. Between them, the time for which it was owed then: each pause is twice as long as
the one before, also where the agent started anew in it."""


@dataclass(frozen=True, slots=True)
class OwedLease:
    """Addresses that an IPAM plugin has not taken back yet."""

    lease_id: int
    container_id: str
    ifname: str
    netns_path: str
    request: Mapping[str, Any]
    """As in the attachment they belonged to."""
    since: float
    tried_at: float = 0.0
    """When the plugin was asked last; 0 for never."""
    problem: str = ""
    """What it said."""

    def is_due(self, now: float) -> bool:
        """Tell whether it is time to ask again. A clock that was set back keeps nobody waiting for longer."""
        pause = min(max(self.tried_at - self.since, FIRST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)
        return not 0 < self.tried_at + pause - now <= pause


class Withheld(StrEnum):
    """Why a device is in quarantine. Metrics count by it, so it names neither devices nor numbers."""

    CLEAN_UP_FAILED = "clean-up failed"
    DRIVER_MAY_HANG = "its driver may hang"

    def because(self, detail: object) -> str:
        """Return the reason for the books, with what was seen of this device."""
        return f"{self}: {detail}"


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A device withheld from kubelet because its clean-up could not be verified."""

    device: str
    reason: str
    """A word of `Withheld`, a colon and details. Books of earlier versions may have other words."""
    since: float
    boot_id: str = ""
    """The boot in which that was; a later one has reset the device."""


PLACE = "slots-"
"""What the name of a place begins with: a device of the ResourceSlice that stands for several late-bound ones."""
_PLACE = re.compile(rf"{PLACE}[a-z0-9-]{{1,57}}")


def is_place(name: str) -> bool:
    """Tell whether a name is of a place, and not a device's of its own."""
    return _PLACE.fullmatch(name) is not None


class ClaimState(StrEnum):
    """How far kubelet has come with a claim on this node."""

    PREPARING = "preparing"
    PREPARED = "prepared"
    UNPREPARING = "unpreparing"


@dataclass(frozen=True, slots=True)
class ClaimRef:
    """A ResourceClaim, as kubelet names it."""

    uid: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim that kubelet has given to us to prepare."""

    ref: ClaimRef
    state: ClaimState
    devices: tuple[Hold, ...] = ()
    """One for each result of its allocation, in their order."""
    pods: tuple[PodRef, ...] = ()
    """Those that the claim was reserved for when it was last read."""
    only_pod: str = ""
    """UID of the pod that owns the claim (made from a template, or for extended resources)."""
    boot_id: str = ""
    since: float = 0.0
    """Seconds since the epoch."""

    @property
    def alone(self) -> frozenset[str]:
        """The devices that nobody else may have."""
        return frozenset(hold.device for hold in self.devices if hold.exclusive and not hold.admin)

    def is_for(self, pod: PodRef) -> bool:
        """Tell whether a pod may use it. A runtime that tells no UID is believed in its names."""
        if pod.uid:
            return pod.uid == self.only_pod or any(p.uid == pod.uid for p in self.pods)
        return any(p.names == pod.names for p in self.pods)


def how_held(hold: Hold, claim: Claim | None = None, container: str = "") -> str:
    """Say how a pod has its device, in the user's words. `claim` is the hold's, `container` the pod's that uses it."""
    if claim is not None:
        whose = f" for {', '.join(map(str, claim.pods))}" if claim.pods else ""
        return f"claimed by {claim.ref} ({hold.request}){whose}"
    where = f" ({container})" if container else ""
    return f"granted to {hold.pod or 'a pod not known yet'}{where}"


MAX_ADDRESSES = 16
"""The API server refuses more."""


@dataclass(frozen=True, slots=True)
class NetworkData:
    """An interface in a pod; empty for a device that is there without one."""

    interface: str = ""
    mac: str = ""
    addresses: tuple[str, ...] = ()
    """In CIDR form."""

    def document(self) -> dict[str, Any]:
        """Write it as `networkData` of the API, which names no address twice."""
        found = {
            "interfaceName": self.interface,
            "hardwareAddress": self.mac,
            "ips": list(dict.fromkeys(self.addresses))[:MAX_ADDRESSES],
        }
        return {key: value for key, value in found.items() if value}


def network_data(result: Mapping[str, Any], ifname: str) -> NetworkData:
    """Find an interface of a pod in a CNI result; an empty one if it is not there."""
    interfaces = result.get("interfaces") or []
    mine = [i for i, found in enumerate(interfaces) if found.get("name") == ifname and found.get("sandbox")]
    if not mine:
        return NetworkData()
    addresses = tuple(ip["address"] for ip in result.get("ips") or [] if ip.get("interface") in mine)
    return NetworkData(ifname, str(interfaces[mine[0]].get("mac", "")), addresses)
