"""The entries of `networks`, and what the keys of our own plugin type mean, there and in a CNI configuration.

A key that is not known is refused: a typo must not silently leave a VF open. Both are read once: an entry when the
configuration is loaded, a CNI configuration when it is first met.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from agent.config.reader import MAX_VALUES, Reader, is_plain_json
from agent.config.reader import shown as shown_at
from agent.config.routing import KEYS as ROUTING_KEYS
from agent.config.routing import NO_ROUTING, Routing, read_routing
from agent.config.template import (
    IN_QUOTES,
    NO_WORDS,
    SAMPLE,
    Place,
    filled,
    misunderstood,
    readable,
    unquoted,
    words_of,
)
from agent.config.trunk import with_trunk
from agent.errors import RequestInvalid
from agent.model.allocation import NO_SETTINGS, VfSettings
from agent.model.fields import Fields, is_list, is_text, shown
from agent.model.printable import unknown

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
_SETTINGS = ("mac", "vlan", "vlanQoS", "vlanProto", "min_tx_rate", "max_tx_rate", "spoofchk", "trust", "link_state")
_OF_BONDS = ("bond", "arpTargets")
_RARE = ("trunk", "master", "pkey", "vfio", "functionReset", "altNames", "macvlanMode", "ipvlanMode", *_OF_BONDS)
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
    """What of a device its templates ask for: then all else is but a sample, and `at` tells what is meant."""
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
        setup, ifname = _read_entry(keys)
        return replace(self, setup=replace(setup, mode=self.setup.mode), keys=keys, ifname=ifname, words=NO_WORDS)

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


def read_network(reader: Reader) -> Network:
    """Read one entry: `name`, and what a CNI configuration of ours may say, but for what is another for each pod."""
    name = reader.text("name", None, "a lower-case DNS label", NETWORK_NAME, about="Name that resources call it by")
    if "name" not in reader.value:
        reader.note("name", "is missing")
    keys = {key: value for key, value in reader.value.items() if key != "name"}
    strange = [key for key, value in keys.items() if not is_plain_json(value)]
    for key in strange:
        reader.note(key, f"must be plain JSON values, not dates or the like, is {shown_at(keys[key], key)}")
    for key in _OF_EACH_POD:
        if keys.get(key):
            reader.note(key, "is chosen for each pod, so leave it out")
    bare = {} if strange else dict(unquoted(keys))
    for key, text in bare.items():
        reader.note(key, f"is {text} without quotes: {IN_QUOTES}")
    templates = [] if strange else list(misunderstood(keys))
    for text in templates:
        reader.note("", text)
    problems: list[str] = []
    network = _network(name or "", readable({key: keys[key] for key in keys if key not in strange}), problems)
    for problem in dict.fromkeys(problems):
        reader.note("", problem)
    if not (strange or bare or templates or problems):
        return network
    mode = keys["mode"] if keys.get("mode") in MODES else "vf"
    return Network(name or "", Setup(mode=mode), keys)  # of one that is wrong


def misplaced_in(network: Network) -> Iterator[str]:
    """Say what is wrong with a network of a mode that it does not name itself."""
    return _misplaced(network.setup.mode, network.keys)


def network_of_keys(keys: Mapping[str, Any]) -> Network:
    """Make a network of the keys of an entry, its name among them if it has one.

    Raises RequestInvalid for a key or value that is wrong.
    """
    if not is_plain_json(keys):
        raise RequestInvalid(f"a network must be plain JSON of at most {MAX_VALUES} values")
    return _network(keys.get("name", ""), {key: value for key, value in keys.items() if key != "name"})


def _network(name: str, keys: Mapping[str, Any], problems: list[str] | None = None) -> Network:
    words = words_of(keys)
    setup, ifname = _read_entry(filled(keys, SAMPLE) if words else keys, problems)
    return Network(name, setup, keys, ifname, words)


def _read_entry(keys: Mapping[str, Any], problems: list[str] | None = None) -> tuple[Setup, str]:
    fields = Fields({key: value for key, value in keys.items() if key not in _OF_EACH_POD}, problems=problems)
    fields.word("type", (OWN,))
    fields.take("cniVersion", is_text, "a text such as 1.0.0")
    setup = read_setup(fields)
    ifname = fields.text("ifName", "", is_ifname, WANTED_IFNAME)
    if ifname == PODS_OWN:
        fields.refuse(f"ifName must not be {PODS_OWN}, which is the pod's own interface: take another name")
    refuse_unknown(fields)
    return setup, ifname


def is_ifname(text: str) -> bool:
    """Tell whether interfaces of pods may be called so; %d stands for a number."""
    return _IFNAMES.fullmatch(text) is not None


def read_setup(fields: Fields) -> Setup:
    """Read what the keys of our own type ask for. Refuses what is wrong, with its path."""
    mode = fields.word("mode", MODES) or "vf"
    ipam = read_ipam(fields, is_infiniband=mode == "ipoib")
    setup = Setup(
        mode=mode,
        settings=read_settings(fields, fields.switch),
        mtu=fields.whole("mtu", 68, MAX_MTU),
        ipam=ipam,
        for_ipam=for_ipam(fields.document) if ipam is not None else {},
        guid=fields.guid("guid"),
        rdma=fields.flag("rdma"),
    )
    if fields.has_any(_RARE):  # a pod's start waits: what is seldom there is not looked at key by key
        setup = replace(
            setup,
            settings=with_trunk(fields, setup.settings),
            master=interface_name(fields, "master"),
            pkey=_pkey(fields),
            vfio=fields.flag("vfio"),
            function_reset=bool(fields.flag("functionReset")),
            altnames=_listed(fields, "altNames", _ALTNAME, "interface names of at most 127 characters each"),
            macvlan_mode=fields.word("macvlanMode", MACVLAN_MODES) or "bridge",
            ipvlan_mode=fields.word("ipvlanMode", IPVLAN_MODES) or "l2",
            bond=fields.word("bond", BONDS) or None,
            arp_targets=_listed(fields, "arpTargets", _IPV4, "IPv4 addresses"),
        )
    if fields.has_any(ROUTING_KEYS):
        setup = replace(setup, routing=read_routing(fields, has_addresses=bool(fields.document.get("ipam"))))
    if fields.document.get("mode") in (None, "", mode):
        for text in _misplaced(mode, fields.document):
            fields.refuse(text)
    return setup


def refuse_unknown(fields: Fields) -> None:
    """Refuse a key that nobody asked for and that means nothing elsewhere either."""
    for key in fields.unasked():
        if key not in FOREIGN and not key.startswith("cni.dev/"):
            fields.refuse(f"{shown(key)[1:-1]} {unknown(key, fields.asked)}")


def _misplaced(mode: str, keys: Mapping[str, Any]) -> Iterator[str]:
    """Tell of keys that the mode cannot heed: nobody would notice that they are not in force."""
    for key, value in keys.items():
        modes = _HEEDED_IN.get(key, MODES)
        asks = value is not None and value != "" and not (value is False and key in _OFF_ANYWHERE)
        if asks and mode not in modes:
            yield f"{key} has no effect in mode {mode}, only in {' and '.join(modes)}: leave it out"
    if keys.get("arpTargets") and not keys.get("bond"):
        yield "arpTargets are asked by a bond: say bond, too, or leave them out"
    if keys.get("bond") and (other := next((key for key in _NOT_BONDED if keys.get(key)), None)) is not None:
        why = "each VF keeps its own" if other == "mac" else "it joins Ethernet VFs with interfaces"
        yield f"{other} cannot be had with bond: {why}; leave one of the two out"


def read_ipam(fields: Fields, *, is_infiniband: bool, may_be_empty: bool = False) -> Mapping[str, Any] | None:
    """Read `ipam`, None where no addresses are asked for. With `may_be_empty` also where it names no plugin."""
    ipam = fields.mapping("ipam")
    if not ipam:
        return None
    name = fields.inside("ipam").take("type", is_text, "the name of an IPAM plugin")
    if not name and may_be_empty:
        return None
    if not name or not _PLUGIN_TYPE.fullmatch(name):
        fields.refuse(f"ipam.type must be the name of an IPAM plugin, is {shown(name)}")
        return None
    if name in NO_IPAM:
        fields.refuse(
            f"ipam.type must be the name of an IPAM plugin, is {shown(name)}, which leases no addresses: take"
            " host-local, whereabouts or the like"
        )
    if name == "dhcp" and is_infiniband:
        fields.refuse("ipam.type must not be dhcp, which knows no InfiniBand addresses: take host-local or the like")
    return {**ipam, "type": name}


def for_ipam(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave out what is told to an IPAM plugin in words of its own, and what came before or is for GC."""
    return {
        key: value
        for key, value in document.items()
        if value is not None and key.casefold() not in _TOLD_ANEW and not key.startswith("cni.dev/")
    }


def read_settings(fields: Fields, switch: Callable[[str], bool | None]) -> VfSettings:
    """Read what a PF is to enforce on a VF. `switch` reads what is on or off."""
    if not fields.has_any(_SETTINGS):
        return NO_SETTINGS
    vlan = fields.whole("vlan", 0, 4094)
    qos = fields.whole("vlanQoS", 0, 7)
    proto = fields.word("vlanProto", ("802.1q", "802.1ad", "802.1Q", "802.1AD", "802.1Ad"))
    if not vlan and not fields.document.get("vlan") and (qos or (proto or "").lower() == "802.1ad"):
        fields.refuse("vlanQoS and vlanProto 802.1ad need a vlan from 1 to 4094")
    low, high = fields.whole("min_tx_rate", 0, MAX_RATE), fields.whole("max_tx_rate", 0, MAX_RATE)
    if low and high and low > high:
        fields.refuse(f"min_tx_rate {low} is above max_tx_rate {high} (Mbit/s)")
    return VfSettings(
        mac=fields.mac("mac"),
        vlan=vlan,
        vlan_qos=qos,
        vlan_proto=proto.lower() if proto else None,
        min_tx_rate=low,
        max_tx_rate=high,
        spoofchk=switch("spoofchk"),
        trust=switch("trust"),
        link_state=fields.word("link_state", LINK_STATES),
    )


def interface_name(fields: Fields, key: str) -> str | None:
    """Read an interface's name. Refuses a text that is none."""
    return fields.text(key, "", _IFNAME.fullmatch, "an interface name of at most 15 characters") or None


def _pkey(fields: Fields) -> int | None:
    value = fields.take("pkey", _is_pkey, "a partition key from 1 to 0xffff, such as 0x8001")
    return _pkey_of(value) if value is not None and value != "" else None


def _is_pkey(value: object) -> bool:
    return value == "" or _pkey_of(value) is not None


def _pkey_of(value: object) -> int | None:
    """Read a partition key. Its top bit says full member; the other 15 must not all be zero."""
    if isinstance(value, str) and re.fullmatch(r"0[xX][0-9a-fA-F]{1,4}|[0-9]{1,5}", value):
        value = int(value, 16 if value[:2] in ("0x", "0X") else 10)
    if type(value) is not int or not 0 < value <= 0xFFFF or not value & 0x7FFF:
        return None
    return value


def _listed(fields: Fields, key: str, pattern: re.Pattern[str], what: str) -> tuple[str, ...]:
    def are(value: Any) -> bool:
        return is_list(value) and len(value) <= MAX_LISTED and all(is_text(n) and pattern.fullmatch(n) for n in value)

    return tuple(dict.fromkeys(fields.take(key, are, f"a list of at most {MAX_LISTED} {what}") or ()))
