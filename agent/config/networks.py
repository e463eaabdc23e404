"""The entries of `networks`, and what the keys of our own plugin type mean, there, in a CNI configuration and in the
parameters of claims: one model for all three.

A key that is not known is refused: a typo must not silently leave a VF open. An entry is read when the configuration is
loaded, a CNI configuration when it is first met.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field, PlainValidator, TypeAdapter, WithJsonSchema

from agent.config.routing import NO_ROUTING, Routing, RoutingKeys
from agent.config.section import (
    FLAG,
    MAX_VALUES,
    Kind,
    Refusal,
    advice,
    checked,
    folded,
    is_plain_json,
    must_be,
    read_beside,
    refuse,
    shown,
    that,
    value,
    whole,
    word,
)
from agent.config.template import (
    IN_QUOTES,
    NO_WORDS,
    SAMPLE,
    Place,
    filled,
    misunderstood,
    unquoted,
    words_of,
)
from agent.errors import RequestInvalid
from agent.model import number_ranges
from agent.model.allocation import NO_SETTINGS, VfSettings, is_place
from agent.model.device import is_pci_address
from agent.model.fields import unicast_mac
from agent.model.unit_id import UnitId

OWN = "nodefabric"
REPLACED = ("sriov", "ib-sriov", "rdma", "ipoib")
NO_IPAM = frozenset(
    (
        *(OWN, *REPLACED),
        *("bridge", "ptp", "macvlan", "macvtap", "ipvlan", "vlan", "host-device", "loopback", "dummy", "tap"),
        *("portmap", "bandwidth", "firewall", "tuning", "sbr", "vrf", "route-override", "accelerated-bridge", "ovs"),
        *("flannel", "calico", "cilium-cni", "multus", "multus-shim"),
    )
)
"""Types of plugins that attach interfaces, or change what others attached. One that is given itself as its IPAM plugin
calls itself without end."""
OF_SHARES = ("macvlan", "ipvlan", "ipoib")
"""Modes that build upon an adapter, and so for who has a share of it."""
MODES = ("vf", "nic", *OF_SHARES)
MACVLAN_MODES = ("bridge", "private", "vepa", "passthru")
IPVLAN_MODES = ("l2", "l3", "l3s")
BONDS = ("active-backup",)
LINK_STATES = ("auto", "enable", "disable")
MAX_MTU = 65520
MAX_LISTED = 16  # of what a bond may ask the kernel's limit, too
NETWORK_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
MAX_RATE = 2**31
_IFNAME = re.compile(r"(?!\.{1,2}$)[!-.0-9;-~]{1,15}")
_IFNAMES = re.compile(r"(?!\.{1,2}$|lo$|%d$)(?=[^%]*(?:%d[^%]*)?$)[!-.0-9;-~]{1,15}")
WANTED_IFNAME = "an interface name of at most 15 characters"
PODS_OWN = "eth0"
"""The interface of the cluster's network, as every runtime calls it in pods."""
_ALTNAME = re.compile(r"(?!\.{1,2}$)[!-.0-9;-~]{1,127}")
_IPV4 = re.compile(r"(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)(?:\.|$)){4}(?<!\.)", re.ASCII)
_PLUGIN_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_TOLD_ANEW = frozenset(("cniversion", "name", "type", "ipam", "prevresult"))
# Given to every plugin by the runtime or by Multus, and of no meaning to this one.
FOREIGN = frozenset(
    (
        *("capabilities", "args", "dns", "cniVersions", "disableCheck", "disableGC", "loadOnlyInlinedPlugins"),
        *("logLevel", "logFile"),
    )
)
_HEEDED_IN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "master": ("nic", *OF_SHARES),
        "mac": ("vf", "nic", "macvlan"),
        "rdma": ("vf", "nic"),
        "pkey": ("vf", "ipoib"),
        "macvlanMode": ("macvlan",),
        "ipvlanMode": ("ipvlan",),
        **dict.fromkeys(("pf", "guid", "vfio", "functionReset", "spoofchk", "trust", "link_state", "bond"), ("vf",)),
        **dict.fromkeys(("vlan", "vlanQoS", "vlanProto", "trunk", "min_tx_rate", "max_tx_rate", "arpTargets"), ("vf",)),
    }
)
"""Key → the modes that heed it; a key that is not here has a meaning in all of them."""
_NOT_BONDED = ("mac", "guid", "pkey", "vfio", "functionReset")
"""Keys for VFs that a bond cannot join, and the MAC, which each of its VFs keeps."""
_OFF_ANYWHERE = frozenset(("rdma", "functionReset"))
"""To switch these off asks for nothing."""
_OF_EACH_POD = ("deviceID", "pciBusID", "pf", "runtimeConfig", "args")
"""What no network of the agent's configuration can say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What becomes of a device in a pod."""

    mode: str = "vf"
    """vf, nic, macvlan, ipvlan or ipoib. What a VF really is (Ethernet, InfiniBand, vfio) shows its device."""
    settings: VfSettings = NO_SETTINGS
    mtu: int | None = None
    ipam: Mapping[str, Any] | None = None
    for_ipam: Mapping[str, Any] = field(default_factory=dict)
    """With `ipam`, all else that is said, in the keys it came in: an IPAM plugin gets what the plugin got (CNI
    specification, section 4), such as what the pod asks of it (runtimeConfig.ips, args.cni.ips)."""
    master: str | None = None
    """Interface of the host: the parent of a child, or the one that mode nic moves."""
    guid: str | None = None
    """Node and port GUID of an InfiniBand VF, aa:bb:cc:dd:ee:ff:00:11."""
    pkey: int | None = None
    rdma: bool | None = None
    """Whether the RDMA device goes along. None: if the system keeps them apart. True: it must."""
    vfio: bool | None = None
    """True: the device must be bound to a driver for programs. None: look."""
    function_reset: bool = False
    """Reset the function when it comes back from a pod that drove it itself."""
    altnames: tuple[str, ...] = ()
    macvlan_mode: str = "bridge"
    ipvlan_mode: str = "l2"
    bond: str | None = None
    """How two VFs of the pod, of different PFs, are joined into one interface."""
    arp_targets: tuple[str, ...] = ()
    """Whom the bond asks whether its VF that carries still does; nobody: it goes by the VFs' links."""
    routing: Routing = NO_ROUTING


@dataclass(frozen=True, slots=True)
class Network:
    """An entry of `networks`: how the devices of the resources that name it are set up in pods."""

    name: str
    setup: Setup = Setup()
    keys: Mapping[str, Any] = field(default_factory=dict)
    """As they are written, but for the name."""
    ifname: str = ""
    """Of interfaces in pods, a number behind it where one has that already; empty for net1, net2 …"""
    words: frozenset[str] = NO_WORDS
    """What of a device its templates ask for: then all else is but a sample, and `at` returns what is meant."""
    by_pf: Mapping[str, Network] = field(default_factory=dict)
    """PF, by interface or PCI address → what its devices join; empty where all join this one."""

    def named_for(self, place: Place) -> Network | None:
        """Return the network that a device at a place joins, as it is configured; None if none is named for its PF."""
        return self.by_pf.get(place.adapter) or self.by_pf.get(place.pf) if self.by_pf else self

    def at(self, place: Place) -> Network:
        """Return what is meant for a device at a place. Raises RequestInvalid if the place does not tell."""
        if self.by_pf:
            found = self.named_for(place)
            if found is None:
                raise RequestInvalid(
                    f"no network is named for the adapter {place.pf or place.adapter}: add it to the resource's"
                    f" `network`, which names {', '.join(self.by_pf)}"
                )
            return found.at(place)
        if not self.words:
            return self
        keys = filled(self.keys, place)
        entry = checked(_ENTRY, keys)
        setup = replace(entry.setup(keys), mode=self.setup.mode)
        return replace(self, setup=setup, keys=keys, ifname=entry.ifname, words=NO_WORDS)

    def for_devices(self, nic_kind: str) -> Network:
        """Return what is meant for a resource of a kind.

        A network that names no mode takes whole adapters as such: the usual mode is for VFs, and for what programs
        drive.
        """
        if self.by_pf:
            return replace(self, by_pf={pf: network.for_devices(nic_kind) for pf, network in self.by_pf.items()})
        if nic_kind != "nic" or "mode" in self.keys or self.setup.vfio or self.setup.function_reset:
            return self
        return replace(self, setup=replace(self.setup, mode="nic"))


ADAPTER = Network("", Setup(mode="nic"))
"""What a whole adapter joins where no network is named."""


# ------------------------------------------------------------------------------------------------------ kinds of values


def is_ifname(text: str) -> bool:
    """Return whether interfaces of pods may be called so; %d stands for a number."""
    return _IFNAMES.fullmatch(text) is not None


def device_in(text: str) -> str | None:
    """Spell what names a device: a PCI address, a slot, a place of a claim's devices, or a share of an adapter."""
    if UnitId.parse(text).is_slot:
        return text
    return text.lower() if is_pci_address(text.lower()) or is_place(text) or UnitId.parse(text).is_share else None


def _guid(text: str) -> str | None:
    text = text.lower()
    return text if _GUID.fullmatch(text) and text not in _EMPTY_GUIDS else None


def _switch(given: Any) -> bool | None:
    if given == "":
        return None
    if isinstance(given, bool):
        return given
    if given not in ("on", "off"):
        raise ValueError
    return bool(given == "on")


def _pkey(given: Any) -> int | None:
    """Read a partition key. Its top bit says full member; the other 15 must not all be zero."""
    if given == "":
        return None
    number = given
    if isinstance(given, str) and re.fullmatch(r"0[xX][0-9a-fA-F]{1,4}|[0-9]{1,5}", given):
        number = int(given, 16 if given[:2] in ("0x", "0X") else 10)
    if type(number) is not int or not 0 < number <= 0xFFFF or not number & 0x7FFF:
        raise ValueError
    return number


def _names(pattern: re.Pattern[str], what: str) -> Kind:
    def read(given: Any) -> tuple[str, ...]:
        if not isinstance(given, list) or len(given) > MAX_LISTED:
            raise ValueError
        if not all(isinstance(each, str) and pattern.fullmatch(each) for each in given):
            raise ValueError
        return tuple(dict.fromkeys(given))

    return value(f"a list of at most {MAX_LISTED} {what}", read, {})


def _trunk(given: Any) -> str | None:
    """Read `trunk`: the VLANs that a VF may send with tags of its own. ovs-cni knows the key as a list of objects."""
    if given == "":
        return None
    if not isinstance(given, list):
        ranges = _ranges(given)
        if ranges is None:
            raise must_be(_TRUNK)
        return number_ranges.spelled(ranges)
    if not given:
        raise must_be(_TRUNK)
    found = [_of_object(item) if isinstance(item, dict) else _ranges(item) for item in given]
    wrong = (i for i, ranges in enumerate(found) if ranges is None)
    refuse(Refusal((i,), f"must be {_TRUNK_ITEM}, is {shown(given[i])}") for i in wrong)
    return number_ranges.spelled(each for ranges in found for each in ranges or ())


def _of_object(item: dict[str, Any]) -> tuple[number_ranges.Range, ...] | None:
    if item.keys() == {"id"}:
        return _between(item["id"], item["id"])
    return _between(item["minID"], item["maxID"]) if item.keys() == {"minID", "maxID"} else None


def _ranges(given: Any) -> tuple[number_ranges.Range, ...] | None:
    """Read an ID, or a text of several. None for what is neither."""
    if not isinstance(given, str):
        return _between(given, given)
    try:
        return number_ranges.parse(given)
    except ValueError:
        return None


def _between(first: Any, last: Any) -> tuple[number_ranges.Range, ...] | None:
    if type(first) is int and type(last) is int and number_ranges.UNTAGGED <= first <= last <= number_ranges.LAST:
        return ((first, last),)
    return None


def _ipam(given: Any) -> Mapping[str, Any] | None:
    if not isinstance(given, dict):
        raise must_be("an object")
    if not given:
        return None
    name = given.get("type")
    if not isinstance(name, str) or not _PLUGIN_TYPE.fullmatch(name):
        refuse([Refusal(("type",), f"must be the name of an IPAM plugin, is {shown(name)}")])
    if name in NO_IPAM:
        text = (
            f"must be the name of an IPAM plugin, is {shown(name)}, which leases no addresses: take host-local,"
            " whereabouts or the like"
        )
        refuse([Refusal(("type",), text)])
    return given


def no_dhcp(ipam: Mapping[str, Any] | None) -> Iterator[Refusal]:
    """Refuse DHCP, for InfiniBand."""
    if ipam and ipam.get("type") == "dhcp":
        text = "must not be dhcp, which knows no InfiniBand addresses: take host-local or the like"
        yield Refusal(("ipam", "type"), text)


def of_settings(
    vlan: int | None, qos: int | None, proto: str | None, low: int | None, high: int | None
) -> Iterator[Refusal]:
    """List settings of a VF that do not go together."""
    if not vlan and qos:
        yield Refusal(("vlanQoS",), "needs a vlan from 1 to 4094")
    if not vlan and (proto or "").lower() == "802.1ad":
        yield Refusal(("vlanProto",), "802.1ad needs a vlan from 1 to 4094")
    yield from of_rates(low, high)


def of_rates(low: int | None, high: int | None) -> Iterator[Refusal]:
    """Refuse a guaranteed rate above the highest."""
    if low and high and low > high:
        yield Refusal(("min_tx_rate",), f"{low} is above max_tx_rate {high} (Mbit/s)")


def ipam_of(given: Any) -> Mapping[str, Any] | None:
    """Read `ipam` as a Go plugin does: its type in any case, and none where it names no plugin."""
    if isinstance(given, dict):
        name = folded(given, ("type",)).get("type")
        if not name:
            return None
        given = {**given, "type": name}
    return _ipam(given)


def _object(given: Any) -> Any:
    if not isinstance(given, dict):
        raise ValueError
    return given


_TRUNK = 'VLAN IDs from 0 to 4094 and ranges of them, such as "100,200-210" or [100, "200-210"]'
_TRUNK_ITEM = 'a VLAN ID from 0 to 4094, a range such as "200-210", {"id": 100} or {"minID": 200, "maxID": 210}'
_GUID = re.compile(r"[0-9a-f]{2}(?::[0-9a-f]{2}){7}")
_EMPTY_GUIDS = ("00:00:00:00:00:00:00:00", "ff:ff:ff:ff:ff:ff:ff:ff")
_VLAN, _QOS, _RATE = whole(0, 4094), whole(0, 7), whole(0, MAX_RATE)
SWITCH = value('"on" or "off"', _switch, {})
MAC = that("a unicast MAC address such as 02:00:00:00:00:01", unicast_mac)
GUID = that("an InfiniBand GUID such as 02:00:00:00:00:00:00:01", _guid)
DEVICE = that("a PCI address such as 0000:3b:02.1, or a slot such as slot-rdma:vf-0-3", device_in)
INTERFACE = that("an interface name of at most 15 characters", _IFNAME.fullmatch)
LINK_STATE = word(*LINK_STATES)
OBJECT = value("an object", _object, {"type": "object"})
VERSION = that("a text such as 1.0.0", str)
PROTOCOLS = word("802.1q", "802.1ad", "802.1Q", "802.1AD", "802.1Ad", convert=str.lower)


# --------------------------------------------------------------------------------------------------------- the model


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkKeys(RoutingKeys):
    """What an entry of `networks`, a CNI configuration of ours and a claim's parameters may say of an interface."""

    mode: Annotated[str | None, word(*MODES)] = None
    mac: Annotated[str | None, MAC] = None
    vlan: Annotated[int | None, _VLAN] = None
    vlan_qos: Annotated[int | None, _QOS, Field(alias="vlanQoS")] = None
    vlan_proto: Annotated[str | None, PROTOCOLS] = None
    min_tx_rate: Annotated[int | None, _RATE, Field(alias="min_tx_rate")] = None
    max_tx_rate: Annotated[int | None, _RATE, Field(alias="max_tx_rate")] = None
    spoofchk: Annotated[bool | None, SWITCH] = None
    trust: Annotated[bool | None, SWITCH] = None
    link_state: Annotated[str | None, LINK_STATE, Field(alias="link_state")] = None
    trunk: Annotated[str | None, PlainValidator(_trunk)] = None
    mtu: Annotated[int | None, whole(68, MAX_MTU)] = None
    ipam: Annotated[Mapping[str, Any] | None, PlainValidator(_ipam)] = None
    master: Annotated[str | None, INTERFACE] = None
    guid: Annotated[str | None, GUID] = None
    pkey: Annotated[int | None, value("a partition key from 1 to 0xffff, such as 0x8001", _pkey, {})] = None
    rdma: Annotated[bool | None, FLAG] = None
    vfio: Annotated[bool | None, FLAG] = None
    function_reset: Annotated[bool | None, FLAG] = None
    altnames: Annotated[
        tuple[str, ...], _names(_ALTNAME, "interface names of at most 127 characters each"), Field(alias="altNames")
    ] = ()
    macvlan_mode: Annotated[str | None, word(*MACVLAN_MODES)] = None
    ipvlan_mode: Annotated[str | None, word(*IPVLAN_MODES)] = None
    bond: Annotated[str | None, word(*BONDS)] = None
    arp_targets: Annotated[tuple[str, ...], _names(_IPV4, "IPv4 addresses")] = ()

    @classmethod
    def is_foreign(cls, key: str) -> bool:
        return key in FOREIGN or key.startswith("cni.dev/")

    @classmethod
    def refused(cls, given: Mapping[str, Any]) -> Iterator[Refusal]:
        yield from super(NetworkKeys, cls).refused(given)
        mode = given.get("mode") or "vf"
        if mode in MODES:
            yield from misplaced(mode, given)

    def contradictions(self) -> Iterator[Refusal]:
        yield from of_settings(self.vlan, self.vlan_qos, self.vlan_proto, self.min_tx_rate, self.max_tx_rate)
        if self.trunk is not None and self.vlan:
            text = (
                f"cannot be had with vlan {self.vlan}: either the PF tags what the VF sends, or the VF does;"
                " leave one of the two out"
            )
            yield Refusal(("trunk",), text)
        if self.mode == "ipoib":
            yield from no_dhcp(self.ipam)
        if self._has_routing:
            yield from self.of_routing(has_addresses=self.ipam is not None)

    @property
    def _has_routing(self) -> bool:
        said = (self.routing, self.routes, self.rules, self.neighbours, self.sysctls)
        return self.gateway is not None or any(said)

    def setup(self, document: Mapping[str, Any]) -> Setup:
        """Return what becomes of a device. `document` is what it was read from: an IPAM plugin gets that, too."""
        return Setup(
            **_said(self, _SAME),
            settings=settings_of(self),
            for_ipam=for_ipam(document) if self.ipam is not None else {},
            routing=self.routing_value() if self._has_routing else NO_ROUTING,
        )


_SAME = tuple(f.name for f in fields(Setup) if f.name not in ("settings", "for_ipam", "routing"))
_OF_SETTINGS = tuple(f.name for f in fields(VfSettings))


def _said(keys: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: said for name in names if (said := getattr(keys, name, None)) is not None}


def settings_of(keys: object) -> VfSettings:
    """Return the settings of a VF that keys, called as its fields are, say."""
    return VfSettings(**_said(keys, _OF_SETTINGS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry(NetworkKeys):
    """An entry of `networks`, but for its name."""

    type: Annotated[str | None, word(OWN)] = None
    cni_version: Annotated[str | None, VERSION] = None
    ifname: Annotated[str, that(WANTED_IFNAME, is_ifname), Field(alias="ifName")] = ""

    @classmethod
    def refused(cls, given: Mapping[str, Any]) -> Iterator[Refusal]:
        left = {key: value for key, value in given.items() if key not in _OF_EACH_POD}
        chosen = (key for key in _OF_EACH_POD if given.get(key))
        yield from (Refusal((key,), "is chosen for each pod, so leave it out") for key in chosen)
        yield from super(Entry, cls).refused(left)

    def contradictions(self) -> Iterator[Refusal]:
        yield from super(Entry, self).contradictions()
        if self.ifname == PODS_OWN:
            text = f"must not be {PODS_OWN}, which is the pod's own interface: take another name"
            yield Refusal(("ifName",), text)


_ENTRY = TypeAdapter(Entry)


def _read_entry(given: Any) -> Network:
    """Read an entry: `name`, and what a CNI configuration of ours may say, but for what is another for each pod."""
    if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
        raise must_be("a mapping with text keys")
    name, keys = given.get("name"), {key: value for key, value in given.items() if key != "name"}
    text = "must be plain JSON values, not dates or the like, is"
    wrong = [Refusal((k,), f"{text} {shown(value, k)}") for k, value in keys.items() if not is_plain_json(value)]
    keys = _without(keys, wrong)
    if "name" not in given:
        wrong.append(Refusal(("name",), "is missing"))
    elif not (isinstance(name, str) and NETWORK_NAME.fullmatch(name)):
        text = f"must be a lower-case DNS label, is {shown(name)}{advice(name, is_text=True)}"
        wrong.append(Refusal(("name",), text))
    wrong += [Refusal(loc, f"is {text} without quotes: {IN_QUOTES}") for loc, text in unquoted(keys)]
    wrong += [Refusal(loc, text) for loc, text in misunderstood(keys)]
    made = read_beside(wrong, lambda keys: _made(str(name), keys, _ENTRY.validate_python), _without(keys, wrong))
    refuse(wrong)
    return made


def _without(keys: Mapping[str, Any], wrong: Iterable[Refusal]) -> dict[str, Any]:
    left_out = {each.loc[0] for each in wrong}
    return {key: value for key, value in keys.items() if key not in left_out}


def _made(name: str, keys: Mapping[str, Any], read: Callable[[Any], Entry]) -> Network:
    words = words_of(keys)
    meant = filled(keys, SAMPLE) if words else keys
    entry = read(meant)
    return Network(name, entry.setup(meant), keys, entry.ifname or "", words)


NetworkEntry = Annotated[
    Network,
    PlainValidator(_read_entry),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "name": {
                    "type": "string",
                    "pattern": f"^(?:{NETWORK_NAME.pattern})$",
                    "description": "Name that resources call it by",
                }
            },
            "required": ["name"],
        }
    ),
]


def network_of_keys(keys: Mapping[str, Any]) -> Network:
    """Make a network of the keys of an entry, its name among them if it has one.

    Raises RequestInvalid for keys or values that are wrong.
    """
    if not is_plain_json(keys):
        raise RequestInvalid(f"a network must be plain JSON of at most {MAX_VALUES} values")
    left = {key: value for key, value in keys.items() if key != "name"}
    return _made(keys.get("name", ""), left, partial(checked, _ENTRY))


def misplaced_in(network: Network) -> Iterator[str]:
    """Say what is wrong with a network of a mode that it does not name itself."""
    return (f"{each.loc[0]} {each.text}" for each in misplaced(network.setup.mode, network.keys))


def misplaced(mode: str, keys: Mapping[str, Any]) -> Iterator[Refusal]:
    """List keys that the mode cannot heed: nobody would notice that they are not in force."""
    for key, said in keys.items():
        modes = _HEEDED_IN.get(key, MODES)
        asks = said is not None and said != "" and not (said is False and key in _OFF_ANYWHERE)
        if asks and mode not in modes:
            text = f"has no effect in mode {mode}, only in {' and '.join(modes)}: leave it out"
            yield Refusal((key,), text)
    if keys.get("arpTargets") and not keys.get("bond"):
        yield Refusal(("arpTargets",), "are asked by a bond: say bond, too, or leave them out")
    if keys.get("bond") and (other := next((key for key in _NOT_BONDED if keys.get(key)), None)) is not None:
        why = "each VF keeps its own" if other == "mac" else "it joins Ethernet VFs with interfaces"
        yield Refusal((other,), f"cannot be had with bond: {why}; leave one of the two out")


def for_ipam(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave out what an IPAM plugin gets in words of its own, and what came before or is for GC."""
    return {
        key: value
        for key, value in document.items()
        if value is not None and key.casefold() not in _TOLD_ANEW and not key.startswith("cni.dev/")
    }
